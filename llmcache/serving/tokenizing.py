"""From texts to tokens, off the event loop. What the tokenizer is told for one request never reaches another one.

Fast tokenizers keep truncation as a state of their own, which two threads must not set at once. So a copy that never
cuts encodes every text, and what is too long is encoded once more by the tokenizer itself, under a lock.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmcache.serving.refusals import Refusal

#: A text, a pair of texts, or token ids, special tokens included.
Item = str | tuple[str, str] | list[int]
Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input in the model's tokens.

    Attributes:
        ids: Special tokens included, at least one.
        types: Token type ids, as many; () where the model takes none.
        n_cut: Tokens that were cut off.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()
    n_cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizing:
    """One model's tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, max_length: int, vocabulary: int) -> None:
        """Take a tokenizer.

        Args:
            tokenizer: Of transformers.
            max_length: Tokens of the longest input, special ones included.
            vocabulary: Ids that the model knows are below this.
        """
        self.max_length = max_length
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer = copy.deepcopy(tokenizer)  # what is set here is not seen elsewhere
        self.takes_types = "token_type_ids" in tokenizer.model_input_names
        self._fast = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._lock = threading.Lock()

    def encode(self, items: Sequence[Item], truncate: bool, side: Side = "right") -> list[Tokens | Refusal]:
        """Tokens of each input, or why it has none.

        Args:
            items: What to encode.
            truncate: Cut what is too long; else it is refused.
            side: Where it is cut.
        """
        return [self._encode(item, truncate, side) for item in items]

    def pieces(self, text: str, add_special_tokens: bool) -> list[dict[str, Any]]:
        """Each token of a text: `id`, `text`, `special`, and `start` and `stop` in characters, None of special ones.

        Raises:
            Refusal: The text is no Unicode text.
        """
        _check(text)
        if self._fast is None:
            with self._lock:
                ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            special = set(self._tokenizer.all_special_ids)
            return [
                {"id": one, "text": self.decode([one], False), "special": one in special, "start": None, "stop": None}
                for one in ids
            ]
        made = self._fast.encode(text, add_special_tokens=add_special_tokens)
        columns = zip(made.ids, made.tokens, made.special_tokens_mask, made.offsets, strict=True)
        return [
            {
                "id": one,
                "text": token if is_special else text[start:stop],
                "special": bool(is_special),
                "start": None if is_special else start,
                "stop": None if is_special else stop,
            }
            for one, token, is_special, (start, stop) in columns
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of tokens.

        Raises:
            Refusal: An id is not of the vocabulary.
        """
        self._check_ids(ids)
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, item: Item, truncate: bool, side: Side) -> Tokens | Refusal:
        try:
            tokens = self._given(item) if isinstance(item, list) else self._tokenised(item)
            return self._fitted(tokens, item, truncate, side)
        except Refusal as refusal:
            return refusal
        except Exception:  # of a tokenizer: its text may quote the input
            return Refusal("tokenizer", "`inputs`: the tokenizer failed on this input")

    def _given(self, ids: list[int]) -> Tokens:
        self._check_ids(ids)
        return Tokens(tuple(ids), (0,) * len(ids) if self.takes_types else ())

    def _tokenised(self, item: str | tuple[str, str]) -> Tokens:
        texts = (item,) if isinstance(item, str) else item
        for text in texts:
            _check(text)
        if self._fast is not None:
            made = self._fast.encode(*texts)
            return Tokens(tuple(made.ids), tuple(made.type_ids) if self.takes_types else ())
        with self._lock:
            named = self._tokenizer(*texts)
        types = named.get("token_type_ids") if self.takes_types else None
        return Tokens(tuple(named["input_ids"]), () if types is None else tuple(types))

    def _fitted(self, tokens: Tokens, item: Item, truncate: bool, side: Side) -> Tokens:
        if len(tokens) == 0:
            raise Refusal("empty", "`inputs` cannot be empty")
        n_over = len(tokens) - self.max_length
        if n_over <= 0:
            return tokens
        if not truncate:
            raise Refusal(
                "invalid",
                f"`inputs` must have at most {self.max_length} tokens. Given: {len(tokens)}; shorten it, or set "
                "`truncate`",
            )
        if isinstance(item, list):
            cut = slice(n_over, None) if side == "left" else slice(self.max_length)
            return Tokens(tokens.ids[cut], tokens.types[cut], n_over)
        return self._cut(item, n_over, side)

    def _cut(self, item: str | tuple[str, str], n_over: int, side: Side) -> Tokens:
        """Encode again and cut, of a pair the longer text first, as tokenizers do by default."""
        texts = (item,) if isinstance(item, str) else item
        with self._lock:
            before, self._tokenizer.truncation_side = self._tokenizer.truncation_side, side
            try:
                named = self._tokenizer(*texts, truncation=True, max_length=self.max_length)
            finally:
                self._tokenizer.truncation_side = before
        types = named.get("token_type_ids") if self.takes_types else None
        return Tokens(tuple(named["input_ids"]), () if types is None else tuple(types), n_over)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= one < self._vocabulary for one in ids):
            raise Refusal("invalid", f"`inputs`: token ids are from 0 to {self._vocabulary - 1}")


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal("tokenizer", "`inputs`: the text is no valid Unicode (a lone surrogate)") from error
