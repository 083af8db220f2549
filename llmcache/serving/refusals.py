"""`Refusal`, the exception for requests that are not answered, and its HTTP responses in TEI's and OpenAI's dialect."""

import traceback
from typing import Any, Final, Literal, NamedTuple

from llmcache.errors import LLMCacheError

Dialect = Literal["tei", "openai"]
Kind = Literal[
    "invalid",
    "empty",
    "tokenizer",
    "too_large",
    "encoding",
    "too_long",
    "wrong_model",
    "backend",
    "overloaded",
    "unauthorised",
    "forbidden",
    "not_found",
    "not_allowed",
    "unhealthy",
    "timeout",
]


class Terms(NamedTuple):
    """HTTP status and error type of a kind of refusal, in both dialects."""

    tei_status: int
    tei_type: str
    openai_status: int
    openai_type: str


#: TEI has six error types. Its status 413 means too many inputs; 424 a failed inference or the wrong kind of model.
TERMS: Final[dict[Kind, Terms]] = {
    "invalid": Terms(422, "Validation", 400, "invalid_request_error"),
    "empty": Terms(400, "Empty", 400, "invalid_request_error"),
    "tokenizer": Terms(422, "Tokenizer", 400, "invalid_request_error"),
    "too_large": Terms(413, "Validation", 413, "invalid_request_error"),
    "encoding": Terms(415, "Validation", 415, "invalid_request_error"),
    "too_long": Terms(422, "Validation", 400, "invalid_request_error"),
    "wrong_model": Terms(424, "Backend", 400, "invalid_request_error"),
    "backend": Terms(424, "Backend", 500, "server_error"),
    "overloaded": Terms(429, "Overloaded", 429, "rate_limit_error"),
    "unauthorised": Terms(401, "Validation", 401, "authentication_error"),
    "forbidden": Terms(403, "Validation", 403, "permission_error"),
    "not_found": Terms(404, "Validation", 404, "not_found_error"),
    "not_allowed": Terms(405, "Validation", 405, "invalid_request_error"),
    "unhealthy": Terms(503, "Unhealthy", 503, "server_error"),
    "timeout": Terms(408, "Validation", 408, "invalid_request_error"),
}


class Refusal(LLMCacheError):
    """The reason why a request is not answered, for the client. The text never quotes the request."""

    def __init__(self, kind: Kind, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        """Take what was wrong and what to do about it, the wrong field, and after how many seconds to try again."""
        super().__init__(message)
        self.kind: Kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    def status(self, dialect: Dialect) -> int:
        terms = TERMS[self.kind]
        return terms.tei_status if dialect == "tei" else terms.openai_status

    def body(self, dialect: Dialect) -> dict[str, Any]:
        terms = TERMS[self.kind]
        if dialect == "tei":
            return {"error": str(self), "error_type": terms.tei_type}
        error = {"message": str(self), "type": terms.openai_type, "param": self.param, "code": terms.openai_status}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        named = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return named | ({"WWW-Authenticate": "Bearer"} if self.kind == "unauthorised" else {})


def described(error: BaseException, request_id: str = "") -> str:
    """Return an error's type and place for the log, and the request's id. Its text may quote a request: left out."""
    places = [f"{one.filename}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__, limit=-3)]
    where = f" in request {request_id}," if request_id else ""
    return f"{type(error).__name__}{where} at {' < '.join(reversed(places))}"


def stopping() -> Refusal:
    """Return the refusal for requests that a stopping server does not start or does not finish in time."""
    return Refusal("unhealthy", "the server is stopping: try again in a moment", retry_after_s=1)


def overloaded(why: str, retry_after_s: int = 1) -> Refusal:
    """Return the refusal for requests beyond the server's capacity."""
    return Refusal("overloaded", f"{why}: try again in {retry_after_s} s", retry_after_s=retry_after_s)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path: OpenAI's below `/v1/` and `/v2/` and on their aliases, else TEI's."""
    return "openai" if path.startswith(("/v1/", "/v2/")) or path in ("/embeddings", "/models", "/score") else "tei"
