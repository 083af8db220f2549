"""Error responses in the dialect of each route (TEI or OpenAI). They never quote the request."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from llmcache.errors import LLMCacheError
from llmcache.serving.front import refusal_response
from llmcache.serving.refusals import Kind, Refusal

_N_NAMED = 3  # problems named in a response
_N_EXAMINED = 64  # validation errors that are read: a list can have a million wrong items

#: Context keys of validation errors whose values come from our schemas. Errors with other keys may quote the request.
_SCHEMA_VALUES: Final = frozenset(
    (
        *("ge", "gt", "le", "lt", "multiple_of", "expected", "expected_tags", "pattern", "discriminator"),
        *("min_length", "max_length", "actual_length", "field_type", "class", "class_name"),
    )
)
#: Kind and text for the HTTP statuses that FastAPI itself raises.
_KINDS: Final[Mapping[int, tuple[Kind, str]]] = {
    400: ("invalid", "the body could not be read"),
    404: ("not_found", "there is no such route"),
    405: ("not_allowed", "this route does not take this method"),
}


def install_handlers(app: FastAPI) -> None:
    """Install handlers that answer FastAPI's own errors in the dialect of the route. `Front` answers refusals."""
    names = cache(lambda: _names_of_fields(app))  # takes 0.1 s
    app.add_exception_handler(RequestValidationError, partial(_invalid_response, names))
    app.add_exception_handler(HTTPException, _http_response)


async def _invalid_response(
    names_of_fields: Callable[[], frozenset[str]], request: Request, error: Exception
) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and any(tuple(one["loc"]) == ("body",) and one["type"] != "missing" for one in errors):
        refusal = Refusal("invalid", "send the body as JSON, with Content-Type: application/json")
        return refusal_response(refusal, request.scope)
    names = await asyncio.to_thread(names_of_fields)
    fields = [_field(one["loc"], names) for one in errors[:_N_EXAMINED]]
    problems = list(dict.fromkeys(_explain(field, one) for field, one in zip(fields, errors, strict=False)))
    rest = f"; and {len(problems) - _N_NAMED} more" if len(problems) > _N_NAMED else ""
    refusal = Refusal("invalid", "; ".join(problems[:_N_NAMED]) + rest, param=fields[0] or None)
    return refusal_response(refusal, request.scope)


async def _http_response(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind, text = _KINDS.get(error.status_code, ("invalid", "the request is wrong"))
    text = "the body is nested too deeply" if isinstance(error.__cause__, RecursionError) else text
    answer = refusal_response(Refusal(kind, text), request.scope)
    answer.headers.update(error.headers or {})
    return answer


def _names_of_fields(app: FastAPI) -> frozenset[str]:
    """Return the names of all fields of bodies. Other names in an error's location come from the client."""
    bodies = app.openapi()["components"]["schemas"].values()
    return frozenset(name for body in bodies for name in body.get("properties", ()))


def _field(place: Sequence[str | int], names: frozenset[str]) -> str:
    """Return the path of the wrong field, such as `messages[2].content`; empty for the whole body."""
    shown = ""
    for part in place[1:]:
        if isinstance(part, int):
            shown += f"[{part}]" if shown else ""
        elif part in names:
            shown += f".{part}" if shown else part
    return shown


def _explain(field: str, error: Mapping[str, Any]) -> str:
    """Return a description of a validation error without the field's value."""
    context = error.get("ctx") or {}
    if error["type"] == "json_invalid":
        return "the body is not valid JSON"
    is_ours = isinstance(context.get("error"), LLMCacheError)
    text = context["error"] if is_ours else error["msg"] if set(context) <= _SCHEMA_VALUES else "is not valid"
    return f"{field or 'body'}: {text}"
