"""Converts tokens to text as they are generated: continues the prompt's text, and splits no character."""

from collections.abc import Sequence
from typing import Any, Final

_UNFINISHED: Final = "\ufffd"  # decoded from a character whose last bytes are in the next token
_N_CONTEXT: Final = 8  # last tokens of the prompt that are decoded with the answer: two characters at least


class Detokenizer:
    """The text of one answer, in pieces that no later token changes. The cost per token does not grow with the length.

    The pieces together are the text of prompt and answer, less the prompt's. Decoding the answer alone would differ:
    sentencepiece strips the space at the start of a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """Begin an answer to a prompt, of whose token ids the last few are kept: more if these have no text."""
        self._tokenizer = tokenizer
        n = _N_CONTEXT
        while n < len(prompt) and not self._decode(prompt[-n:]):
            n *= 2
        self._ids = list(prompt[-n:])
        self._begin = 0  # decode from this token on, since the tokens before a token may change its text
        self._emitted = len(self._ids)  # tokens before this one were returned as text, or are the prompt's

    def add(self, token: int) -> str:
        """Add a token and return its text; "" while it ends within a character."""
        self._ids.append(token)
        return self._piece(is_whole=False)

    def rest(self) -> str:
        """Return the text held back so far, at the end of the answer."""
        return self._piece(is_whole=True)

    def _piece(self, is_whole: bool) -> str:
        before, now = self._decode(self._ids[self._begin : self._emitted]), self._decode(self._ids[self._begin :])
        if now.endswith(_UNFINISHED) and not is_whole:
            return ""
        if not now.startswith(before):  # the prompt ended within a character that is complete now
            before = before.rstrip(_UNFINISHED)
        piece = now[len(before) :]
        if piece:  # not for tokens without text (special ones): they give no context for the next
            self._begin, self._emitted = self._emitted, len(self._ids)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Without cleanup, which would remove a space that was already returned.
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
