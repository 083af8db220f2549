"""Measure `store_remote`: what a hit in a shared Redis costs, what one that stopped costs, and when news arrive.

| figure | how it is measured |
|---|---|
| `local`, `remote` | calls of a request that another cache stored: first served from Redis, then from memory |
| `late` | such calls that were computed, as Redis did not answer in time |
| `paused` | calls that look for a request that is nowhere, and end before the layers, while Redis is stopped |
| `read` | reads of the store alone while Redis is stopped: late, or refused where no connection is left |
| `announced` | from the end of a call that computes a request to when all of several workers have heard of it |
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.models.architectures import build, check
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import RedisServer, check_installed, redis_server, wait_until
from llmcache import STORES, ConfigError, LLMCache, NotCachedError, StoreError
from llmcache.banks.stores import StoreKey

_POLL_S = 0.0005
_PATIENCE_S = 30.0
_MOST_LATE = 0.05  # share of the hits, above which nothing was measured


class StoreRemote(Experiment):
    """Settings of the measure."""

    model: str = "bert-base"  # an encoder of the benchmark, with random weights, or a folder
    tokens: int = Field(default=32, ge=8)  # of a request
    requests: int = Field(default=500, ge=1)  # that are served from Redis, and then from memory
    pauses: int = Field(default=40, ge=1)  # times that Redis is stopped
    paused: int = Field(default=50, ge=1)  # requests looked for each time
    announcements: int = Field(default=300, ge=1)
    workers: int = Field(default=4, ge=1)  # who hear of each
    timeout_ms: float = Field(default=5.0, gt=0)  # of the store


def run(experiment: StoreRemote, folders: Folders) -> Outcome:
    """Measure all three."""
    check_installed()
    check(experiment.model, experiment.tokens)
    model: Any = build(experiment.model, experiment.seed, "cpu", head="class").model
    drawn = _drawn(model, experiment)
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        store = {"name": "redis", "url": server.url, "timeout_ms": experiment.timeout_ms}
        settings = {"store": store, "store_least_tokens": 0, "auto_bypass": False}
        failures: list[int] = []
        rows, nbytes = _hits(experiment, model, settings, drawn, failures)
        rows += _paused(experiment, model, settings, drawn, server)
        rows += _read(experiment, settings, server)
        rows += _announced(experiment, model, settings, drawn, failures)
    kinds = dict.fromkeys(row["kind"] for row in rows)
    summary = [_point(kind, [row["ms"] for row in rows if row["kind"] == kind]) for kind in kinds]
    metrics = {"model": experiment.model, "entry_nbytes": nbytes, "n_errors": sum(failures), "summary": summary}
    return Outcome(rows, metrics | {"threads": torch.get_num_threads()})


def _drawn(model: Any, experiment: StoreRemote) -> Iterator[Tensor]:
    """Different requests (1, T), without an end."""
    draw = torch.Generator().manual_seed(experiment.seed)
    while True:
        yield torch.randint(5, model.config.vocab_size, (1, experiment.tokens), generator=draw)


@contextmanager
def _wrapped(
    model: Any, settings: Mapping[str, Any], drawn: Iterator[Tensor], failures: list[int]
) -> Iterator[LLMCache]:
    """A cache whose memory is empty, and which has seen what the model puts out; failures of its store are noted."""
    with LLMCache.wrap(model, **settings) as cache:
        for _ in range(3):
            cache(next(drawn))
        cache.drain()
        yield cache
        failures.append(cache.stats().errors)


def _hits(
    experiment: StoreRemote, model: Any, settings: Mapping[str, Any], drawn: Iterator[Tensor], failures: list[int]
) -> tuple[list[dict[str, Any]], int]:
    """Hits from Redis and from memory in turn; and the bytes of an entry."""
    asked = [next(drawn) for _ in range(experiment.requests)]
    with _wrapped(model, settings, drawn, failures) as cache:
        for ids in tracked(asked, len(asked), "Storing"):
            cache(ids)
        cache.drain()
        stats = cache.stats()
    rows = []
    with _wrapped(model, settings, drawn, failures) as cache:
        for ids in asked:
            for kind in ("remote", "local"):
                ms = _ms(lambda ids=ids: cache(ids))
                rows.append(_row(kind if cache.last[0].rung == "exact" else "late", ms))
    if (n_late := sum(row["kind"] == "late" for row in rows)) > _MOST_LATE * len(asked):
        raise ConfigError(f"timeout_ms={experiment.timeout_ms:g}: {n_late} of {len(asked)} hits were late: allow more")
    return rows, stats.nbytes // stats.n_stored


def _paused(
    experiment: StoreRemote, model: Any, settings: Mapping[str, Any], drawn: Iterator[Tensor], server: RedisServer
) -> list[dict[str, Any]]:
    """Lookups while Redis is stopped; each time one request is computed as well, which is no part of these."""
    rows = []
    with LLMCache.wrap(model, **settings) as cache:
        for _ in tracked(range(experiment.pauses), experiment.pauses, "Pausing"):
            wait_until(lambda: _is_answering(cache))
            cache(next(drawn))
            cache.drain()
            with server.paused():
                for _ in range(experiment.paused):
                    with cache.only_if_cached():
                        ids = next(drawn)
                        rows.append(_row("paused", _ms(lambda ids=ids: _expect_none(cache, ids))))
                cache(next(drawn))
                if cache.last[0].rung is not None:
                    raise RuntimeError("a request that nobody stored was served")
    return rows


def _read(experiment: StoreRemote, settings: Mapping[str, Any], server: RedisServer) -> list[dict[str, Any]]:
    """How long a read waits for a Redis that is stopped. A connection on which it was late is closed."""
    rows = []
    key = StoreKey("default", "0" * 64, "nowhere")
    store = STORES["redis"](**{name: value for name, value in settings["store"].items() if name != "name"})
    try:
        for _ in tracked(range(experiment.pauses), experiment.pauses, "Pausing reads"):
            wait_until(lambda: _is_read(store, key))
            with server.paused():
                for _ in range(experiment.paused):
                    deadline = monotonic() + experiment.timeout_ms / 1e3
                    rows.append(_row("read", _ms(lambda deadline=deadline: _expect_late(store, key, deadline))))
    finally:
        store.close()
    return rows


def _is_read(store: Any, key: StoreKey) -> bool:
    with suppress(StoreError):
        store.get_many([key], monotonic() + 1.0)
        return True
    return False


def _expect_late(store: Any, key: StoreKey, deadline: float) -> None:
    with suppress(StoreError):
        store.get_many([key], deadline)
        raise RuntimeError("a Redis that is stopped has answered")


def _expect_none(cache: LLMCache, ids: Tensor) -> None:
    with suppress(NotCachedError):
        cache(ids)


def _is_answering(cache: LLMCache) -> bool:
    store = cache.stats().store
    return store is not None and store.is_answering and store.n_values is not None


def _announced(
    experiment: StoreRemote, model: Any, settings: Mapping[str, Any], drawn: Iterator[Tensor], failures: list[int]
) -> list[dict[str, Any]]:
    """How long it takes until all workers have heard of a request that one has computed."""
    rows = []
    options = {name: value for name, value in settings["store"].items() if name != "name"}
    workers = [STORES["redis"](**options) for _ in range(experiment.workers)]
    try:
        with _wrapped(model, {**settings, "tau": 0.9999}, drawn, failures) as cache:
            sleep(1)  # what was announced so far has arrived
            for _ in range(experiment.announcements):
                cursors = [worker.events(None).cursor for worker in workers]
                cache(next(drawn))
                began = perf_counter()
                for worker, cursor in zip(workers, cursors, strict=True):
                    while not any(event.note for event in worker.events(cursor).found):
                        if perf_counter() > began + _PATIENCE_S:
                            raise TimeoutError("a request was not announced")
                        sleep(_POLL_S)
                rows.append(_row("announced", 1e3 * (perf_counter() - began)))
                cache.drain()
    finally:
        for worker in workers:
            worker.close()
    return rows


def _ms(act: Callable[[], object]) -> float:
    began = perf_counter()
    act()
    return 1e3 * (perf_counter() - began)


def _row(kind: str, ms: float) -> dict[str, Any]:
    return {"kind": kind, "ms": ms}


def _point(kind: str, ms: list[float]) -> dict[str, Any]:
    percentiles = np.percentile(ms, (50, 99, 99.9, 100))
    named = zip(("p50_ms", "p99_ms", "p999_ms", "max_ms"), percentiles, strict=True)
    return {"kind": kind, "n": len(ms), **{name: float(value) for name, value in named}}
