"""What middlewares share: path and headers of a request, and how to refuse it before it reaches a route."""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import Receive, Scope, Send

from llmcache.serving.refusals import Refusal, dialect_of

_LINGER_S = 2.0  # what still comes of a body that was refused is dropped for so long


def route_path(scope: Scope) -> str:
    """The path that routes are compared with: without what a proxy has put before it (`root_path`)."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    is_below = bool(root) and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] or "/" if is_below else path


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header, whose name is given in lower case."""
    return [value for one, value in scope["headers"] if one.lower() == name]


def has_body(scope: Scope) -> bool:
    """Whether a body comes with the request."""
    lengths = header_values(scope, b"content-length")
    return any(length.strip() != b"0" for length in lengths) or bool(header_values(scope, b"transfer-encoding"))


async def refuse(
    refusal: Refusal,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    headers: Iterable[tuple[str, str]] = (),
    is_body_read: bool = True,
) -> None:
    """Answer a request with a refusal, from a middleware.

    If its body was not read, what comes of it in the next moment is dropped, and the connection is closed after that.
    Were it closed at once, the client would see a failed connection in place of the answer.
    """
    dialect = dialect_of(route_path(scope))
    body = json.dumps(refusal.body(dialect)).encode()
    named = [("content-type", "application/json"), ("content-length", str(len(body)))]
    named += [*refusal.headers.items(), *headers, *([] if is_body_read else [("connection", "close")])]
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named]
    await send({"type": "http.response.start", "status": refusal.status(dialect), "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": not is_body_read})
    if is_body_read:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
