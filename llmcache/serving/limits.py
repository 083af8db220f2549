"""How much a request, a tenant and all of them together may take of the server: bytes, time, places."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcache.serving.asgi import has_body, header_values, refuse, route_path
from llmcache.serving.authentication import scope_of
from llmcache.serving.refusals import Refusal
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import Tenant

#: Bodies of the largest size that may be on their way at once; they are held in memory until they are whole.
N_BODIES: Final = 64

_RETRY_AFTER_S = 1
_SEND_S = 60.0


class Limits:
    """ASGI middleware: refuses what is too large, too slow or too much, and stops work for clients that have gone.

    A body is read whole before the request takes a place, so that slow clients keep no place from others. Places are
    for requests that infer: metrics and the operator get through when there is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        *,
        send_timeout_s: float = _SEND_S,
        watch: Callable[[Callable[[], float]], None] = lambda n_running: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Limit an application.

        Args:
            app: The application; goes inside `Authentication`, which says who asks.
            settings: `payload_limit`, `body_timeout_s` and `max_concurrent_requests` of them.
            send_timeout_s: A client that reads nothing of its answer for so long has gone, seconds.
            watch: Given what tells how many requests have a place.
            check: Raises a `Refusal` while no request may take one.
        """
        self.app = app
        self.n_running = 0
        self._settings = settings
        self._send_timeout_s = send_timeout_s
        self._check = check
        self._by_tenant: Counter[str] = Counter()
        self._n_bytes = 0
        watch(lambda: self.n_running)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_body_read = not has_body(scope)

        async def noted() -> Message:
            nonlocal is_body_read
            message = await receive()
            is_body_read = not message.get("more_body")
            return message

        try:
            body = await self._body(scope, noted)
            if body is None:
                return
            _check_json(scope, body)
            place = self._take_place(scope)
        except Refusal as refusal:
            await refuse(refusal, scope, receive, send, is_body_read=is_body_read)
            return
        try:
            await _Exchange(body, receive, send, self._send_timeout_s).run(self.app, scope)
        finally:
            self._leave_place(place)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None: the client has gone."""
        most = self._settings.payload_limit
        too_large = Refusal("body_too_large", f"the body has more than {most:,} bytes: send less at once")
        if any(int(length) > most for length in header_values(scope, b"content-length") if length.isdigit()):
            raise too_large
        chunks: list[bytes] = []
        n_bytes = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    n_bytes += len(chunk)
                    self._n_bytes += len(chunk)
                    if n_bytes > most:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(chunks)
                    if self._n_bytes > N_BODIES * most:
                        raise _overloaded("too many large bodies are on their way")
        except TimeoutError:
            told = f"the body was not whole after {self._settings.body_timeout_s:g} s"
            raise Refusal("timeout", told) from None
        finally:
            self._n_bytes -= n_bytes

    def _take_place(self, scope: Scope) -> str | None:
        """Count a request as under way, and return by which name; None: it needs no place.

        Raises:
            Refusal: There is no place.
        """
        if scope_of(scope["method"], route_path(scope)) != "infer":
            return None
        self._check()
        if self.n_running >= self._settings.max_concurrent_requests:
            raise _overloaded("the server has as many requests under way as it may")
        tenant: Tenant | None = scope.get("state", {}).get("tenant")
        name = "" if tenant is None else tenant.name
        if tenant is not None and tenant.max_concurrent is not None and self._by_tenant[name] >= tenant.max_concurrent:
            raise _overloaded("this key has as many requests under way as it may")
        self.n_running += 1
        self._by_tenant[name] += 1
        return name

    def _leave_place(self, name: str | None) -> None:
        if name is None:
            return
        self.n_running -= 1
        self._by_tenant[name] -= 1
        if not self._by_tenant[name]:
            del self._by_tenant[name]  # names change with the keys


class _Exchange:
    """A request whose body is there, and its answer. If the client goes before that is sent, the work is cancelled."""

    def __init__(self, body: bytes, receive: Receive, send: Send, send_timeout_s: float) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._gone = asyncio.Event()
        self._is_answered = False
        self._is_cancelled = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Have the application answer, in the task that calls this."""
        self._work = asyncio.current_task()
        watch = asyncio.create_task(self._watch())
        try:
            await app(scope, self._next, self._forward)
        except (asyncio.CancelledError, Exception):
            if not self._is_cancelled:
                raise
        finally:
            watch.cancel()
        if self._is_cancelled and self._work is not None and self._work.uncancel():
            raise asyncio.CancelledError  # the server stops, too

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if not self._is_answered and self._work is not None:  # the server tells of an end after an answer, too
            self._is_cancelled = True
            self._work.cancel()

    async def _next(self) -> Message:
        """`receive` of the application: the body, and then nothing until the client has gone."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _forward(self, message: Message) -> None:
        """`send` of the application."""
        if self._gone.is_set():
            raise ClientDisconnect
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_answered = True
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._gone.set()
            raise ClientDisconnect from None


def _check_json(scope: Scope, body: bytes) -> None:
    """Refuse what is no JSON in UTF-8, before a parser that takes more than that: NaN, half characters, any depth."""
    kinds = [kind.partition(b";")[0].strip().lower() for kind in header_values(scope, b"content-type")]
    is_json = any(kind == b"application/json" or kind.endswith(b"+json") for kind in kinds)
    if not is_json or not body:
        return
    try:
        pydantic_core.from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:  # it says where, and quotes nothing
        raise Refusal("invalid", f"the body is not valid JSON: {error}") from None


def _overloaded(why: str) -> Refusal:
    return Refusal("overloaded", f"{why}: try again in a moment", retry_after_s=_RETRY_AFTER_S)
