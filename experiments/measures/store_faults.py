"""Measure `store_faults`: faults of a Redis, and of workers, injected while caches that share it are asked.

After each fault, both caches are asked requests that one of them may know, in some namespaces, and some are purged.
Counted are answers that are not the model's (`wrong`), hits of what was computed before a purge of its namespace that
has returned (`stale`), and calls that raised (`crashed`).
"""

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import RedisServer, check_installed, redis_server
from llmcache import LLMCache, StoreError

NAMESPACES = "abc"
N_REQUESTS = 6
N_ASKED = 5  # after each fault
_PURGED = 0.3  # share of the faults after which a namespace is purged
_DAY_S = 86_400
_VOCABULARY = 96


class StoreFaults(Experiment):
    """Settings of the measure."""

    faults: int = Field(default=1000, ge=1)


def run(experiment: StoreFaults, folders: Folders) -> Outcome:
    """Inject faults, drawn among all kinds."""
    check_installed()
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        workers = _Workers(server, Path(place) / "saves", experiment.seed)
        try:
            rows = [workers.inject() for _ in tracked(range(experiment.faults), experiment.faults, "Faults")]
        finally:
            seen = workers.close()
    kinds = sorted({row["kind"] for row in rows})
    counted = [name for name in rows[0] if name != "kind"]
    summary = [
        {"kind": kind, "n": len(alike), **{name: sum(row[name] for row in alike) for name in counted}}
        for kind in kinds
        if (alike := [row for row in rows if row["kind"] == kind])
    ]
    total = {"kind": "all", **{name: sum(row[name] for row in summary) for name in ("n", *counted)}}
    return Outcome(rows, {**seen, "summary": [*summary, total]})


class _Workers:
    """Two caches, their server, and what they were asked."""

    def __init__(self, server: RedisServer, saves: Path, seed: int) -> None:
        self._server = server
        self._saves = saves
        self._chance = random.Random(seed)
        self._seen: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._told = {"n_read": 0, "n_mismatched": 0}
        self._requests = _drawn()
        self._caches = [self._start() for _ in range(2)]
        with self._caches[0].disabled():
            self._expected = [self._caches[0](ids).logits for ids in self._requests]
        # Who computed which request since a namespace was purged: anybody's hit before that would be stale.
        self._computed: dict[str, set[int]] = {name: set() for name in NAMESPACES}
        self._kinds: Mapping[str, Callable[[], None]] = {
            "none": lambda: None,
            "Redis killed": self._kill,
            "Redis paused": self._pause,
            "connections reset": server.reset_connections,
            "numbers of namespaces lost": lambda: self._lose("generations"),
            "stream lost": lambda: self._lose("events"),
            "values cut": lambda: self._damage(lambda value: value[: len(value) // 2]),
            "a byte flipped in each value": lambda: self._damage(self._flip),
            "values exchanged": self._exchange,
            "values of another model": self._put_those_of_another_model,
            "all removed": lambda: server.do("FLUSHALL"),
            "out of memory": self._fill,
            "disk full": self._fill_disk,
            "clock a day ahead": self._jump,
            "two writers of one key": self._write_twice,
            "purged while it is written": self._purge_while_writing,
            "worker stopped, another started": self._restart,
            "worker stopped, another loaded from an old save": self._load,
            "worker killed": self._kill_worker,
        }

    def inject(self) -> dict[str, Any]:
        """One fault, and what was seen during and after it."""
        before = Counter(self._seen)
        kind = self._chance.choice(list(self._kinds))
        self._kinds[kind]()
        for _ in range(N_ASKED):
            self._ask()
        if self._chance.random() < _PURGED:
            self._purge()
            self._ask()
        names = ("requests", "hits", "purges", "wrong", "stale", "crashed")
        return {"kind": kind, **{name: self._seen[name] - before[name] for name in names}}

    def close(self) -> dict[str, int]:
        """What the caches read from the store, and found to be no values of theirs."""
        for cache in self._caches:
            self._stop(cache)
        return self._told

    def _ask(self) -> None:
        """One request of one cache."""
        number, namespace = self._chance.randrange(N_REQUESTS), self._chance.choice(NAMESPACES)
        is_hit = self._call(self._chance.choice(self._caches), namespace, number)
        self._seen["stale"] += is_hit and number not in self._computed[namespace]
        self._computed[namespace].add(number)

    def _call(self, cache: LLMCache, namespace: str, number: int) -> bool:
        """Whether a request is a hit."""
        try:
            with cache.namespace(namespace):
                output: Tensor | None = cache(self._requests[number]).logits
            is_hit = cache.last[0].rung is not None
        except Exception:
            output, is_hit = None, False
        with self._counting:
            self._seen["requests"] += 1
            self._seen["hits"] += is_hit
            self._seen["crashed"] += output is None
            self._seen["wrong"] += output is not None and not torch.equal(output, self._expected[number])
        return is_hit

    def _purge(self) -> None:
        namespace = self._chance.choice(NAMESPACES)
        with suppress(StoreError):  # that it failed was told
            self._chance.choice(self._caches).purge(namespace=namespace)
            self._seen["purges"] += 1
            self._computed[namespace].clear()

    # -- faults ----------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._server.kill()
        for _ in range(self._chance.randrange(8)):
            self._ask()
        if self._chance.random() < _PURGED:
            self._purge()
        self._server.start()
        time.sleep(self._chance.choice((0, 0.3)))

    def _pause(self) -> None:
        with self._server.paused():
            for _ in range(self._chance.randrange(8)):
                self._ask()
            time.sleep(self._chance.choice((0, 1.2)))

    def _lose(self, name: str) -> None:
        for found in self._server.names(f"*:{name}"):
            self._server.do("DEL", found)

    def _damage(self, change: Callable[[bytes], bytes]) -> None:
        for name, value in self._values():
            self._server.do("SET", name, change(value), "EX", 1000)

    def _flip(self, value: bytes) -> bytes:
        place = self._chance.randrange(len(value))
        return value[:place] + bytes([value[place] ^ 1 << self._chance.randrange(8)]) + value[place + 1 :]

    def _exchange(self) -> None:
        found = list(self._values())
        for i, (name, _) in enumerate(found):
            self._server.do("SET", name, found[i - 1][1], "EX", 1000)

    def _put_those_of_another_model(self) -> None:
        """Under our names; by itself it would never write there."""
        with LLMCache.wrap(_model(seed=1), **_settings(self._server.url, prefix="another")) as cache:
            for ids in self._requests:
                cache(ids)
            cache.drain()
        theirs = [value for _, value in self._values("another")]
        for name, _ in self._values():
            if theirs:
                self._server.do("SET", name, self._chance.choice(theirs), "EX", 1000)

    def _fill(self) -> None:
        self._server.do("CONFIG", "SET", "maxmemory", "1mb", "maxmemory-policy", "noeviction")
        for _ in range(4):
            self._ask()
        if self._chance.random() < _PURGED:
            self._purge()
        self._server.do("CONFIG", "SET", "maxmemory", 0)

    def _fill_disk(self) -> None:
        with self._server.disk_full():
            for _ in range(4):
                self._ask()
            if self._chance.random() < _PURGED:
                self._purge()

    def _jump(self) -> None:
        """Of the workers; and what is in Redis has passed its time."""
        real = time.time
        with patch("time.time", lambda: real() + _DAY_S):
            for name in self._server.names():
                self._server.do("EXPIRE", name, 0)
            for _ in range(4):
                self._ask()

    def _write_twice(self) -> None:
        number, namespace = self._chance.randrange(N_REQUESTS), self._chance.choice(NAMESPACES)
        with ThreadPoolExecutor(2) as pool:
            hits = list(pool.map(lambda cache: self._call(cache, namespace, number), self._caches))
        self._seen["stale"] += all(hits) and number not in self._computed[namespace]
        self._computed[namespace].add(number)

    def _purge_while_writing(self) -> None:
        """What was asked since the purge began may stay, as it may have come after it."""
        one, other = self._caches
        namespace = self._chance.choice(NAMESPACES)
        asked: set[int] = set()
        with ThreadPoolExecutor(1) as pool:
            purging = pool.submit(one.purge, namespace=namespace)
            while not purging.done():
                number = self._chance.randrange(N_REQUESTS // 2)
                self._call(other, namespace, number)
                asked.add(number)
        with suppress(StoreError):
            purging.result()
            self._seen["purges"] += 1
            self._computed[namespace].clear()
        self._computed[namespace] |= asked

    def _restart(self) -> None:
        self._stop(self._caches.pop(self._chance.randrange(2)))
        self._caches.append(self._start())

    def _load(self) -> None:
        """It was saved when this came last; what was purged since is not to be served from it."""
        cache = self._caches.pop(self._chance.randrange(2))
        latest, former = self._saves / "latest", self._saves / "former"
        if latest.exists():
            latest.rename(former)
        cache.save(latest)
        self._stop(cache)
        self._caches.append(LLMCache.load(_model(), former if former.exists() else latest))
        shutil.rmtree(former, ignore_errors=True)

    def _kill_worker(self) -> None:
        """A process that computes and writes is killed in the middle of it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        listen, say = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(say, self._server.url, self._chance.random()), daemon=True)
        process.start()
        say.close()
        with suppress(EOFError):
            listen.recv()
            time.sleep(0.05 * self._chance.random())
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        for computed in self._computed.values():  # whatever it was
            computed |= set(range(N_REQUESTS))

    # -- caches and values -----------------------------------------------------------------------------------------

    def _start(self) -> LLMCache:
        return LLMCache.wrap(_model(), **_settings(self._server.url))

    def _stop(self, cache: LLMCache) -> None:
        store = cache.stats().store
        assert store is not None
        self._told["n_read"] += store.n_found
        self._told["n_mismatched"] += sum(store.n_mismatched.values())
        cache.unwrap()

    def _values(self, prefix: str = "llmcache") -> Iterator[tuple[str, bytes]]:
        for name in self._server.names(f"{prefix}:*:*:*"):
            if value := self._server.do("GET", name):
                yield name, value


def _model(seed: int = 0) -> Any:
    """A tiny classifier with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=_VOCABULARY, max_position_embeddings=64, **sizes)).eval()


def _drawn() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(5, _VOCABULARY, (1, 9), generator=draw) for _ in range(N_REQUESTS)]


def _settings(url: str, prefix: str = "llmcache") -> dict[str, Any]:
    store = {"name": "redis", "url": url, "prefix": prefix, "timeout_ms": 50.0}
    return {"store": store, "store_least_tokens": 0, "auto_bypass": False}


def _work(say: Connection, url: str, seed: float) -> None:
    """Compute and write until killed."""
    torch.set_num_threads(1)
    chance, requests = random.Random(seed), _drawn()
    cache = LLMCache.wrap(_model(), **_settings(url))
    say.send(None)
    while True:
        with cache.namespace(chance.choice(NAMESPACES)), suppress(StoreError):
            if chance.random() < 0.1:
                cache.clear()
            cache(chance.choice(requests))
