"""The prompt cache: token ids of texts and chats, so that a repeated prompt is neither formatted nor tokenised again.

It comes before the `prefix` rung. It finds whole prompts only; the rung finds the longest stored prefix.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from llmcache.errors import RequestError

Message = Mapping[str, Any]
Truncate = Literal["left", "error"]

_READS_THE_CLOCK = "strftime_now"  # chat templates that call it give different texts on different days


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes:
        ids: Token ids, at least one.
        is_hit: Whether the ids came from the prompt cache.
        n_dropped: Tokens cut off on the left because of `max_length`.
    """

    ids: tuple[int, ...]
    is_hit: bool
    n_dropped: int


class PromptCache:
    """Caches the token ids of prompts, for one tokenizer. Thread-safe.

    The key of a text is its characters, the tokenizer's number of tokens and special tokens, and whether special tokens
    are added. The key of a chat's text is its messages, the chat template and the special tokens; templates that read
    the clock run anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None = None,
        truncate: Truncate = "error",
        max_entries: int = 1024,
    ) -> None:
        """Begin empty.

        Args:
            tokenizer: The model's tokenizer. Tokens added later are noticed, and changes of special tokens. After other
                edits, call `clear`.
            max_length: Largest number of tokens of a prompt, at least 1; None: no limit.
            truncate: For a longer prompt, `left` drops its first tokens except the BOS token, `error` raises.
            max_entries: Largest number of prompts held; the least recently used is evicted.

        Raises:
            RequestError: A setting is out of its range.
        """
        lengths = (max_entries, 1 if max_length is None else max_length)
        if not all(isinstance(n, int) and n >= 1 for n in lengths) or truncate not in ("left", "error"):
            raise RequestError(
                f"max_length={max_length!r}, truncate={truncate!r}, max_entries={max_entries!r}: lengths and entries "
                "are whole numbers, at least 1, truncate is 'left' or 'error'"
            )
        self._tokenizer, self._max_length, self._truncate = tokenizer, max_length, truncate
        self._texts = lru_cache(max_entries)(lambda messages, *settings: self._format(json.loads(messages)))
        self._tokens = lru_cache(max_entries)(self._tokenise)
        self._local = threading.local()  # `is_hit`: whether this thread's latest prompt was a hit

    def __len__(self) -> int:
        return self._tokens.cache_info().currsize

    def encode(self, prompt: str | Sequence[Message]) -> Prompt:
        """Return the token ids of a prompt.

        Args:
            prompt: A text, to which the tokenizer adds its special tokens; or messages (dicts of `role`, `content`),
                which the chat template formats with special tokens, up to the start of the answer.

        Raises:
            RequestError: The prompt is empty, too long (`truncate="error"`), or not valid text; or there is no chat
                template, or it refuses these messages.
        """
        is_text = isinstance(prompt, str)
        # Of a subclass of str, the characters, as tokenizers read them, not the result of its own methods.
        text = str.__str__(prompt) if isinstance(prompt, str) else self._formatted(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding, from a terminal or a file
            char = f"character {error.start} ({text[error.start]!r})"
            raise RequestError(f"the prompt is no valid text: {char} is a byte that is not UTF-8") from error
        tokenizer = self._tokenizer
        flags = (getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token"))
        self._local.is_hit = True
        ids = self._tokens(text, is_text, len(tokenizer), str(tokenizer.special_tokens_map), *flags)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        n_dropped = max(0, len(ids) - (self._max_length or len(ids)))
        if n_dropped and self._truncate == "error":
            raise RequestError(
                f"the prompt has {len(ids)} tokens, of which the model can take {self._max_length} here: shorten it, "
                "or choose truncate='left'"
            )
        return Prompt(self._cut(ids, n_dropped), self._local.is_hit, n_dropped)

    def clear(self) -> None:
        """Remove all prompts."""
        self._texts.cache_clear()
        self._tokens.cache_clear()

    def _cut(self, ids: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Drop `n` tokens on the left, but keep a leading BOS token, as truncation by tokenizers does."""
        begin = ids[:1] if n and len(ids) > n + 1 and ids[0] == self._tokenizer.bos_token_id else ()
        return begin + ids[n + len(begin) :]

    def _formatted(self, messages: Sequence[Message]) -> str:
        template = self._tokenizer.chat_template
        if not template:
            raise RequestError("this tokenizer has no chat template: give the prompt as one text")
        if not isinstance(messages, Sequence) or not messages or not all(isinstance(one, Mapping) for one in messages):
            raise RequestError(f"give a text, or messages of role and content, one at least (got {messages!r})")
        plain = [dict(one) for one in messages]
        named = None if _READS_THE_CLOCK in str(template) else _to_json(plain)
        if named is None:
            return self._format(plain)
        return self._texts(named, str(template), str(self._tokenizer.special_tokens_map))  # templates read both

    def _format(self, messages: list[dict[str, Any]]) -> str:
        try:
            made = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and may raise anything
            raise RequestError(f"the tokenizer's chat template does not take these messages: {error}") from error
        return str(made)

    def _tokenise(self, text: str, has_specials: bool, *settings: object) -> tuple[int, ...]:
        """Return the token ids of a text after a miss; the tokenizer's `settings` are only part of the key."""
        self._local.is_hit = False
        return tuple(self._tokenizer(text, add_special_tokens=has_specials)["input_ids"])


def _to_json(messages: Sequence[Message]) -> str | None:
    """Return messages as JSON, fields in a template's order; None if the JSON is ambiguous or cannot be made."""
    try:
        return json.dumps(messages, ensure_ascii=False) if _is_plain(messages) else None
    except RecursionError:
        return None


def _is_plain(value: Any) -> bool:
    """Whether no other value has the same JSON: all its values are of JSON's types, not of subclasses."""
    if type(value) is dict:
        return all(type(name) is str and _is_plain(inner) for name, inner in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
