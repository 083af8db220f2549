"""Errors of routes as the dialect of each says them, without a word of the request in them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llmcache.errors import LLMCacheError
from llmcache.serving.front import route_path
from llmcache.serving.refusals import Kind, Refusal, dialect_of

_N_TOLD = 3  # wrong fields that are named
_N_READ = 64  # errors that are looked at: a list can hold a million wrong items

#: Values of a validation error that come from our schemas; what has others may quote the request.
_OF_SCHEMAS: Final = frozenset(
    (
        *("ge", "gt", "le", "lt", "multiple_of", "expected", "expected_tags", "pattern", "discriminator"),
        *("min_length", "max_length", "actual_length", "field_type", "class", "class_name"),
    )
)
#: What FastAPI itself answers with an HTTP status.
_KINDS: Final[Mapping[int, tuple[Kind, str]]] = {
    400: ("invalid", "the body could not be read"),
    404: ("not_found", "there is no such route"),
    405: ("not_allowed", "this route does not take this method"),
}


def install_handlers(app: FastAPI) -> None:
    """Have an application answer errors as the dialect of the route does."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    dialect = dialect_of(route_path(request.scope))
    return JSONResponse(error.body(dialect), error.status(dialect), error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if _is_no_json(request, errors):
        refusal = Refusal("invalid", "send the body as JSON, with Content-Type: application/json")
        return await _refused(request, refusal)
    names = frozenset(_properties(request.app.openapi()))
    fields = [_field(one["loc"], names) for one in errors[:_N_READ]]
    told = list(dict.fromkeys(_told(field, one) for field, one in zip(fields, errors, strict=False)))
    rest = f"; and {len(told) - _N_TOLD} more" if len(told) > _N_TOLD else ""
    return await _refused(request, Refusal("invalid", "; ".join(told[:_N_TOLD]) + rest, param=fields[0] or None))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind, text = _KINDS.get(error.status_code, ("invalid", "the request is wrong"))
    text = "the body is nested too deeply" if isinstance(error.__cause__, RecursionError) else text
    answer = await _refused(request, Refusal(kind, text))
    answer.headers.update(error.headers or {})
    return answer


def _is_no_json(request: Request, errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a body was not read as JSON, so that all of it is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    return not is_json and any(tuple(one["loc"]) == ("body",) and one["type"] != "missing" for one in errors)


def _properties(schema: Any) -> Iterator[str]:
    """Yield all names of fields in the schemas; another name in the place of an error is a key of the client's."""
    if isinstance(schema, dict):
        found = schema.get("properties")
        yield from found if isinstance(found, dict) else ()
        if "in" in schema and isinstance(schema.get("name"), str):
            yield schema["name"]
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _properties(inner)


def _field(place: Sequence[str | int], names: frozenset[str]) -> str:
    """Return the field that is wrong, as `messages[2].content`; empty: the whole body."""
    shown = ""
    for part in place[1:]:
        if isinstance(part, int):
            shown += f"[{part}]" if shown else ""
        elif part in names:
            shown += f".{part}" if shown else part
    return shown


def _told(field: str, error: Mapping[str, Any]) -> str:
    """Say what is wrong with a field, without its value."""
    context = error.get("ctx") or {}
    if error["type"] == "json_invalid":
        return "the body is not valid JSON"
    if isinstance(context.get("error"), LLMCacheError):
        text = str(context["error"])
    elif set(context) <= _OF_SCHEMAS:
        text = str(error["msg"])
    else:
        text = "is not valid"
    return f"{field or 'body'}: {text}"
