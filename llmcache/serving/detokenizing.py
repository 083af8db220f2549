"""Stop texts, which end an answer, and the texts of single tokens."""

from collections.abc import Sequence
from typing import Any, Final

_UNFINISHED: Final = "\ufffd"  # what a tokenizer makes of a character whose last bytes are in the next token
_SPACE: Final = "\u2581"  # what sentencepiece writes for a space


class StopTexts:
    """Finds the first of some texts, across pieces, and cuts it off with what follows."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for these, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """Return the text that is safe to send after a piece, and whether the answer ends there."""
        self._held += piece
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        if found:
            return self._held[: min(found)], True
        n_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        told = self._held[: len(self._held) - n_held]
        self._held = self._held[len(told) :]
        return told, False

    def rest(self) -> str:
        """Return what was held back, at the end of an answer without a stop text."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TokenTexts:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _bytes_of_characters() if _is_byte_level(tokenizer) else {}

    def text(self, token: int) -> str:
        """Return the text of a token; U+FFFD stands for bytes that are no whole character."""
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        return " " + text if name.startswith(_SPACE) and not text.startswith(" ") else text

    def utf8(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None: the tokenizer does not tell them."""
        text = self.text(token)
        if _UNFINISHED not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if name.startswith("<0x") and name.endswith(">"):  # a byte that sentencepiece has no token for
            return [int(name[3:-1], 16)]
        found = [self._bytes.get(character) for character in name]
        return None if not name or None in found else [byte for byte in found if byte is not None]


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in str(getattr(backend, "decoder", None))


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as GPT-2 defined it.

    Printable bytes of Latin-1 are themselves; the others, in order, are the characters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
