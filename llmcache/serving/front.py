"""Middleware before the routes: authentication, limits, error responses, counting.

    CORS -> request id -> key and scope -> whole body -> concurrency slot (inference only) -> route

The whole body is read before the request takes a slot, so that slow clients occupy none.
"""

import asyncio
import base64
import binascii
import ipaddress
import logging
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from time import perf_counter
from typing import Final, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcache.serving import keys as keys_of
from llmcache.serving.bodies import decoded
from llmcache.serving.keys import ANYONE, Keys, Tenant
from llmcache.serving.refusals import Refusal, described, dialect_of, overloaded, stopping
from llmcache.serving.server import Server

logger = logging.getLogger("llmcache")
access = logging.getLogger("llmcache.serving.access")

_T = TypeVar("_T")

#: Methods and paths that need no key.
OPEN: Final = frozenset((method, path) for method in ("GET", "HEAD") for path in ("/health", "/healthz"))
#: Paths whose figures the scope `metrics` may read.
_FIGURES: Final = frozenset(("/", "/metrics", "/admin/figures", "/admin/stats"))
#: Template under which requests without a route are counted.
UNKNOWN: Final = "unknown"
_SWAGGER: Final = frozenset(("/docs", "/openapi.json"))
#: Limit of memory for the partly received bodies of one tenant, in bodies of `payload_limit` bytes.
N_BODIES: Final = 64
#: Lists and objects of one body: parsing millions of them takes a second of the event loop.
MAX_CONTAINERS: Final = 20_000

_READ_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_REQUEST_IDS = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_NEITHER_QUOTES_NOR_BRACKETS = bytes(set(range(256)) - set(b'"[{'))
_HOST = re.compile(rb"(\[[^\]]+\]|[A-Za-z0-9._-]+)(?::[0-9]*)?")
_LOCAL = re.compile(r"[a-z0-9_-]+|.+\.localhost")  # names that no public domain has
_BASIC: Final = ("WWW-Authenticate", 'Basic realm="llmcache", charset="UTF-8"')
_CLIENT_GONE = 499  # counted as the status if the client disconnects before one is sent
_WATCH_AFTER_S = 0.02  # work that ends sooner, as a hit does, is not cancelled if its client disconnects
_LINGER_S = 2.0  # time for which the rest of a refused body is read and discarded


class Front:
    """ASGI middleware around all routes of a server. Use it in one event loop."""

    def __init__(
        self, app: ASGIApp, server: Server, keys: Keys | None, templates: Iterable[str | None], names_requests: bool
    ) -> None:
        """Wrap an application whose routes have these templates; with `keys` None, every client is `ANYONE`.

        With `names_requests`, each response has the id of its request in `X-Request-Id`.
        """
        self._app, self._server, self._keys, self._metrics = app, server, keys, server.metrics
        self._names_requests = names_requests
        self._routes = {template: compile_path(template)[0] for template in templates if template}
        self._n_by_tenant: Counter[str] = Counter()  # requests that hold a slot
        self._n_bytes_by_tenant: Counter[str] = Counter()  # of bodies being received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})
        else:
            await (self._serve if scope["type"] == "http" else self._app)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given, started, status = _headers(scope, b"x-request-id"), perf_counter(), _CLIENT_GONE
        is_valid = len(given) == 1 and _REQUEST_IDS.fullmatch(given[0]) is not None
        request_id = given[0] if is_valid else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(b"x-request-id", request_id)] if self._names_requests else []
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        path = route_path(scope)
        route = self._route(path)
        is_inference = scope["method"] == "POST" and route != UNKNOWN and not route.startswith("/admin/")
        self._metrics.n_under_way += is_inference
        try:
            await self._forward(scope, path, receive, sent)
        except ClientDisconnect:
            pass
        except (asyncio.CancelledError, Exception) as error:
            refusal = error if isinstance(error, Refusal) else _refusal_for(error, request_id.decode())
            if status != _CLIENT_GONE:  # the response has begun: uvicorn closes the connection as it stays incomplete
                status = refusal.status(dialect_of(path))
            else:
                has_page = scope_of(scope["method"], path) == "metrics" or path in _SWAGGER
                is_login = refusal.kind == "unauthorised" and has_page
                await _send_refusal(refusal, scope, receive, sent, is_login)
        finally:
            self._metrics.n_under_way -= is_inference
            took_s = perf_counter() - started
            self._metrics.answered(route, status, took_s, is_inference)
            if self._server.settings.access_log:
                tenant = scope["state"].get("tenant")
                who, method = "-" if tenant is None else tenant.name, scope["method"]
                access.info("%s %s %d %.1f ms, %s, %s", method, route, status, 1e3 * took_s, who, request_id.decode())

    def _route(self, path: str) -> str:
        """Return the template of a path: the first that matches, as in starlette."""
        if path in self._routes:
            return path
        return next((template for template, fits in self._routes.items() if fits.match(path)), UNKNOWN)

    async def _forward(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        """Check key, body and limits, and pass the request to the application. Raises `Refusal`."""
        needed = scope_of(scope["method"], path)
        # Pages of these origins may send requests for inference.
        allowed = self._server.settings.cors_allow_origin if needed in (None, "infer") else ()
        if self._keys is None:
            _check_host(scope, allowed)
        tenant = scope["state"]["tenant"] = None if needed is None else self._authenticate(scope, needed, allowed)
        if tenant is None:  # nothing is read for strangers
            await self._app(scope, receive, send)
            return
        body: bytes | None = await self._body(scope, receive, tenant.name)

        async def replayed() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message: Message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        if needed != "infer":
            await self._app(scope, replayed, send)
            return
        self._server.check_ready()
        if self._metrics.n_concurrent >= self._server.settings.max_concurrent_requests:
            raise overloaded("the server is at its limit of concurrent requests")
        if tenant.max_concurrent is not None and self._n_by_tenant[tenant.name] >= tenant.max_concurrent:
            raise overloaded("this key is at its limit of concurrent requests")
        self._metrics.n_concurrent += 1
        self._n_by_tenant[tenant.name] += 1
        try:
            await self._app(scope, replayed, send)
        finally:
            self._metrics.n_concurrent -= 1
            self._n_by_tenant[tenant.name] -= 1
            if not self._n_by_tenant[tenant.name]:
                del self._n_by_tenant[tenant.name]  # key names change over time

    def _authenticate(self, scope: Scope, needed: keys_of.Scope, allowed: Sequence[str]) -> Tenant:
        """Return the tenant of the key in `Authorization: Bearer KEY`, or in the password of `Basic`, for browsers."""
        given = _headers(scope, b"authorization")
        scheme, _, credentials = given[0].strip().partition(b" ") if given else (b"", b"", b"")
        is_bearer, is_basic = scheme.lower() == b"bearer", scheme.lower() == b"basic"
        if not (is_bearer and self._keys is not None) and scope["method"] not in _READ_METHODS:
            # A browser sends its saved password, or needs none, for requests that any web page makes it send (CSRF).
            _check_origin(scope, self._keys is not None or needed != "admin", allowed)
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
        if not tenant.may(needed):
            raise Refusal("forbidden", f"this key lacks the scope {needed!r}")
        return tenant

    async def _body(self, scope: Scope, receive: Receive, tenant: str) -> bytes:
        """Return the whole body. Raises `Refusal` if it is too large or too slow, or its tenant sends too much."""
        most, most_s = self._server.settings.payload_limit, self._server.settings.body_timeout_s
        too_large = Refusal("too_large", f"the body has more than {most:,} bytes: send less per request")
        if any(int(length) > most for length in _headers(scope, b"content-length") if length.isdigit()):
            raise too_large
        if not _has_body(scope):
            return b""
        chunks: list[bytes] = []
        n_bytes, is_whole = 0, False
        try:
            async with asyncio.timeout(most_s):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunks.append(message.get("body", b""))
                    n_bytes += len(chunks[-1])
                    self._n_bytes_by_tenant[tenant] += len(chunks[-1])
                    is_whole = scope["state"]["is_body_read"] = not message.get("more_body")
                    if n_bytes > most:
                        raise too_large
                    if not is_whole and self._n_bytes_by_tenant[tenant] > N_BODIES * most:
                        raise overloaded("too many large bodies are being received at once")
            return _checked(decoded(b"".join(chunks), _headers(scope, b"content-encoding"), most))
        except TimeoutError:
            raise Refusal("timeout", f"the body was not complete after {most_s:g} s") from None
        finally:
            self._n_bytes_by_tenant[tenant] -= n_bytes
            if not self._n_bytes_by_tenant[tenant]:
                del self._n_bytes_by_tenant[tenant]


def scope_of(method: str, path: str) -> keys_of.Scope | None:
    """Return the scope that a request's key needs, or None if it needs no key. Paths without a route need one."""
    if (method, path) in OPEN:
        return None
    if method in _READ_METHODS and path in _FIGURES:
        return "metrics"
    return "admin" if path.startswith("/admin") else "infer"


def route_path(scope: Scope) -> str:
    """Return the path to match with routes, without the `root_path` that a proxy has prepended."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    is_below = bool(root) and (path == root or path.startswith(f"{root}/"))
    return path[len(root) :] or "/" if is_below else path


def refusal_response(refusal: Refusal, scope: Scope) -> JSONResponse:
    """Return the response for a refusal, in the dialect of the route."""
    dialect = dialect_of(route_path(scope))
    return JSONResponse(refusal.body(dialect), refusal.status(dialect), refusal.headers)


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Await work. If the client disconnects meanwhile, cancel it and raise `ClientDisconnect`."""
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

    soon = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # else the server is stopping
            raise
        raise ClientDisconnect from None
    finally:
        soon.cancel()
        if watching is not None:
            watching.cancel()


def _refusal_for(error: BaseException, request_id: str) -> Refusal:
    """Log an error's type and place, and return the refusal for the client."""
    if isinstance(error, asyncio.CancelledError):
        return stopping()
    logger.error("%s", described(error, request_id))
    return Refusal("backend", f"the server failed on this request; see {request_id} in its log")


async def _send_refusal(refusal: Refusal, scope: Scope, receive: Receive, send: Send, is_login: bool) -> None:
    """Send a refusal as the response; with `is_login`, browsers prompt for the key.

    If the body was not read, it is read and discarded for up to `_LINGER_S` before the connection is closed: if it
    were closed at once, the client would see a connection error instead of the response.
    """
    response = refusal_response(refusal, scope)
    if is_login:
        response.headers.append(*_BASIC)
    if scope["state"].get("is_body_read", not _has_body(scope)):
        await response(scope, receive, send)
        return
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _checked(body: bytes) -> bytes:
    """Return a body that has at most `MAX_CONTAINERS` lists and objects. Raises `Refusal`."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        # Those in strings do not count, but in UTF-16, which has zeros, where a string ends is not known.
        code = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NEITHER_QUOTES_NOR_BRACKETS)
        kept = body if b"\0" in body else b"".join(code.replace(b'""', b"").split(b'"')[::2])
        if kept.count(b"[") + kept.count(b"{") > MAX_CONTAINERS:
            raise Refusal("too_large", f"the body has more than {MAX_CONTAINERS:,} lists and objects: send less")
    return body


def _check_host(scope: Scope, allowed: Sequence[str]) -> None:
    """Refuse names that others could point to a server without keys, for their page to ask it (DNS rebinding).

    Allowed are an IP address, `localhost`, a name without a dot, which no public domain is, the name of an origin that
    is `allowed`, and no Host, which browsers always send.
    """
    hosts = _headers(scope, b"host")
    name, origins = _name(hosts), [origin.partition("://")[2].lower() for origin in allowed]
    is_local = _is_address(name) or _LOCAL.fullmatch(name)
    if not hosts or is_local or "*" in allowed or (len(hosts) == 1 and hosts[0].decode("latin-1").lower() in origins):
        return
    raise Refusal("forbidden", "without keys, ask this server at localhost or an IP address; for names give it --keys")


def _check_origin(scope: Scope, is_name_allowed: bool, allowed: Sequence[str]) -> None:
    """Refuse browser requests from pages of another origin (CSRF), unless it is `allowed`. Others send no origin.

    Unless `is_name_allowed`, the Host must be an IP address or localhost: the owner of another name can point it to
    this server, and their page then has the same origin (DNS rebinding).
    """
    site, origin, host = (_headers(scope, name) for name in (b"sec-fetch-site", b"origin", b"host"))
    if not site and not origin:
        return
    if origin and ("*" in allowed or origin[0].decode("latin-1") in allowed):
        return
    is_same = bool(origin) and [origin[0].partition(b"://")[2].lower()] == [one.lower() for one in host]
    if not (site[0] in (b"same-origin", b"none") if site else is_same):
        raise Refusal("forbidden", "requests from pages of other sites need the key as Authorization: Bearer KEY")
    if not (is_name_allowed or _is_address(_name(host))):
        raise Refusal("forbidden", "without keys, open the page at localhost or an IP address, not under another name")


def _name(hosts: Sequence[bytes]) -> str:
    """Return the name in a Host header without its port, in lower case; "" unless there is one valid header."""
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return "" if found is None else found[1].decode("latin-1").lower().rstrip(".")


@lru_cache
def _is_address(name: str) -> bool:
    """Whether a name is an IP address or `localhost`."""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of the header `name`, given in lower case."""
    return [value for one, value in scope["headers"] if one == name]


def _has_body(scope: Scope) -> bool:
    lengths = _headers(scope, b"content-length")
    return any(length.strip() != b"0" for length in lengths) or bool(_headers(scope, b"transfer-encoding"))
