"""What the routes of text-embeddings-inference answer: for the OpenAPI document, as in `openai_answers`."""

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TeiError(_Object):
    """Why a request was not answered."""

    error: str
    error_type: str


#: What a router of all routes but OpenAI's documents of its errors.
ERRORS: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": TeiError}}


class Prediction(_Object):
    """A label, and how likely it is."""

    score: float
    label: str


class Rank(_Object):
    """How well one text suits the query."""

    index: int
    score: float
    text: str | None = None


class Piece(_Object):
    """A token, and its place in the text, in characters."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Info(_Object):
    """Of `/info`."""

    model_id: str
    model_sha: str | None
    served_model_name: str
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
