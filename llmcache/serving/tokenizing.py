"""Tokenises texts off the event loop; settings of one request do not affect others.

Fast tokenizers keep their truncation settings as mutable state, which two threads must not set at once. So a copy
without truncation encodes every text, and long inputs are cut here by the same rules. Only `encode_batch` is used,
because it releases the GIL, which `encode` does not.
"""

import copy
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from llmcache.serving.refusals import Refusal, described

logger = logging.getLogger("llmcache.serving")

Side = Literal["left", "right"]

#: Characters above which a request is tokenised in a separate thread: about 2,000 tokens, which take 4 ms.
LONG: Final = 8192


@dataclass(frozen=True, slots=True)
class Prompted:
    """A text or a pair of texts, with one of the model's prompts to prepend."""

    prompt: str
    texts: tuple[str, ...]


#: A text, a text or pair with a prompt, a pair of texts, or token ids, special tokens included.
Item = str | Prompted | tuple[str, str] | list[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one input."""

    ids: tuple[int, ...]  # token ids, special tokens included; at least one
    types: tuple[int, ...] = ()  # one token type id per token; empty if the model takes none
    n_prompt: int = 0  # tokens at the start that the model's pooling excludes

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizing:
    """One model's tokenizer. Thread-safe. Texts of its refusals lack their subject; `Fields` adds the input's name."""

    def __init__(
        self, tokenizer: Any, max_length: int, vocabulary: int, prompts: Iterable[str] = (), is_pooled: bool = True
    ) -> None:
        """Copy a tokenizer with ids below `vocabulary`; `is_pooled` if pooling includes the tokens of `prompts`."""
        self.max_length = max_length
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer = copy.deepcopy(tokenizer)  # changes here must not affect the caller's
        self.takes_types = "token_type_ids" in tokenizer.model_input_names
        self._fast: Any = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._lock = threading.Lock()
        self._n_prompt = {prompt: 0 if is_pooled else self._length(prompt) for prompt in prompts}

    def encode(self, items: Sequence[Item], truncate: bool, side: Side = "right") -> list[Tokens | Refusal]:
        """Return the tokens or a refusal for each input; those that are too long are cut at `side` if `truncate`."""
        return [self._encode(item, truncate, side) for item in items]

    def pieces(self, text: str, add_special_tokens: bool) -> Iterator[dict[str, Any]]:
        """Return an iterator of tokens: `id`, `text`, `special`, `start` and `stop` in characters (None if special).

        It makes them one by one: a million at once would block other requests. Wrong Unicode raises `Refusal` at once.
        """
        _check(text)
        if self._fast is None:
            with self._lock:
                ids = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            special = set(self._tokenizer.all_special_ids)
            return (
                {"id": one, "text": self.decode([one], False), "special": one in special, "start": None, "stop": None}
                for one in ids
            )
        (made,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)

        def piece(i: int, one: int, is_special: bool) -> dict[str, Any]:
            start, stop = (None, None) if is_special else made.token_to_chars(i)
            shown = self._fast.id_to_token(one) if is_special else text[start:stop]
            return {"id": one, "text": shown, "special": is_special, "start": start, "stop": stop}

        return map(piece, count(), made.ids, map(bool, made.special_tokens_mask))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids. Raises `Refusal` for ids outside the vocabulary."""
        self._check_ids(ids)
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, item: Item, truncate: bool, side: Side) -> Tokens | Refusal:
        try:
            if isinstance(item, list):
                return self._from_ids(item, truncate, side)
            texts = _texts(item)
            n_prompt = self._n_prompt[item.prompt] if isinstance(item, Prompted) else 0
            for text in texts:
                _check(text)
            ids, types, n_over = (self._encode_slow if self._fast is None else self._encode_fast)(texts, truncate, side)
            if side == "left":
                n_prompt = max(0, n_prompt - n_over)
            return Tokens(tuple(ids), tuple(types) if self.takes_types else (), n_prompt)
        except Refusal as refusal:
            return refusal
        except Exception as error:
            logger.error("the tokenizer failed on an input: %s", described(error))
            return Refusal("tokenizer", "made the tokenizer fail")

    def _from_ids(self, ids: list[int], truncate: bool, side: Side) -> Tokens:
        self._check_ids(ids)
        n_over = self._n_excess(len(ids), truncate)
        kept = tuple(ids[n_over:] if side == "left" else ids[: len(ids) - n_over])
        return Tokens(kept, (0,) * len(kept) if self.takes_types else ())

    def _length(self, prompt: str) -> int:
        """Return a prompt's length in tokens without a final special token, as sentence-transformers counts it."""
        made = self._encode(prompt, True, "right") if prompt else None
        if not isinstance(made, Tokens):
            return 0
        return len(made) - (made.ids[-1] in self._tokenizer.all_special_ids)

    def _encode_fast(self, texts: tuple[str, ...], truncate: bool, side: Side) -> tuple[list[int], list[int], int]:
        """Return ids, token types and the number of tokens cut off, by the fast tokenizer."""
        (made,) = self._fast.encode_batch([texts if len(texts) == 2 else texts[0]])
        if n_over := self._n_excess(len(made), truncate):
            made = self._cut(texts, side)
        return made.ids, made.type_ids, n_over

    def _cut(self, texts: tuple[str, ...], side: Side) -> Any:
        """Encode a text or pair, cut to `max_length`; a pair's longer text is cut first, as fast tokenizers do."""
        parts = self._fast.encode_batch(list(texts), add_special_tokens=False)
        room = max(0, self.max_length - self._fast.num_special_tokens_to_add(len(texts) == 2))
        short = min(parts, key=len)
        n_short = min(len(short), room // 2) if len(texts) == 2 else room
        for part in parts:
            n = n_short if part is short else room - n_short
            while len(part) > n:  # in halves: a single call would also build the overflow, in pieces of n tokens
                part.truncate(max(n, len(part) // 2), direction=side)
        return self._fast.post_process(*parts)

    def _encode_slow(self, texts: tuple[str, ...], truncate: bool, side: Side) -> tuple[list[int], list[int], int]:
        with self._lock:
            named = self._tokenizer(*texts)
            if n_over := self._n_excess(len(named["input_ids"]), truncate):
                before, self._tokenizer.truncation_side = self._tokenizer.truncation_side, side
                try:
                    named = self._tokenizer(*texts, truncation=True, max_length=self.max_length)
                finally:
                    self._tokenizer.truncation_side = before
        return named["input_ids"], named.get("token_type_ids", []), n_over

    def _n_excess(self, n_tokens: int, truncate: bool) -> int:
        """Return the number of tokens to cut off. Raises `Refusal` for no tokens, or for too many unless `truncate`."""
        if n_tokens == 0:
            raise Refusal("empty", "cannot be empty")
        if n_tokens > self.max_length and not truncate:
            raise Refusal("too_long", f"must have at most {self.max_length} tokens. Given: {n_tokens}")
        return max(0, n_tokens - self.max_length)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= one < self._vocabulary for one in ids):
            raise Refusal("invalid", f"has token ids that are not from 0 to {self._vocabulary - 1}")


def is_long(items: Sequence[Item]) -> bool:
    """Whether inputs have more than `LONG` characters or token ids in all, so that others should not wait for them."""
    return n_characters(items) > LONG


def n_characters(items: Sequence[Item]) -> int:
    """Return the characters and token ids of inputs in all, prompts and repeated queries included."""
    parts = ((item.prompt, *item.texts) if isinstance(item, Prompted) else item for item in items)
    return sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in parts)


def _texts(item: str | Prompted | tuple[str, str]) -> tuple[str, ...]:
    """Return the text or pair of an item, with its prompt prepended."""
    if isinstance(item, Prompted):
        return (item.prompt + item.texts[0], *item.texts[1:])
    return (item,) if isinstance(item, str) else item


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal("tokenizer", "is not valid Unicode (a lone surrogate)") from error
