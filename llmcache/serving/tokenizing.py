"""From texts to tokens, off the event loop. What the tokenizer is told for one request never reaches another one.

Fast tokenizers keep truncation as a state of their own, which two threads must not set at once. So a copy that never
cuts encodes every text, and what is too long is cut here, by the same rules. It encodes by `encode_batch` alone: other
threads run meanwhile, which `encode` lets none of.
"""

import copy
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from llmcache.serving.refusals import Refusal, described

logger = logging.getLogger("llmcache.serving")

Side = Literal["left", "right"]

#: Characters of a request from which on it is tokenised apart: some 2,000 tokens, which take 4 ms.
LONG: Final = 8192


@dataclass(frozen=True, slots=True)
class Prompted:
    """A text, or a pair, that goes after one of the model's prompts."""

    prompt: str
    texts: tuple[str, ...]


#: A text, one with a prompt, a pair of texts, or token ids, special tokens included.
Item = str | Prompted | tuple[str, str] | list[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One input in the model's tokens."""

    ids: tuple[int, ...]  # special tokens included, at least one
    types: tuple[int, ...] = ()  # token type ids, as many; none where the model takes none
    n_prompt: int = 0  # tokens at the beginning that the model's pooling leaves out

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizing:
    """One model's tokenizer. Thread-safe. Refusals say what an input is or has; `Fields` names it."""

    def __init__(
        self, tokenizer: Any, max_length: int, vocabulary: int, prompts: Iterable[str] = (), is_pooled: bool = True
    ) -> None:
        """Take a tokenizer of transformers, for ids below `vocabulary`.

        The `prompts` may go before an input; if `is_pooled`, their tokens are pooled as those of inputs are.
        """
        self.max_length = max_length
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer = copy.deepcopy(tokenizer)  # what is set here is not seen elsewhere
        self.takes_types = "token_type_ids" in tokenizer.model_input_names
        self._fast: Any = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._lock = threading.Lock()
        self._n_prompt = {prompt: 0 if is_pooled else self._length(prompt) for prompt in prompts}

    def encode(self, items: Sequence[Item], truncate: bool, side: Side = "right") -> list[Tokens | Refusal]:
        """Return the tokens of each input, or why it has none; what is too long is refused, unless `truncate`."""
        return [self._encode(item, truncate, side) for item in items]

    def pieces(self, text: str, add_special_tokens: bool) -> Iterator[dict[str, Any]]:
        """Yield each token: `id`, `text`, `special`, and `start` and `stop` in characters, None of special ones.

        They are made as they are read: to collect a million objects at once holds everybody up. A text that is no
        Unicode is refused at once.
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
        return (
            {"id": one, "text": self._fast.id_to_token(one), "special": True, "start": None, "stop": None}
            if is_special
            else _piece(text, one, *made.token_to_chars(i))
            for i, (one, is_special) in enumerate(zip(made.ids, made.special_tokens_mask, strict=True))
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of tokens; ids that are not of the vocabulary are refused."""
        self._check_ids(ids)
        with self._lock:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _encode(self, item: Item, truncate: bool, side: Side) -> Tokens | Refusal:
        try:
            if isinstance(item, list):
                return self._given(item, truncate, side)
            texts = _texts(item)
            n_prompt = self._n_prompt[item.prompt] if isinstance(item, Prompted) else 0
            for text in texts:
                _check(text)
            ids, types, n_over = (self._slowly if self._fast is None else self._quickly)(texts, truncate, side)
            if side == "left":
                n_prompt = max(0, n_prompt - n_over)
            return Tokens(tuple(ids), tuple(types) if self.takes_types else (), n_prompt)
        except Refusal as refusal:
            return refusal
        except Exception as error:
            logger.error("the tokenizer failed on an input: %s", described(error))
            return Refusal("tokenizer", "made the tokenizer fail")

    def _given(self, ids: list[int], truncate: bool, side: Side) -> Tokens:
        self._check_ids(ids)
        n_over = self._over(len(ids), truncate)
        kept = tuple(ids[n_over:] if side == "left" else ids[: len(ids) - n_over])
        return Tokens(kept, (0,) * len(kept) if self.takes_types else ())

    def _length(self, prompt: str) -> int:
        """Count a prompt's tokens without a special one at its end: as many sentence-transformers leaves out."""
        made = self._encode(prompt, True, "right") if prompt else None
        if not isinstance(made, Tokens):
            return 0
        return len(made) - (made.ids[-1] in self._tokenizer.all_special_ids)

    def _quickly(self, texts: tuple[str, ...], truncate: bool, side: Side) -> tuple[list[int], list[int], int]:
        """Return ids, types, and how many tokens were cut off."""
        (made,) = self._fast.encode_batch([texts if len(texts) == 2 else texts[0]])
        if n_over := self._over(len(made), truncate):
            made = self._cut(texts, side)
        return made.ids, made.type_ids, n_over

    def _cut(self, texts: tuple[str, ...], side: Side) -> Any:
        """Encode texts and cut them, of a pair the longer one first, as fast tokenizers do by default."""
        parts = self._fast.encode_batch(list(texts), add_special_tokens=False)
        room = max(0, self.max_length - self._fast.num_special_tokens_to_add(len(texts) == 2))
        short = min(parts, key=len)
        n_short = min(len(short), room // 2) if len(texts) == 2 else room
        for part in parts:
            n = n_short if part is short else room - n_short
            while len(part) > n:  # by halves: at once it would keep all that is cut off, in parts of so many tokens
                part.truncate(max(n, len(part) // 2), direction=side)
        return self._fast.post_process(*parts)

    def _slowly(self, texts: tuple[str, ...], truncate: bool, side: Side) -> tuple[list[int], list[int], int]:
        """Return the same, by a tokenizer without a fast one behind it."""
        with self._lock:
            named = self._tokenizer(*texts)
            if n_over := self._over(len(named["input_ids"]), truncate):
                before, self._tokenizer.truncation_side = self._tokenizer.truncation_side, side
                try:
                    named = self._tokenizer(*texts, truncation=True, max_length=self.max_length)
                finally:
                    self._tokenizer.truncation_side = before
        return named["input_ids"], named.get("token_type_ids", []), n_over

    def _over(self, n_tokens: int, truncate: bool) -> int:
        """Return how many tokens are to be cut off; none at all, or too many, are refused."""
        if n_tokens == 0:
            raise Refusal("empty", "cannot be empty")
        if n_tokens > self.max_length and not truncate:
            raise Refusal("too_long", f"must have at most {self.max_length} tokens. Given: {n_tokens}")
        return max(0, n_tokens - self.max_length)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= one < self._vocabulary for one in ids):
            raise Refusal("invalid", f"has token ids that are not from 0 to {self._vocabulary - 1}")


def is_long(items: Sequence[Item]) -> bool:
    """Whether inputs have so many characters, or tokens, that others should not wait for them to be tokenised."""
    return sum(len(item) if isinstance(item, list) else sum(map(len, _texts(item))) for item in items) > LONG


def _texts(item: str | Prompted | tuple[str, str]) -> tuple[str, ...]:
    """Return a text, or a pair, with its prompt before it."""
    if isinstance(item, Prompted):
        first, *others = item.texts
        return (item.prompt + first, *others)
    return (item,) if isinstance(item, str) else item


def _piece(text: str, token: int, start: int, stop: int) -> dict[str, Any]:
    return {"id": token, "text": text[start:stop], "special": False, "start": start, "stop": stop}


def _check(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal("tokenizer", "is no valid Unicode (a lone surrogate)") from error
