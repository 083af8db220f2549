"""The prompt cache: from a text or a chat to token ids; what was asked before is neither formatted nor tokenised again.

It comes before the `prefix` rung: here a prompt is known as a whole or not at all, there the longest beginning counts.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from llmcache.errors import RequestError
from llmcache.threads import forkable

Message = Mapping[str, Any]
Truncate = Literal["left", "error"]

_Value = TypeVar("_Value")
_TELLS_THE_TIME = "strftime_now"  # a chat template that calls this gives another text tomorrow


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the model's tokens.

    Attributes:
        ids: Token ids, at least one.
        is_hit: They were known.
        n_dropped: Tokens that were cut off on the left, to keep to the longest length.
    """

    ids: tuple[int, ...]
    is_hit: bool
    n_dropped: int


class PromptCache:
    """Prompts of one tokenizer. Thread-safe.

    A text is known by its characters, the tokenizer's tokens, and whether special tokens are added. The text that a
    chat comes to is known by its messages and the chat template; templates that tell the time are asked anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None = None,
        truncate: Truncate = "error",
        max_entries: int = 1024,
    ) -> None:
        """Begin with no prompt known.

        Args:
            tokenizer: Of the model; tokens that are added to it later count, and which of them are special. After other
                edits call `clear`.
            max_length: Tokens of the longest prompt, at least 1; None: any.
            truncate: What is done about a longer one: drop its beginning (`left`), all but the token that every text
                begins with; or an error.
            max_entries: Prompts held; the one used longest ago leaves.

        Raises:
            RequestError: A setting is out of its range.
        """
        lengths = (max_entries, 1 if max_length is None else max_length)
        if not all(isinstance(n, int) and n >= 1 for n in lengths) or truncate not in ("left", "error"):
            raise RequestError(
                f"max_length={max_length!r}, truncate={truncate!r}, max_entries={max_entries!r}: lengths and entries "
                "are whole numbers, at least 1, truncate is 'left' or 'error'"
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._truncate = truncate
        self._texts: _Latest[str] = _Latest(max_entries)
        self._tokens: _Latest[tuple[int, ...]] = _Latest(max_entries)

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, prompt: str | Sequence[Message]) -> Prompt:
        """Token ids of a prompt.

        Args:
            prompt: A text, which gets the tokenizer's special tokens; or messages (`role`, `content`), which the chat
                template turns into a text that has them, up to where the answer begins.

        Raises:
            RequestError: It is empty, or longer than allowed, or no text; or there is no chat template, or it refuses
                these messages.
        """
        is_text = isinstance(prompt, str)
        # Of a subclass of str its characters, which is what tokenizers read, whatever its own methods say.
        text = str.__str__(prompt) if isinstance(prompt, str) else self._formatted(prompt)
        _check_text(text)
        tokenizer = self._tokenizer
        flags = (getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token"))
        key = (text, is_text, len(tokenizer), str(tokenizer.special_tokens_map), *flags)
        ids, is_hit = self._tokens.get(key, lambda: tuple(tokenizer(text, add_special_tokens=is_text)["input_ids"]))
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        n_dropped = max(0, len(ids) - (self._max_length or len(ids)))
        if n_dropped and self._truncate == "error":
            raise RequestError(
                f"the prompt has {len(ids)} tokens, of which the model can take {self._max_length} here: shorten it, "
                "or choose truncate='left'"
            )
        return Prompt(self._cut(ids, n_dropped), is_hit, n_dropped)

    def clear(self) -> None:
        """Forget all prompts."""
        self._texts.clear()
        self._tokens.clear()

    def _cut(self, ids: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Without `n` tokens on the left; the one that every text begins with stays, as in truncation by tokenizers."""
        begin = ids[:1] if n and len(ids) > n + 1 and ids[0] == self._tokenizer.bos_token_id else ()
        return begin + ids[n + len(begin) :]

    def _formatted(self, messages: Sequence[Message]) -> str:
        template = self._tokenizer.chat_template
        if not template:
            raise RequestError("this tokenizer has no chat template: give the prompt as one text")
        if not isinstance(messages, Sequence) or not messages or not all(isinstance(one, Mapping) for one in messages):
            raise RequestError(f"give a text, or messages of role and content, one at least (got {messages!r})")

        plain = [dict(one) for one in messages]

        def form() -> str:
            try:
                made = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates are programs, and refuse what they like with what they like
                raise RequestError(f"the tokenizer's chat template does not take these messages: {error}") from error
            return str(made)

        named = None if _TELLS_THE_TIME in str(template) else _name(plain)
        return form() if named is None else self._texts.get((str(template), named), form)[0]


def _check_text(text: str) -> None:
    """Refuse what is not Unicode: bytes of another encoding, which the terminal or a file handed on."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is no valid text: character {error.start} ({text[error.start]!r}) stands for a byte that is "
            "not UTF-8"
        ) from error


def _name(messages: Sequence[Message]) -> str | None:
    """Messages as JSON, fields in the order that a template sees; None where others may have the same, or none."""
    try:
        return json.dumps(messages, ensure_ascii=False) if _is_plain(messages) else None
    except RecursionError:
        return None


def _is_plain(value: Any) -> bool:
    """Whether no other value has this one's JSON: it is of JSON's own types throughout, and of no subclass of them."""
    if type(value) is dict:
        return all(type(name) is str and _is_plain(inner) for name, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


class _Latest(Generic[_Value]):
    """Values by key; the one used longest ago leaves. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[Hashable, _Value] = OrderedDict()
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable, make: Callable[[], _Value]) -> tuple[_Value, bool]:
        """The value, and whether it was held; else it is made now, outside the lock, and held."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key], True
        made = make()
        with self._lock:
            self._held[key] = made
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return made, False

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
