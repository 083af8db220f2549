"""A server around a tiny model with what is seen of it, and one route that asks the model: in process, or on a port."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from llmcache import LLMCache
from llmcache.serving import admin, metrics, page
from llmcache.serving.loading import Served
from llmcache.serving.refusals import Refusal
from llmcache.serving.route_times import CountRequests
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import ANYONE
from tests.serving.served import tokenizer
from tests.tiny_models import CLASSIFIERS, build


@contextmanager
def serving(cache: LLMCache | None = None, **settings: Any) -> Iterator[Server]:
    """A server that is ready; its cache is one's own, or one of a tiny BERT with two banks."""
    if cache is None:
        cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), layers=[2, 3], payload="sequence")
    served = Served("tiny", "classifier", cache.model, tokenizer(), 64, _logits, _logits)
    made = ServerSettings(**{"model": "tiny", **settings})
    server = Server(made, served, cache, Saves(made.save))
    server.phase = "ready"
    yield server
    server.thread.close()
    cache.unwrap()


def ask(server: Server, ids: list[int]) -> int:
    """What the model answers; counted as a route would."""
    off = nullcontext() if server.is_caching else server.cache.disabled()
    with server.cache.namespace(ANYONE.namespace), off:
        answer = int(server.cache(input_ids=torch.tensor([ids])).logits.argmax())
    (outcome,) = server.cache.last
    server.metrics.served(outcome.rung, len(ids), 0 if outcome.rung is None else len(ids))
    return answer


def _logits(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    raise AssertionError("the route of this application asks the cache itself")


def make_app(server: Server, every_s: float = 5.0) -> FastAPI:
    """The routes of this part, and `/predict` and `/v1/models/{name}` to have others beside them."""

    @asynccontextmanager
    async def sampled(app: FastAPI) -> AsyncIterator[None]:
        async with server.history.kept(server.cache.stats, every_s):
            yield

    app = FastAPI(lifespan=sampled, docs_url=None, redoc_url=None)
    app.state.server = server

    @app.post("/predict")
    async def predict(ids: list[int]) -> int:
        return await server.thread.run(partial(ask, server, ids))

    @app.get("/v1/models/{name}/files")
    async def files(name: str) -> list[str]:
        return []

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> str:
        if name == "broken":
            raise RuntimeError(name)
        if name != "tiny":
            raise HTTPException(404)
        return name

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.body("tei"), refusal.status("tei"), refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return await refuse(request, Refusal("invalid", "this is not what the route takes"))

    for part in (metrics, admin, page):
        app.include_router(part.router)
    app.add_middleware(_Anyone)
    app.add_middleware(CountRequests, metrics=server.metrics)
    return app


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The application on a free port of this machine, in a thread; its address."""
    runner = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        assert thread.is_alive()
        time.sleep(0.01)
    host, port = runner.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        runner.should_exit = True
        thread.join()


class _Anyone:
    """In place of authentication."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["tenant"] = ANYONE
        await self._app(scope, receive, send)
