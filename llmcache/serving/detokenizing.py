"""Detection of stop texts, and the texts of single tokens."""

from collections.abc import Sequence
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

_REPLACEMENT: Final = "\ufffd"  # decoded in place of a character whose last bytes are in the next token
_SPACE: Final = "\u2581"  # sentencepiece's mark for a space


class StopTexts:
    """Finds the first stop text in a streamed answer and cuts the answer off before it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for `stops`, none of which may be empty."""
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """Add a piece; return the text that is safe to send, and whether a stop text ends the answer there."""
        self._held += piece
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            return self._held[: min(found)], True
        n_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        released = self._held[: len(self._held) - n_held]
        self._held = self._held[len(released) :]
        return released, False

    def rest(self) -> str:
        """Return the text held back, at the end of an answer without a stop text."""
        released, self._held = self._held, ""
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TokenTexts:
    """Texts and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", None))
        alphabet: dict[int, str] = bytes_to_unicode() if is_byte_level else {}  # type: ignore[no-untyped-call]
        self._bytes = {one: byte for byte, one in alphabet.items()}

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for bytes that do not form a whole character."""
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        return " " + text if name.startswith(_SPACE) and not text.startswith(" ") else text

    def utf8(self, token: int) -> list[int] | None:
        """Return the UTF-8 bytes of a token, or None if the tokenizer does not reveal them."""
        text = self.text(token)
        if _REPLACEMENT not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if name.startswith("<0x") and name.endswith(">"):  # sentencepiece's byte fallback
            return [int(name[3:-1], 16)]
        found = [self._bytes.get(character) for character in name]
        return None if not name or None in found else [byte for byte in found if byte is not None]
