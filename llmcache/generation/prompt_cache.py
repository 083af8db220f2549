"""The prompt cache: from a text or a chat to token ids; what was asked before is neither formatted nor tokenised again.

It comes before the `prefix` rung: here a prompt is known as a whole or not at all, there the longest beginning counts.
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
        self._texts = lru_cache(max_entries)(lambda template, messages: self._format(json.loads(messages)))
        self._tokens = lru_cache(max_entries)(self._tokenise)
        self._local = threading.local()  # `is_hit`: this thread's latest prompt was known

    def __len__(self) -> int:
        return self._tokens.cache_info().currsize

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
        """Forget all prompts."""
        self._texts.cache_clear()
        self._tokens.cache_clear()

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
        named = None if _TELLS_THE_TIME in str(template) else _name(plain)
        return self._format(plain) if named is None else self._texts(str(template), named)

    def _format(self, messages: list[dict[str, Any]]) -> str:
        try:
            made = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and refuse what they like with what they like
            raise RequestError(f"the tokenizer's chat template does not take these messages: {error}") from error
        return str(made)

    def _tokenise(self, text: str, has_specials: bool, *settings: object) -> tuple[int, ...]:
        """Token ids of a text that is not known; `settings` of the tokenizer belong to the key alone."""
        self._local.is_hit = False
        return tuple(self._tokenizer(text, add_special_tokens=has_specials)["input_ids"])


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
