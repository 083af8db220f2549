"""Two caches that share a Redis, and requests with known answers."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.support.redis_server import RedisServer
from llmcache import LLMCache, StoreError

NAMESPACES = "abc"
N_REQUESTS = 6
_PURGED = 0.3  # probability of a purge at each opportunity
_VOCABULARY = 96


class Pair:
    """Two caches, their server, and the requests they served."""

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
    """Compute and write until killed."""
    torch.set_num_threads(1)
    chance, requests = random.Random(seed), drawn()
    cache = LLMCache.wrap(model(), **settings(url))
    say.send(None)
    while True:
        with cache.namespace(chance.choice(NAMESPACES)), suppress(StoreError):
            if chance.random() < 0.1:
                cache.clear()
            cache(chance.choice(requests))
