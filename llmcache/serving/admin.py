"""What an operator may have done: forget, switch the cache off and on, audit, save, drain. Scope `admin`."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Annotated, Any, Final, TypeVar

import torch
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StrictStr

from llmcache.errors import LLMCacheError
from llmcache.serving.fields import Fields
from llmcache.serving.keys import PUBLIC
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.tei import Classified, Input, classified_of, items_of, with_prompt

logger = logging.getLogger("llmcache")

_COPIES: Final = "tenants keep copies of its prefixes with what they computed after them: purge their namespaces too"
_T = TypeVar("_T")


class Purge(BaseModel):
    """Whose entries are to be forgotten."""

    namespace: Annotated[StrictStr, Field(max_length=1024)]


class Forget(BaseModel):
    """What is no longer to be served: `inputs` of an encoder as its own routes take them, or a decoder's prompt."""

    inputs: Classified | Input | None = None
    prompt_name: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    namespace: Annotated[StrictStr, Field(max_length=1024)] | None = None


class Purged(BaseModel):
    """How many requests were forgotten, and what is left elsewhere, if anything."""

    purged: int
    note: str | None = None


class State(BaseModel):
    """In which state the server is: its phase, and requests for inference that have not ended."""

    phase: str
    under_way: int


router = APIRouter(prefix="/admin", tags=["admin"])


@router.post("/purge", response_model_exclude_none=True)
async def purge(asked: Purge, request: Request) -> Purged:
    """Forget all entries of a namespace; answers how many requests they were."""
    server = _server(request, "purges a namespace")
    n_requests = await _done(server.purge(asked.namespace))
    has_copies = asked.namespace == PUBLIC and server.decoder is not None and server.settings.keys is not None
    return Purged(purged=n_requests, note=_COPIES if has_copies else None)


@router.post("/forget")
async def forget(asked: Forget, request: Request) -> dict[str, int]:
    """Forget what serves these requests, in the key's namespace unless one is named; answers how many were known."""
    server = _server(request, "forgets requests")
    namespace = asked.namespace or request.state.tenant.namespace
    if server.decoder is not None:
        prompt = asked.prompt or asked.messages
        if prompt is None:
            raise Refusal("invalid", "give `prompt` or `messages`", param="prompt")
        ids = await server.decoder.encode(prompt, request.state.tenant.namespace)
        inputs = {"input_ids": torch.tensor([ids], device=next(server.model.parameters()).device)}
        return {"forgotten": await _done(server.forget(inputs, namespace))}
    if asked.inputs is None or server.encoder is None:
        raise Refusal("invalid", "give `inputs`", param="inputs")
    is_embedding = server.served.kind == "embedding"
    items = items_of(asked.inputs) if is_embedding else classified_of(asked.inputs)[0]
    tokens = await server.encoder.tokens(with_prompt(server, items, asked.prompt_name), True, "right")
    known = [server.encoder.padded([one]) for one in Fields("inputs", True).all(tokens)]
    return {"forgotten": sum([await _done(server.forget(one, namespace)) for one in known])}


@router.post("/clear")
async def clear(request: Request) -> dict[str, bool]:
    """Forget all entries, and the calibration that rests on them."""
    await _done(_server(request, "clears the cache").clear())
    return {"cleared": True}


@router.post("/disable")
async def disable(request: Request) -> dict[str, bool]:
    """Compute all requests from now on as if there were no cache. What is held stays."""
    _server(request, "disables the cache").is_disabled = True
    return {"enabled": False}


@router.post("/enable")
async def enable(request: Request) -> dict[str, bool]:
    """Serve from the cache again."""
    _server(request, "enables the cache").is_disabled = False
    return {"enabled": True}


@router.post("/audit")
async def audit(request: Request) -> dict[str, int]:
    """Audit now what waits to be audited; answers how many jobs were done."""
    return {"audited": await _done(asyncio.to_thread(_server(request, "audits what waits").cache.drain))}


@router.post("/drain")
async def drain(request: Request) -> State:
    """Refuse new requests with 503, and finish those under way; answers at once. `/health` is 503 until `/resume`."""
    server = _server(request, "drains the server")
    server.drain()
    return _state(server)


@router.post("/resume")
async def resume(request: Request) -> State:
    """Take requests again. A server that was told to stop does not."""
    server = _server(request, "has the server take requests again")
    server.resume()
    return _state(server)


@router.post("/save")
async def save(request: Request) -> dict[str, bool]:
    """Save the cache to the folder that the server was given."""
    server = _server(request, "saves the cache")
    if server.saves.folder is None:
        raise Refusal("invalid", "this server was started without a folder to save to; start it with --save FOLDER")
    if server.saves.is_kept:
        raise Refusal("invalid", "the folder holds a save that does not fit, which stays; start it with another --save")
    await _done(asyncio.to_thread(server.saves.save, server.cache))
    return {"saved": True}


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """All figures of the cache; those that are not finite are null."""
    server: Server = request.app.state.server
    found = await _done(asyncio.to_thread(server.cache.stats))
    return {"enabled": not server.is_disabled, **_state(server).model_dump(), **found.to_dict()}


def _server(request: Request, does: str) -> Server:
    """Return the server, and log who has it do what."""
    logger.info("llmcache: %s %s", request.state.tenant.name, does)
    server: Server = request.app.state.server
    return server


def _state(server: Server) -> State:
    return State(phase=server.phase, under_way=server.metrics.n_under_way)


async def _done(work: Awaitable[_T]) -> _T:
    """Wait for work in another thread; the log says why it failed."""
    try:
        return await work
    except LLMCacheError as error:
        logger.warning("llmcache: an operator's request failed", exc_info=True)
        raise Refusal("backend", f"it failed ({type(error).__name__}); the server's log says why") from None
