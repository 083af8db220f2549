"""Every error as the dialect of its route says it, without a word of the request in it or in a log."""

import asyncio
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcache.errors import LLMCacheError
from llmcache.serving.asgi import header_values, refuse, route_path
from llmcache.serving.refusals import Kind, Refusal, described, dialect_of, stopping

logger = logging.getLogger("llmcache")

_REQUEST_ID = b"x-request-id"
_REQUEST_IDS = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_N_TOLD = 3  # wrong fields that are named
_N_READ = 64  # errors that are looked at: a list can hold a million wrong items

#: Values of a validation error that come from our schemas; what has others may quote the request.
_OF_SCHEMAS: Final = frozenset(
    (
        *("ge", "gt", "le", "lt", "multiple_of", "expected", "expected_tags", "pattern", "discriminator"),
        *("min_length", "max_length", "actual_length", "field_type", "class", "class_name"),
    )
)

_KINDS: Final[Mapping[int, tuple[Kind, str]]] = {
    400: ("invalid", "the body could not be read"),
    401: ("unauthorised", "this needs a key"),
    403: ("forbidden", "this key may not do that"),
    404: ("not_found", "there is no such route"),
    405: ("not_allowed", "this route does not take this method"),
    408: ("timeout", "the request took too long to come"),
    413: ("body_too_large", "the body is too large"),
    429: ("overloaded", "the server is busy: try again in a moment"),
    503: ("unhealthy", "the server is not ready"),
}


class RequestIds:
    """ASGI middleware: each answer has an `X-Request-Id`, the client's own where that is 1 to 128 of `[A-Za-z0-9._-]`.

    Goes outside all others. The id is `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Label the answers of an application, and those of what fails in other middlewares."""
        self.app = Failures(app, is_outermost=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header_values(scope, _REQUEST_ID)
        is_fit = len(given) == 1 and _REQUEST_IDS.fullmatch(given[0]) is not None
        request_id = given[0] if is_fit else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message.get("headers", ()) if header[0].lower() != _REQUEST_ID]
                message = {**message, "headers": [*others, (_REQUEST_ID, request_id)]}
            await send(message)

        await self.app(scope, receive, labelled)


class Failures:
    """ASGI middleware: what an application fails with is logged by its type and place, and answered by a fixed text.

    Nothing gets past it to the server, which would log the error's own text, and that may quote the request.
    """

    def __init__(self, app: ASGIApp, is_outermost: bool = False) -> None:
        """Guard an application.

        Args:
            app: The application.
            is_outermost: Nothing lies around it, so that what is cancelled here is so by a server that stops. Further
                in it may be `Limits` that cancels, for a client that has gone.
        """
        self.app = app
        self._is_outermost = is_outermost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except ClientDisconnect:
            return
        except (asyncio.CancelledError, Exception) as error:
            if isinstance(error, asyncio.CancelledError):
                if not self._is_outermost:
                    raise
                refusal = stopping()
            else:
                refusal = error if isinstance(error, Refusal) else _log(error, scope)
            if not has_begun:  # else the server sees an answer without an end, and closes the connection
                await refuse(refusal, scope, receive, send)


def install_handlers(app: FastAPI) -> None:
    """Have an application answer errors as the dialect of the route does. Before other middlewares are added."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Failures)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return _answer(request, error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if _is_no_json(request, errors):
        return _answer(request, Refusal("invalid", "send the body as JSON, with Content-Type: application/json"))
    fields = [_field(one["loc"], _names(request.app)) for one in errors[:_N_READ]]
    told = list(dict.fromkeys(_told(field, one) for field, one in zip(fields, errors, strict=False)))
    rest = f"; and {len(told) - _N_TOLD} more" if len(told) > _N_TOLD else ""
    return _answer(request, Refusal("invalid", "; ".join(told[:_N_TOLD]) + rest, param=fields[0] or None))


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    kind, text = _KINDS.get(status, ("invalid", "the request is wrong") if status < 500 else ("backend", _FAILED))
    # The request's body is parsed after a client's half of it: what then goes wrong has this status.
    text = "the body is nested too deeply" if isinstance(error.__cause__, RecursionError) else text
    answer = _answer(request, Refusal(kind, text))
    answer.headers.update(error.headers or {})
    return answer


_FAILED: Final = "the server failed on this request"


def _answer(request: Request, refusal: Refusal) -> JSONResponse:
    dialect = dialect_of(route_path(request.scope))
    return JSONResponse(refusal.body(dialect), refusal.status(dialect), refusal.headers)


def _log(error: Exception, scope: Scope) -> Refusal:
    """Log a failure, and return what the client is told."""
    request_id = scope.get("state", {}).get("request_id", "-")
    logger.error("%s", described(error, request_id))
    return Refusal("backend", f"{_FAILED}; its log has more under {request_id}")


def _is_no_json(request: Request, errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a body was not taken for JSON, so that all of it is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    return not is_json and any(tuple(one["loc"]) == ("body",) and one["type"] != "missing" for one in errors)


def _names(app: FastAPI) -> frozenset[str]:
    """All names of fields in the schemas: what else stands in the place of an error is a key that the client chose."""
    return frozenset(_properties(app.openapi()))


def _properties(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        found = schema.get("properties")
        yield from found if isinstance(found, dict) else ()
        if "in" in schema and isinstance(schema.get("name"), str):
            yield schema["name"]
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _properties(inner)


def _field(place: Sequence[str | int], names: frozenset[str]) -> str:
    """The field that is wrong, as `messages[2].content`; empty: the whole body."""
    shown = ""
    for part in place[1:]:
        if isinstance(part, int):
            shown += f"[{part}]" if shown else ""
        elif part in names:
            shown += f".{part}" if shown else part
    return shown


def _told(field: str, error: Mapping[str, Any]) -> str:
    """What is wrong with a field, without its value."""
    context = error.get("ctx") or {}
    if error["type"] == "json_invalid":
        return "the body is not valid JSON"
    if error["type"] == "extra_forbidden":
        return f"{field or 'body'}: has a field that is not known"
    if error["type"] == "union_tag_invalid":
        text = f"its {context.get('discriminator', 'type')} must be one of {context.get('expected_tags')}"
    elif isinstance(context.get("error"), LLMCacheError):
        text = str(context["error"])
    elif set(context) <= _OF_SCHEMAS:
        text = str(error["msg"])
    else:
        text = "is not valid"
    return f"{field or 'body'}: {text}"
