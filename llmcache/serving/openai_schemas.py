"""Request bodies of `/v1/completions` and `/v1/chat/completions`: OpenAI's fields and vLLM's additions."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from llmcache.generation import Sampling
from llmcache.serving.refusals import Refusal

_SEED_RANGE: Final = 2**63
_MIN_FACTOR: Final = 1e-5  # logits divided by less may overflow
_MAX_LOGPROBS: Final = 20
_MAX_STOPS: Final = 4

_Penalty = Annotated[StrictFloat, Field(ge=-2, le=2, allow_inf_nan=False)]
_Count = Annotated[StrictInt, Field(ge=1)]
_Id = Annotated[StrictInt, Field(ge=0)]
# fail_fast reports the first wrong item only: a body of a million wrong items must not make a million errors.
_Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
_Ids = Annotated[list[StrictInt], Field(fail_fast=True)]

#: Unsupported fields that would change an answer, with their accepted neutral values. Other unknown fields are ignored:
#: clients send what other servers accept.
_UNSUPPORTED: Final[Mapping[str, Sequence[Any]]] = {
    **dict.fromkeys(("functions", "function_call", "tools"), (None, [], "none")),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None,)),
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: StrictBool | None = None


class GenerationRequest(BaseModel):
    """Fields shared by both routes."""

    model_config = ConfigDict(extra="allow")

    absent: ClassVar[Mapping[str, Sequence[Any]]] = _UNSUPPORTED

    model: StrictStr | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[StrictFloat, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[StrictFloat, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-_SEED_RANGE, lt=_SEED_RANGE)] | None = None
    n: _Count | None = None
    stop: StrictStr | _Texts | None = None
    stop_token_ids: Annotated[list[_Id], Field(fail_fast=True)] | None = None
    ignore_eos: StrictBool = False
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[StrictFloat, Field(ge=_MIN_FACTOR, le=1 / _MIN_FACTOR)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a `usage` chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def n_logprobs(self) -> int | None:
        """Number of likeliest tokens returned with each token; None: no log-probabilities."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Refusal` for unsupported or contradictory fields."""
        for name, value in (self.model_extra or {}).items():
            if value not in self.absent.get(name, (value,)):
                raise Refusal("invalid", f"{name}: this server does not support it; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise Refusal("invalid", "stream_options needs stream=true", param="stream_options")
        if len(self.stops) > _MAX_STOPS or "" in self.stops:
            raise Refusal("invalid", f"stop: give at most {_MAX_STOPS} texts, none of them empty", param="stop")

    def sampling(self, max_new_tokens: int, seed: int, eos_ids: Sequence[int], vocabulary: int) -> Sampling:
        """Return the sampling settings of one answer; `eos_ids` end it unless `ignore_eos`."""
        more = self.stop_token_ids or []
        if max(more, default=0) >= vocabulary:
            raise Refusal("invalid", f"stop_token_ids are from 0 to {vocabulary - 1}", param="stop_token_ids")
        temperature = 1.0 if self.temperature is None else self.temperature  # without one, sample, as OpenAI's API does
        drawn: dict[str, Any] = {}
        if temperature >= _MIN_FACTOR:
            top_k = min(self.top_k or 0, vocabulary)
            drawn = {"temperature": temperature, "top_p": self.top_p, "top_k": top_k if top_k > 0 else None}
            drawn |= {"do_sample": True, "seed": seed}
        return Sampling(
            **drawn,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            max_new_tokens=max_new_tokens,
            stop_ids=tuple(sorted({*more, *(() if self.ignore_eos else eos_ids)})),
            n_logprobs=min(self.n_logprobs or 0, vocabulary),
        )

    def seeds(self) -> list[int]:
        """Return the seed of each answer to a prompt: consecutive numbers, from a random one if none was given."""
        first = secrets.randbits(63) if self.seed is None else self.seed
        return [(first + i) % _SEED_RANGE for i in range(self.n or 1)]


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    absent: ClassVar[Mapping[str, Sequence[Any]]] = {
        **_UNSUPPORTED,
        "suffix": (None, ""),
        "best_of": (None, 1),
        "add_special_tokens": (None, True),
    }

    prompt: StrictStr | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise Refusal("invalid", "max_tokens is at least 1, or 0 with echo=true", param="max_tokens")

    def sampling(self, max_new_tokens: int, seed: int, eos_ids: Sequence[int], vocabulary: int) -> Sampling:
        sampling = super().sampling(max_new_tokens, seed, eos_ids, vocabulary)
        return replace(sampling, n_prompt_logprobs=sampling.n_logprobs) if self.is_scored else sampling

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompt's tokens are returned."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or all(isinstance(one, int) for one in self.prompt)
        return cast(list[str | list[int]], [self.prompt] if is_one else self.prompt)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


class TextPart(BaseModel):
    """A part of a message; only text is supported."""

    type: StrictStr
    text: StrictStr | None = None


class ChatMessage(BaseModel):
    """A message of a conversation. Calls of tools and their results are for the chat template to write."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: StrictStr | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: StrictStr | None = None
    function_call: Annotated[None, Field(description="Replaced by `tool_calls`.")] = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    absent: ClassVar[Mapping[str, Sequence[Any]]] = {
        **_UNSUPPORTED,
        "add_generation_prompt": (None, True),
        "add_special_tokens": (None, False),
        "continue_final_message": (None, False),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "documents": (None, []),
        "echo": (None, False),
    }

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: _Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise Refusal("invalid", "messages is empty: give at least one", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise Refusal("invalid", "top_logprobs needs logprobs=true", param="top_logprobs")
        for number, message in enumerate(self.messages):
            if isinstance(message.content, list) and any(part.text is None for part in message.content):
                param = f"messages[{number}].content"
                raise Refusal("invalid", f"{param}: this server supports only parts of type `text`", param=param)

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Messages for the chat template; the text parts of a message are joined by newlines."""
        return [
            {"role": one.role, "content": _text(one.content)}
            | one.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
            | ({"tool_calls": [_parsed(call) for call in one.tool_calls]} if one.tool_calls else {})
            for one in self.messages
        ]

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with its arguments as a mapping, as chat templates read them; OpenAI has them as JSON."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments", {}), str):
        return dict(call)
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        raise Refusal("invalid", "tool_calls: `arguments` is not JSON", param="messages") from None


def _text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""
