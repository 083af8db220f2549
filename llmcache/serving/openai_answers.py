"""What OpenAI's routes answer: for the OpenAPI document, of which clients are made. Routes shape answers themselves.

A field with a default may be left out. All others are there, and no further ones.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

_Choice = TypeVar("_Choice")


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetails(_Object):
    """Why a request was not answered."""

    message: str
    type: str
    param: str | None
    code: int = Field(description="HTTP status.")


class Error(_Object):
    """Of any route below `/v1` and `/v2`."""

    error: ErrorDetails


#: What a router of these routes documents of its errors.
ERRORS: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": Error}}


class PromptDetails(_Object):
    """Of a prompt's tokens."""

    cached_tokens: int = Field(description="Those that were not computed for this request.")


class GenerationUsage(_Object):
    """Tokens of a generation."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = Field(default=None, description="Only with `--reveal-hits`.")


class CompletionLogprobs(_Object):
    """Of the tokens of a completion, each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionPiece(_Object):
    """A piece of one answer, or a whole one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChoice(CompletionPiece):
    """One answer."""

    finish_reason: Literal["stop", "length"]


class Logprob(_Object):
    """Of one token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Logprob):
    """Of a token that was chosen, and of the likeliest in its place."""

    top_logprobs: list[Logprob]


class ChatLogprobs(_Object):
    """Of the tokens of an answer."""

    content: list[TokenLogprob]
    refusal: None


class ChatAnswer(_Object):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Object):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatDelta(_Object):
    """What an answer has more of: first who speaks, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatPiece(_Object):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class _Generated(_Object, Generic[_Choice]):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[_Choice]


class Completion(_Generated[CompletionChoice]):
    """Of `/v1/completions`."""

    object: Literal["text_completion"]
    usage: GenerationUsage


class CompletionChunk(_Generated[CompletionPiece]):
    """Of its stream; with `stream_options.include_usage` the last one has no choices, and the usage."""

    object: Literal["text_completion"]
    usage: GenerationUsage | None = None


class ChatCompletion(_Generated[ChatChoice]):
    """Of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    usage: GenerationUsage


class ChatChunk(_Generated[ChatPiece]):
    """Of its stream, likewise."""

    object: Literal["chat.completion.chunk"]
    usage: GenerationUsage | None = None


class Usage(_Object):
    """Tokens of inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(_Object):
    """Of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Of norm 1; in base64 little-endian float32.")


class Embeddings(_Object):
    """Of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ClassifiedInput(_Object):
    """Of one input."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(_Object):
    """Of `/v1/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedInput]
    usage: Usage


class RankedDocument(_Object):
    """As it was given."""

    text: str


class Ranked(_Object):
    """One document."""

    index: int
    document: RankedDocument | None = None
    relevance_score: float


class Ranking(_Object):
    """Of `/v1/rerank`, best first."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]


class Model(_Object):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(_Object):
    """Of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


def streamed(chunk: type[BaseModel]) -> dict[str, Any]:
    """The content of a stream of chunks, as OpenAPI documents server-sent events."""
    data = [_event(chunk), _event(Error, event={"const": "error"})]
    done = {"type": "object", "properties": {"data": {"const": "[DONE]"}}, "required": ["data"]}
    return {"text/event-stream": {"itemSchema": {"anyOf": [*data, done]}}}


def _event(model: type[BaseModel], **fields: Any) -> dict[str, Any]:
    """An event whose data are an object of JSON."""
    schema = model.model_json_schema()
    content = _inlined(schema, schema.get("$defs", {}))
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {"type": "object", "properties": {**fields, "data": data}, "required": [*fields, "data"]}


def _inlined(part: Any, schemas: dict[str, Any]) -> Any:
    """A schema with those that it refers to put in place: inside of an event, no name of the document is known."""
    if isinstance(part, dict):
        if "$ref" in part:
            return _inlined(schemas[part["$ref"].rpartition("/")[2]], schemas)
        return {name: _inlined(one, schemas) for name, one in part.items() if name != "$defs"}
    return (
        [_inlined(one, schemas) for one in part] if isinstance(part, Sequence) and not isinstance(part, str) else part
    )
