"""What stands before the routes: who asks, how much may be asked, how failures are told, what is counted.

    request id -> key and scope -> body, whole -> place -> route

A body is read whole before the request takes a place, so that slow clients keep no place from others. Places are for
requests that infer: metrics and the operator get through when there is none.
"""

import asyncio
import base64
import binascii
import ipaddress
import json
import logging
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Final, TypeVar
from urllib.parse import urlsplit

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcache.serving import keys as keys_of
from llmcache.serving.keys import ANYONE, Keys, Tenant
from llmcache.serving.refusals import Refusal, described, dialect_of, overloaded, stopping
from llmcache.serving.server import Server

logger = logging.getLogger("llmcache")

_T = TypeVar("_T")

#: What everybody may ask, and by these methods alone.
OPEN: Final = frozenset((method, path) for method in ("GET", "HEAD") for path in ("/health", "/healthz"))
#: Template of all requests that no route takes.
UNKNOWN: Final = "unknown"
#: Bodies of the largest size that may be on their way at once; they are held in memory until they are whole.
N_BODIES: Final = 64

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_REQUEST_IDS = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_BASIC: Final = ("WWW-Authenticate", 'Basic realm="llmcache", charset="UTF-8"')
_CLIENT_GONE = 499  # in place of a status, where none was sent
_SOON_S = 0.02  # work that ends within it, as a hit does, is not cancelled if its client goes
_LINGER_S = 2.0  # what still comes of a body that was refused is dropped for so long


class Front:
    """ASGI middleware around all routes of a server. For one event loop."""

    def __init__(self, app: ASGIApp, server: Server, keys: Keys | None, templates: Iterable[str | None]) -> None:
        """Stand before an application with routes of these templates; without `keys` everybody is `ANYONE`."""
        self._app, self._server, self._keys, self._metrics = app, server, keys, server.metrics
        self._routes = {template: compile_path(template)[0] for template in templates if template}
        self._by_tenant: Counter[str] = Counter()  # requests that have a place
        self._n_bytes = 0  # of bodies that are on their way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, started, status = _headers(scope, b"x-request-id"), perf_counter(), _CLIENT_GONE
        is_fit = len(given) == 1 and _REQUEST_IDS.fullmatch(given[0]) is not None
        request_id = given[0] if is_fit else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        path = route_path(scope)
        route = self._route(path)
        is_inference = scope["method"] == "POST" and route != UNKNOWN and not route.startswith("/admin/")
        self._metrics.n_under_way += is_inference
        try:
            await self._pass(scope, path, receive, sent)
        except ClientDisconnect:
            pass
        except (asyncio.CancelledError, Exception) as error:
            refusal = error if isinstance(error, Refusal) else _refusal_of(error, request_id.decode())
            if status != _CLIENT_GONE:  # it has begun: uvicorn sees an answer without an end, closes the connection
                status = refusal.status(dialect_of(path))
            else:
                asks = refusal.kind == "unauthorised" and scope_of(scope["method"], path) == "admin"
                # A browser asks for the key then.
                await _refuse(refusal, scope, receive, sent, [_BASIC] if asks else [])
        finally:
            self._metrics.n_under_way -= is_inference
            self._metrics.answered(route, status, perf_counter() - started, is_inference)

    def _route(self, path: str) -> str:
        """Return the template of a path, found as starlette does: the first that fits."""
        if path in self._routes:
            return path
        return next((template for template, fits in self._routes.items() if fits.match(path)), UNKNOWN)

    async def _pass(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        """Pass a request on, if it may; else raise a `Refusal`."""
        needed = scope_of(scope["method"], path)
        tenant = None if needed is None else self._tenant(scope, needed)
        scope["state"]["tenant"] = tenant
        body: bytes | None = await self._body(scope, receive)

        async def replayed() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message: Message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        if tenant is None or needed != "infer":
            await self._app(scope, replayed, send)
            return
        self._server.check_ready()
        if self._metrics.n_concurrent >= self._server.settings.max_concurrent_requests:
            raise overloaded("the server has as many requests under way as it may")
        if tenant.max_concurrent is not None and self._by_tenant[tenant.name] >= tenant.max_concurrent:
            raise overloaded("this key has as many requests under way as it may")
        self._metrics.n_concurrent += 1
        self._by_tenant[tenant.name] += 1
        try:
            await self._app(scope, replayed, send)
        finally:
            self._metrics.n_concurrent -= 1
            self._by_tenant[tenant.name] -= 1
            if not self._by_tenant[tenant.name]:
                del self._by_tenant[tenant.name]  # names change with the keys

    def _tenant(self, scope: Scope, needed: keys_of.Scope) -> Tenant:
        """Find who asks: by `Authorization: Bearer KEY`, or by the password of `Basic`, which browsers can send."""
        given = _headers(scope, b"authorization")
        scheme, _, credentials = given[0].strip().partition(b" ") if given else (b"", b"", b"")
        is_bearer, is_basic = scheme.lower() == b"bearer", scheme.lower() == b"basic"
        if not is_bearer and scope["method"] not in _READING:
            # A browser adds the password it knows, or none where none is needed, to what any page makes it send.
            _check_page(scope, self._keys is not None or needed != "admin")
        if self._keys is None:
            return ANYONE
        if len(given) > 1:
            raise Refusal("unauthorised", "give one Authorization header")
        if is_basic:
            with suppress(binascii.Error, ValueError):
                credentials = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        if not (is_bearer or is_basic) or not credentials.strip():
            raise Refusal("unauthorised", "this server needs a key: send the header Authorization: Bearer KEY")
        if (tenant := self._keys.find(credentials.strip())) is None:
            raise Refusal("unauthorised", "this key is not known here")
        if needed not in tenant.scopes:
            raise Refusal("forbidden", f"this key lacks the scope {needed!r}")
        return tenant

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body."""
        most, most_s = self._server.settings.payload_limit, self._server.settings.body_timeout_s
        too_large = Refusal("too_large", f"the body has more than {most:,} bytes: send less at once")
        if any(int(length) > most for length in _headers(scope, b"content-length") if length.isdigit()):
            raise too_large
        if not _has_body(scope):
            return b""
        chunks: list[bytes] = []
        n_bytes = 0
        try:
            async with asyncio.timeout(most_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message.get("body", b""))
                    n_bytes += len(chunks[-1])
                    self._n_bytes += len(chunks[-1])
                    is_whole = scope["state"]["is_body_read"] = not message.get("more_body")
                    if n_bytes > most:
                        raise too_large
                    if is_whole:
                        return b"".join(chunks)
                    if self._n_bytes > N_BODIES * most:
                        raise overloaded("too many large bodies are on their way")
        except TimeoutError:
            raise Refusal("timeout", f"the body was not whole after {most_s:g} s") from None
        finally:
            self._n_bytes -= n_bytes


def scope_of(method: str, path: str) -> keys_of.Scope | None:
    """Return the scope that a key needs for a request; None: no key is needed. Paths without a route need one too."""
    if (method, path) in OPEN:
        return None
    return "admin" if path in ("/", "/metrics") or path.startswith("/admin") else "infer"


def route_path(scope: Scope) -> str:
    """Return the path that routes are compared with, without `root_path`, which a proxy has put before it."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    is_below = bool(root) and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] or "/" if is_below else path


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Do work; if the client goes meanwhile, cancel it and raise `ClientDisconnect`."""
    task, is_gone = asyncio.current_task(), False
    watching: asyncio.Task[None] | None = None
    assert task is not None

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    soon = asyncio.get_running_loop().call_later(_SOON_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # else the server stops
            raise
        raise ClientDisconnect from None
    finally:
        soon.cancel()
        if watching is not None:
            watching.cancel()


def _refusal_of(error: BaseException, request_id: str) -> Refusal:
    """Log a failure by its type and place, and return what the client is told."""
    if isinstance(error, asyncio.CancelledError):
        return stopping()
    logger.error("%s", described(error, request_id))
    return Refusal("backend", f"the server failed on this request; its log has more under {request_id}")


async def _refuse(
    refusal: Refusal, scope: Scope, receive: Receive, send: Send, headers: Sequence[tuple[str, str]]
) -> None:
    """Answer a request with a refusal.

    If its body was not read, what comes of it in the next moment is dropped, and the connection is closed after that.
    Were it closed at once, the client would see a failed connection in place of the answer.
    """
    is_body_read = scope["state"].get("is_body_read", not _has_body(scope))
    dialect = dialect_of(route_path(scope))
    body = json.dumps(refusal.body(dialect)).encode()
    named = [("content-type", "application/json"), ("content-length", str(len(body))), *refusal.headers.items()]
    named += [*headers, *([] if is_body_read else [("connection", "close")])]
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


def _check_page(scope: Scope, may_have_name: bool) -> None:
    """Refuse what a page of another origin has a browser send; other clients send neither header.

    Unless it `may_have_name`, the server is asked by an address alone: the owner of a name can make it lead here, and
    nothing else tells their page apart.
    """
    site, origin, host = (_headers(scope, name) for name in (b"sec-fetch-site", b"origin", b"host"))
    if not site and not origin:
        return
    is_same = bool(origin) and [origin[0].partition(b"://")[2].lower()] == [one.lower() for one in host]
    if not (site[0] in (b"same-origin", b"none") if site else is_same):
        raise Refusal("forbidden", "a page of another site asks for this: send the key as Authorization: Bearer KEY")
    if not (may_have_name or _is_address(host)):
        raise Refusal("forbidden", "without keys, open the page by localhost or an IP address, not by another name")


def _is_address(host: Sequence[bytes]) -> bool:
    """Whether a Host header, its port aside, is an IP address or this machine's own name for itself."""
    try:
        name = urlsplit(f"//{host[0].decode()}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except (ValueError, IndexError):
        return False


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header, by its name in lower case."""
    return [value for one, value in scope["headers"] if one == name]


def _has_body(scope: Scope) -> bool:
    lengths = _headers(scope, b"content-length")
    return any(length.strip() != b"0" for length in lengths) or bool(_headers(scope, b"transfer-encoding"))
