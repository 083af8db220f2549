"""Measure `store_faults`: faults of Redis and of workers, injected while caches that share the Redis serve requests.

After each fault, both caches get requests that either may have stored, in several namespaces, some of which are purged.
Counted are answers that differ from the model's (`wrong`), hits on entries computed before a completed purge of their
namespace (`stale`), and calls that raised (`crashed`).
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
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import RedisServer, check_installed, redis_server
from llmcache import LLMCache, StoreError

NAMESPACES = "abc"
N_REQUESTS = 6
_PURGED = 0.3  # probability of a purge at each opportunity
_VOCABULARY = 96


class Pair:
    def __init__(self, server: RedisServer, saves: Path, seed: int) -> None:
        self.server = server
        self.saves = saves
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.told = {"n_read": 0, "n_mismatched": 0}
        self.requests = drawn()
        self.caches = [self.start() for _ in range(2)]
        with self.caches[0].disabled():
            self._expected = [self.caches[0](ids).logits for ids in self.requests]
        # Requests computed by either cache since their namespace was purged: a hit on any other is stale.
        self.computed: dict[str, set[int]] = {name: set() for name in NAMESPACES}

    def close(self) -> dict[str, int]:
        """Close the caches; return the numbers of values read from the store and of mismatched values."""
        for cache in self.caches:
            self.stop(cache)
        return self.told

    def ask(self, n: int = 1) -> None:
        for _ in range(n):
            number, namespace = self.chance.randrange(N_REQUESTS), self.chance.choice(NAMESPACES)
            is_hit = self.call(self.chance.choice(self.caches), namespace, number)
            self.seen["stale"] += is_hit and number not in self.computed[namespace]
            self.computed[namespace].add(number)

    def call(self, cache: LLMCache, namespace: str, number: int) -> bool:
        try:
            with cache.namespace(namespace):
                output: Tensor | None = cache(self.requests[number]).logits
            is_hit = cache.last[0].rung is not None
        except Exception:
            output, is_hit = None, False
        with self._counting:
            self.seen["requests"] += 1
            self.seen["hits"] += is_hit
            self.seen["crashed"] += output is None
            self.seen["wrong"] += output is not None and not torch.equal(output, self._expected[number])
        return is_hit

    def maybe_purge(self) -> bool:
        """Purge a namespace with probability `_PURGED`; return whether a purge was tried."""
        if self.chance.random() >= _PURGED:
            return False
        namespace = self.chance.choice(NAMESPACES)
        with suppress(StoreError):  # the failure was reported
            self.chance.choice(self.caches).purge(namespace=namespace)
            self.seen["purges"] += 1
            self.computed[namespace].clear()
        return True

    def start(self) -> LLMCache:
        return LLMCache.wrap(model(), **settings(self.server.url))

    def stop(self, cache: LLMCache) -> None:
        store = cache.stats().store
        assert store is not None
        self.told["n_read"] += store.n_found
        self.told["n_mismatched"] += sum(store.n_mismatched.values())
        cache.unwrap()

    def values(self, prefix: str = "llmcache") -> Iterator[tuple[str, bytes]]:
        for name in self.server.names(f"{prefix}:*:*:*:*:*"):
            if value := self.server.do("GET", name):
                yield name, value


def model(seed: int = 0) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=_VOCABULARY, max_position_embeddings=64, **sizes)).eval()


def drawn() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(5, _VOCABULARY, (1, 9), generator=draw) for _ in range(N_REQUESTS)]


def settings(url: str, prefix: str = "llmcache") -> dict[str, Any]:
    store = {"name": "redis", "url": url, "prefix": prefix, "timeout_ms": 50.0, "least_tokens": 0}
    return {"store": store, "auto_bypass": False}


def kill_worker(url: str, chance: random.Random) -> None:
    """Start a process that computes and stores requests, and kill it while it works."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    listen, say = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(say, url, chance.random()), daemon=True)
    process.start()
    say.close()
    with suppress(EOFError):
        listen.recv()
        time.sleep(0.05 * chance.random())
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def _work(say: Connection, url: str, seed: float) -> None:
    torch.set_num_threads(1)
    chance, requests = random.Random(seed), drawn()
    cache = LLMCache.wrap(model(), **settings(url))
    say.send(None)
    while True:
        with cache.namespace(chance.choice(NAMESPACES)), suppress(StoreError):
            if chance.random() < 0.1:
                cache.clear()
            cache(chance.choice(requests))


N_ASKED = 5  # requests after each fault
_DAY_S = 86_400


class StoreFaults(Experiment):
    faults: int = Field(default=1000, ge=1)


def run(experiment: StoreFaults, folders: Folders) -> Outcome:
    check_installed()
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        workers = _Faults(server, Path(place) / "saves", experiment.seed)
        try:
            rows = [workers.inject() for _ in tracked(range(experiment.faults), "Faults")]
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


class _Faults(Pair):
    """Injects faults into two caches, their server and its values."""

    def __init__(self, server: RedisServer, saves: Path, seed: int) -> None:
        super().__init__(server, saves, seed)
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
        before = Counter(self.seen)
        kind = self.chance.choice(list(self._kinds))
        self._kinds[kind]()
        self.ask(N_ASKED)
        if self.maybe_purge():
            self.ask()
        names = ("requests", "hits", "purges", "wrong", "stale", "crashed")
        return {"kind": kind, **{name: self.seen[name] - before[name] for name in names}}

    def _kill(self) -> None:
        self.server.kill()
        self.ask(self.chance.randrange(8))
        self.maybe_purge()
        self.server.start()
        time.sleep(self.chance.choice((0, 0.3)))

    def _pause(self) -> None:
        with self.server.paused():
            self.ask(self.chance.randrange(8))
            time.sleep(self.chance.choice((0, 1.2)))

    def _lose(self, name: str) -> None:
        for found in self.server.names(f"*:{name}"):
            self.server.do("DEL", found)

    def _damage(self, change: Callable[[bytes], bytes]) -> None:
        for name, value in self.values():
            self.server.do("SET", name, change(value), "EX", 1000)

    def _flip(self, value: bytes) -> bytes:
        place = self.chance.randrange(len(value))
        return value[:place] + bytes([value[place] ^ 1 << self.chance.randrange(8)]) + value[place + 1 :]

    def _exchange(self) -> None:
        found = list(self.values())
        for i, (name, _) in enumerate(found):
            self.server.do("SET", name, found[i - 1][1], "EX", 1000)

    def _put_those_of_another_model(self) -> None:
        """Store another model's values under this model's keys, which that model would never do."""
        with LLMCache.wrap(model(seed=1), **settings(self.server.url, prefix="another")) as cache:
            for ids in self.requests:
                cache(ids)
            cache.drain()
        theirs = [value for _, value in self.values("another")]
        for name, _ in self.values():
            if theirs:
                self.server.do("SET", name, self.chance.choice(theirs), "EX", 1000)

    def _fill(self) -> None:
        self.server.do("CONFIG", "SET", "maxmemory", "1mb", "maxmemory-policy", "noeviction")
        self.ask(4)
        self.maybe_purge()
        self.server.do("CONFIG", "SET", "maxmemory", 0)

    def _fill_disk(self) -> None:
        with self.server.disk_full():
            self.ask(4)
            self.maybe_purge()

    def _jump(self) -> None:
        """Set the workers' clock a day ahead, and expire everything in Redis."""
        real = time.time
        with patch("time.time", lambda: real() + _DAY_S):
            for name in self.server.names():
                self.server.do("EXPIRE", name, 0)
            self.ask(4)

    def _write_twice(self) -> None:
        number, namespace = self.chance.randrange(N_REQUESTS), self.chance.choice(NAMESPACES)
        with ThreadPoolExecutor(2) as pool:
            hits = list(pool.map(lambda cache: self.call(cache, namespace, number), self.caches))
        self.seen["stale"] += all(hits) and number not in self.computed[namespace]
        self.computed[namespace].add(number)

    def _purge_while_writing(self) -> None:
        """Purge a namespace while the other cache serves it. Entries computed meanwhile may stay: they may be later."""
        one, other = self.caches
        namespace = self.chance.choice(NAMESPACES)
        asked: set[int] = set()
        with ThreadPoolExecutor(1) as pool:
            purging = pool.submit(one.purge, namespace=namespace)
            while not purging.done():
                number = self.chance.randrange(N_REQUESTS // 2)
                self.call(other, namespace, number)
                asked.add(number)
        with suppress(StoreError):
            purging.result()
            self.seen["purges"] += 1
            self.computed[namespace].clear()
        self.computed[namespace] |= asked

    def _restart(self) -> None:
        self.stop(self.caches.pop(self.chance.randrange(2)))
        self.caches.append(self.start())

    def _load(self) -> None:
        """Load a cache saved at the last call of this fault; entries purged since must not be served."""
        cache = self.caches.pop(self.chance.randrange(2))
        latest, former = self.saves / "latest", self.saves / "former"
        if latest.exists():
            latest.rename(former)
        cache.save(latest)
        self.stop(cache)
        self.caches.append(LLMCache.load(model(), former if former.exists() else latest))
        shutil.rmtree(former, ignore_errors=True)

    def _kill_worker(self) -> None:
        kill_worker(self.server.url, self.chance)
        for computed in self.computed.values():  # the worker may have computed any request
            computed |= set(range(N_REQUESTS))
