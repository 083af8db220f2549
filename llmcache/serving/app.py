"""The ASGI application of one server: routes, middleware, error handlers, lifespan."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from llmcache import __version__
from llmcache.serving import admin, metrics, openai_decoders, openai_encoders, page, tei
from llmcache.serving.failures import install_handlers
from llmcache.serving.front import Front, route_path, scope_of
from llmcache.serving.history import EVERY_S
from llmcache.serving.keys import Keys
from llmcache.serving.server import Server
from llmcache.serving.telemetry import instrument

logger = logging.getLogger("llmcache.serving")

_KEYS_EVERY_S = 1.0  # seconds between looks at the key file; parsing thousands of keys takes seconds


class _Cors(CORSMiddleware):
    """CORS for inference: pages of other origins never read figures, nor reach the operator's routes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, method = Headers(scope=scope), scope["method"]
            asked = headers.get("access-control-request-method", method) if method == "OPTIONS" else method
            if scope_of(asked, route_path(scope)) not in (None, "infer"):
                await self.app(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


_alive = APIRouter(tags=["health"])


@_alive.get("/health", response_model=dict[str, str])
@_alive.get("/healthz", response_model=dict[str, str])
@_alive.head("/health", include_in_schema=False)
@_alive.head("/healthz", include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """Return 200 if the server accepts requests; 503 during the warm-up, while draining, and when stopping."""
    server: Server = request.app.state.server
    server.check_ready()
    return JSONResponse({"status": "ok"})


@contextmanager
def repeated(work: Callable[[], object], every_s: float, first_s: float | None = None) -> Iterator[None]:
    """Within this context, call `work`, which may block, every `every_s` seconds in a thread; log failures.

    `first_s`: seconds until the first call, `every_s` by default. Leaving the context waits for a call under way.
    """
    is_over = threading.Event()

    def repeat() -> None:
        is_failing, wait_s = False, every_s if first_s is None else first_s
        while not is_over.wait(wait_s):
            wait_s = every_s
            try:
                work()
                is_failing = False
            except Exception:  # requests must not be affected
                logger.log(logging.DEBUG if is_failing else logging.WARNING, "a repeated job failed", exc_info=True)
                is_failing = True

    thread = threading.Thread(target=repeat, name="llmcache-repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def create_app(server: Server, names_requests: bool = True) -> FastAPI:
    """Return the ASGI application, whose lifespan starts and stops the server; see `Front` for `names_requests`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        with ExitStack() as jobs:
            jobs.enter_context(repeated(sample, EVERY_S, first_s=0.0))
            if keys is not None:
                jobs.enter_context(repeated(keys.look, _KEYS_EVERY_S))
            if server.saves.is_saving and server.settings.save_every_s:
                every_s = server.settings.save_every_s
                jobs.enter_context(repeated(lambda: server.saves.try_to_save(server.cache), every_s))
            yield
            await asyncio.to_thread(jobs.close)  # a save under way ends before the last one begins
        await server.stop()

    def sample() -> None:
        server.history.add(server.cache.stats())

    path = server.settings.keys
    keys = None if path is None else Keys(path, server.metrics.key_file_failures.inc)
    app = FastAPI(
        title="llmcache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.server, app.state.keys = server, keys
    for router in (*(part.router for part in (tei, openai_encoders, openai_decoders, metrics, admin, page)), _alive):
        app.router.routes.extend(router.routes)  # include_router() would match routes twice per request
    install_handlers(app)
    templates = [route.path for route in iter_route_contexts(app.routes)]
    app.add_middleware(Front, server=server, keys=keys, templates=templates, names_requests=names_requests)
    if origins := server.settings.cors_allow_origin:  # outside of `Front`: a preflight has no key
        app.add_middleware(
            _Cors, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], max_age=3600
        )
    if server.settings.otlp_endpoint is not None:
        instrument(app, server.settings.otlp_endpoint)
    return app
