"""A tiny decoder with a byte-level tokenizer, and an application of its routes alone."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as once
from typing import Any

import torch
import transformers as tf
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from llmcache import LLMCache
from llmcache.serving import openai_decoders
from llmcache.serving.decoder import Decoder
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import ANYONE, Tenant
from tests.tiny_models import build

NAME = "tiny"
CONTEXT = 256
VOCABULARY = 300
END = "<|end|>"
OTHER = Tenant("other", "other", frozenset(("infer",)))
TENANTS = {tenant.name: tenant for tenant in (ANYONE, OTHER)}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'odd' %}{{ raise_exception('no ' + m['content']) }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}" + END + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT = ["the card was lost, and the cash is there", "where is my card? it costs 5 € and a naïve 🙂 more"]


@once
def tokenizer() -> tf.PreTrainedTokenizerFast:
    """All bytes, some pieces of English, and the token that ends a text; shared, never edited."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_TEXT * 4, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    made = tf.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)
    made.chat_template = TEMPLATE
    assert len(made) <= VOCABULARY
    return made


def model(seed: int = 0) -> Any:
    """A GPT-2 of two layers with random weights, which tokens of the vocabulary follow at random."""
    shape = {"vocab_size": len(tokenizer()), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
    return build(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)), seed)


@dataclass
class Noted:
    """Notes what a decoder tells."""

    n_generated: int = 0
    n_tokenised: int = 0
    n_queued: int = 0
    n_first: int = 0
    n_gaps: int = 0
    n_cancelled: int = 0
    served_by: list[tuple[str | None, int, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    n_inferred: int = 0
    n_failed: int = 0

    def tokenised(self, seconds: float) -> None:
        assert seconds > 0
        self.n_tokenised += 1

    def queued(self, seconds: float) -> None:
        assert seconds >= 0
        self.n_queued += 1

    def served(self, rung: str | None, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        self.served_by.append((rung, n_prompt_tokens, n_cached_tokens))

    def first_token(self, seconds: float) -> None:
        assert seconds > 0
        self.n_first += 1

    def inter_token(self, seconds: float) -> None:
        assert seconds > 0
        self.n_gaps += 1

    def generated(self, n: int) -> None:
        self.n_generated += n

    def inferred(self, prefill_s: float, decode_s: float) -> None:
        assert prefill_s > 0 and decode_s >= 0
        self.n_inferred += 1

    def finished(self, reason: str) -> None:
        self.reasons.append(reason)

    def failed(self) -> None:
        self.n_failed += 1

    def cancelled(self) -> None:
        self.n_cancelled += 1


class Stub:
    """What the routes ask of a server."""

    def __init__(self, is_caching: bool = True, made_by: Any = None, **settings: Any) -> None:
        self.settings = ServerSettings(model=NAME, **settings)
        self.tokenizer = made_by or tokenizer()
        self.plain = model()
        self.cache = LLMCache.wrap(model(), prefix_block=8, auto_bypass=False)
        self.thread = ModelThread()
        self.noted = Noted()
        self.decoder: Decoder | None = Decoder(
            self.cache, self.thread, self.settings, self.tokenizer, self.noted, lambda: is_caching
        )

    @property
    def running(self) -> Decoder:
        assert self.decoder is not None
        return self.decoder

    check_name = Server.check_name

    @property
    def name(self) -> str:
        return self.settings.model

    def needs(self, *kinds: str) -> None:
        if self.decoder is None:
            raise Refusal("wrong_model", "this route needs a causal language model; tiny is a classifier")

    def close(self) -> None:
        self.running.close()
        self.thread.close()
        self.cache.unwrap()


def application(stub: Stub) -> FastAPI:
    """The routes of decoders, whose errors are shaped as everywhere; the header `x-tenant` names who asks."""
    app = FastAPI()
    app.state.server = stub
    app.include_router(openai_decoders.router)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.body("openai"), refusal.status("openai"), refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(request: Request, error: RequestValidationError) -> JSONResponse:
        param = ".".join(map(str, error.errors()[0]["loc"][1:]))
        return await refuse(request, Refusal("invalid", f"{param} is wrong", param=param))

    app.add_middleware(_Tenants)
    return app


class _Tenants:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        name = headers.get(b"x-tenant", b"anyone").decode()
        scope.setdefault("state", {})["tenant"] = TENANTS[name]
        await self._app(scope, receive, send)


@contextmanager
def listening(stub: Stub) -> Iterator[str]:
    """The application on a free port; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(application(stub), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def chunks_of(events: str, chunk: type[BaseModel]) -> list[dict[str, Any]]:
    """Chunks of a stream, which are as its document says, and end as they should."""
    *told, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), events[-200:]
    data = [event.removeprefix("data: ") for event in told]
    for one in data:
        chunk.model_validate_json(one, strict=True)
    return [json.loads(one) for one in data]


def row(ids: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([ids])
