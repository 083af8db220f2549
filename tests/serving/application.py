"""A small application with routes of both dialects, guarded as the server is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import httpx2
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, field_validator

from llmcache.errors import RequestError
from llmcache.serving.authentication import Authentication
from llmcache.serving.failures import RequestIds, install_handlers
from llmcache.serving.keys import Keys
from llmcache.serving.limits import Limits
from llmcache.serving.refusals import Refusal
from llmcache.serving.settings import ServerSettings

SECRET = "the patient is called Mildred"


class Embed(BaseModel):
    inputs: str | Annotated[list[str], Field(fail_fast=True)]
    truncate: bool = False

    @field_validator("inputs")
    @classmethod
    def _check_words(cls, inputs: str | list[str]) -> str | list[str]:
        if inputs == SECRET:
            raise ValueError(f"{inputs} is not allowed")
        return inputs


class Message(BaseModel):
    role: str
    content: str


class Chat(BaseModel):
    model: str = ""
    messages: Annotated[list[Message], Field(max_length=8)] = []
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    logit_bias: dict[str, Any] = {}

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, Any]) -> dict[str, Any]:
        if not all(isinstance(value, int | float) for value in bias.values()):
            raise RequestError("give a number for each token")
        return bias


class Gate:
    """Holds requests of `/hold` until it is opened, and counts those that were cancelled."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.n_waiting = 0
        self.n_cancelled = 0

    def open(self) -> None:
        """Of a gate that is waited for, from another thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.is_open.set)

    async def wait(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.n_waiting += 1
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        finally:
            self.n_waiting -= 1

    async def until(self, condition: Callable[["Gate"], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition(self):
                await asyncio.sleep(0.001)


router = APIRouter(prefix="/v1")


@router.post("/chat/completions")
async def chat(body: Chat, request: Request) -> dict[str, Any]:
    if body.model == "broken":
        raise ZeroDivisionError(f"cannot divide {SECRET}")
    return {"n": len(body.messages), "tenant": request.state.tenant.name}


def make_app(
    keys: Keys | None = None, gate: Gate | None = None, *, send_timeout_s: float = 60.0, **settings: Any
) -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    install_handlers(app)
    app.include_router(router)

    @app.get("/health")
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/")
    @app.get("/metrics")
    @app.post("/admin/purge")
    @app.get("/whoami")
    async def tenant(request: Request) -> dict[str, str]:
        return {"name": request.state.tenant.name, "namespace": request.state.tenant.namespace}

    @app.post("/embed")
    async def embed(body: Embed) -> list[int]:
        return [len(text) for text in ([body.inputs] if isinstance(body.inputs, str) else body.inputs)]

    @app.post("/fail")
    async def fail(body: Embed) -> None:
        raise RuntimeError(f"cannot do {body.inputs}")

    @app.post("/refuse")
    @app.post("/v1/refuse")
    async def refuse() -> None:
        raise Refusal("wrong_model", "this route needs a classifier", param="model")

    @app.get("/status/{status}")
    async def status(status: int) -> None:
        raise HTTPException(status, SECRET)

    @app.post("/hold")
    async def hold() -> str:
        if gate is not None:
            await gate.wait()
        return "held"

    @app.post("/stream")
    async def stream(n_chunks: int = 3, fail_at: int = -1) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            for number in range(n_chunks):
                if number == fail_at:
                    raise RuntimeError(SECRET)
                yield b"x" * 65_536 if n_chunks > 10 else b"x"
            if gate is not None:
                await gate.wait()

        return StreamingResponse(chunks())

    app.add_middleware(Limits, settings=ServerSettings(model="tiny", **settings), send_timeout_s=send_timeout_s)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(RequestIds)
    return app


def client_of(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app)
    return httpx2.AsyncClient(transport=transport, base_url="http://server", headers=headers)
