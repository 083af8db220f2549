"""From tokens to text while they come: an answer goes on with its prompt, and no character is torn apart."""

from collections.abc import Sequence
from typing import Any, Final

_UNFINISHED: Final = "\ufffd"  # what a tokenizer makes of a character whose last bytes are in the next token
_BEFORE: Final = 8  # tokens of the prompt that an answer is decoded with: two characters at least


class Detokenizer:
    """The text of one answer, in pieces that no later token changes. A token costs the same at any length.

    Together they are the text of prompt and answer without that of the prompt. The answer by itself has another text:
    sentencepiece takes off the space that a text begins with.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        """Begin an answer.

        Args:
            tokenizer: Of the model.
            prompt: Token ids that the answer follows; kept are the last few.
        """
        self._tokenizer = tokenizer
        self._ids = self._end_of(prompt)
        self._begin = 0  # tokens from here on are decoded, as what stands before a token may change its text
        self._told = len(self._ids)  # tokens up to here have been told, or are the prompt's

    def add(self, token: int) -> str:
        """What a token adds; empty while it ends within a character."""
        self._ids.append(token)
        return self._piece(is_whole=False)

    def rest(self) -> str:
        """What was held back, at the end of the answer."""
        return self._piece(is_whole=True)

    def _piece(self, is_whole: bool) -> str:
        before, now = self._decode(self._ids[self._begin : self._told]), self._decode(self._ids[self._begin :])
        if now.endswith(_UNFINISHED) and not is_whole:
            return ""
        if not now.startswith(before):  # of a prompt that ends within a character, which is whole now
            before = before.rstrip(_UNFINISHED)
        piece = now[len(before) :]
        if piece:  # tokens without text, as special ones, tell nothing of what comes after them
            self._begin, self._told = self._told, len(self._ids)
        return piece

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last few tokens of a prompt; more where these have no text, as special ones have not."""
        n = _BEFORE
        while n < len(prompt) and not self._decode(prompt[-n:]):
            n *= 2
        return list(prompt[-n:])

    def _decode(self, ids: Sequence[int]) -> str:
        # Without cleaning up, which would take back a space that was told already.
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
