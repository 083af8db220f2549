"""Operator routes: purge, forget, clear, enable and disable the cache, audit, save, drain. Need the scope `admin`."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Annotated, Any, Final, TypeVar

import torch
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StrictStr

from llmcache.errors import LLMCacheError
from llmcache.serving import tei
from llmcache.serving.fields import Fields
from llmcache.serving.keys import ANYONE, PUBLIC
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server

logger = logging.getLogger("llmcache")

_COPIES_NOTE: Final = "other namespaces keep copies of its prefixes together with their own tokens: purge those as well"
_T = TypeVar("_T")


class Purge(BaseModel):
    """Body of `/admin/purge`: the namespace to purge."""

    namespace: Annotated[StrictStr, Field(max_length=1024)]


class Forget(tei.Cut):
    """Body of `/admin/forget`: an encoder's `inputs`, in the form that its own routes take, or a decoder's prompt."""

    inputs: tei.Classified | tei.Input | None = None
    prompt_name: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    namespace: Annotated[StrictStr, Field(max_length=1024)] | None = None


class Purged(BaseModel):
    """Number of purged requests, and a note if other namespaces may hold copies."""

    purged: int
    note: str | None = None


class State(BaseModel):
    """The server's phase, and the number of inference requests in progress."""

    phase: str
    under_way: int


router = APIRouter(prefix="/admin", tags=["admin"])


@router.post("/purge", response_model_exclude_none=True)
async def purge(asked: Purge, request: Request) -> Purged:
    """Purge all entries of a namespace; return the number of requests they held in memory.

    Without a store, a namespace that no key has and of which nothing was stored is answered with 404.
    """
    server, keys = _log_action(request, "purges a namespace"), request.app.state.keys
    n_requests = await _wait_for(server.purge(asked.namespace))
    is_known = asked.namespace in ({ANYONE.namespace} if keys is None else keys.namespaces)
    if not (n_requests or is_known or server.cache.config.store.name != "memory"):
        raise Refusal("not_found", "no key has this namespace, and nothing of it was stored: see `llmcache keys list`")
    has_copies = asked.namespace == PUBLIC and server.decoder is not None and server.settings.keys is not None
    return Purged(purged=n_requests, note=_COPIES_NOTE if has_copies else None)


@router.post("/forget")
async def forget(asked: Forget, request: Request) -> dict[str, int]:
    """Forget the entries of these requests, by default in the key's own namespace; return how many were stored."""
    server = _log_action(request, "forgets requests")
    namespace = asked.namespace or request.state.tenant.namespace
    if server.decoder is not None:
        prompt = asked.prompt or asked.messages
        if prompt is None:
            raise Refusal("invalid", "give `prompt` or `messages`", param="prompt")
        ids = await server.decoder.encode(prompt, None)
        server.decoder.n_new(len(ids), 1, None, ("prompt", "prompt"))  # refuses what no other route takes
        prompts = [{"input_ids": torch.tensor([ids], device=server.device)}]
        return {"forgotten": await _wait_for(server.forget(prompts, namespace))}
    if asked.inputs is None:
        raise Refusal("invalid", "give `inputs`", param="inputs")
    given = {"inputs": asked.inputs}
    if server.served.kind == "embedding":
        items, is_list = tei.items_of(tei.validated(tei.EmbedRequest, given).inputs)
    else:
        items, is_list = tei.classified_of(tei.validated(tei.PredictRequest, given).inputs)
    encoder, tokens = await tei.tokenised(server, items, asked, Fields("inputs", is_list), asked.prompt_name)
    known = [encoder.padded([one]) for one in tokens]
    return {"forgotten": await _wait_for(server.forget(known, namespace))}


@router.post("/clear")
async def clear(request: Request) -> dict[str, bool]:
    """Remove all entries, and the calibration learned from them."""
    await _wait_for(_log_action(request, "clears the cache").clear())
    return {"cleared": True}


@router.post("/disable")
async def disable(request: Request) -> dict[str, bool]:
    """Bypass the cache for all further requests. Stored entries are kept."""
    _log_action(request, "disables the cache").is_disabled = True
    return {"enabled": False}


@router.post("/enable")
async def enable(request: Request) -> dict[str, bool]:
    """Serve from the cache again."""
    _log_action(request, "enables the cache").is_disabled = False
    return {"enabled": True}


@router.post("/audit")
async def audit(request: Request) -> dict[str, int]:
    """Run the queued audits now; return the number of jobs done."""
    return {"audited": await _wait_for(asyncio.to_thread(_log_action(request, "audits what waits").cache.drain))}


@router.post("/drain")
async def drain(request: Request) -> State:
    """Refuse new requests with 503 and finish those in progress. Returns at once; `/health` is 503 until `/resume`."""
    server = _log_action(request, "drains the server")
    server.drain()
    return _state(server)


@router.post("/resume")
async def resume(request: Request) -> State:
    """Accept requests again. Has no effect on a server that is stopping."""
    server = _log_action(request, "has the server take requests again")
    server.resume()
    return _state(server)


@router.post("/save")
async def save(request: Request) -> dict[str, bool]:
    """Save the cache to the folder given by `--save`."""
    server = _log_action(request, "saves the cache")
    if server.saves.folder is None:
        raise Refusal("invalid", "this server was started without a folder to save to; start it with --save FOLDER")
    if server.saves.is_kept:
        raise Refusal("invalid", "the folder holds a save that does not fit, which stays; start it with another --save")
    await _wait_for(asyncio.to_thread(server.saves.save, server.cache))
    return {"saved": True}


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Return all statistics of the cache; values that are not finite are null."""
    server: Server = request.app.state.server
    found = await _wait_for(asyncio.to_thread(server.cache.stats))
    return {"enabled": not server.is_disabled, **_state(server).model_dump(), **found.to_dict()}


def _log_action(request: Request, action: str) -> Server:
    """Log the key's name and the action, and return the server."""
    logger.info("llmcache: %s %s", request.state.tenant.name, action)
    server: Server = request.app.state.server
    return server


def _state(server: Server) -> State:
    return State(phase=server.phase, under_way=server.metrics.n_under_way)


async def _wait_for(work: Awaitable[_T]) -> _T:
    """Await work in another thread; log its error in a line and raise a `Refusal` without details."""
    try:
        return await work
    except LLMCacheError as error:
        logger.warning("llmcache: an operator's request failed: %s", error)
        raise Refusal("backend", f"it failed ({type(error).__name__}); the server's log says why") from None
