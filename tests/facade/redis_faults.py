"""Faults of a Redis that two caches share, drawn and injected in turn: `python -m tests.facade.redis_faults 1000`.

After each, both caches are asked requests that one of them may know, in some namespace, and namespaces are purged. An
answer that is not the model's is wrong; a hit of what was computed before a purge of its namespace that has returned is
stale. Prints how many of each kind, of how many requests and hits.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from llmcache import LLMCache, StoreError
from tests.redis_server import RedisServer, redis_server
from tests.tiny_models import CLASSIFIERS, build, tokens

_NAMESPACES = "abc"
_N_REQUESTS = 6


class Faults:
    """Two caches, their server, and what they were asked."""

    def __init__(self, server: RedisServer, seed: int) -> None:
        """Begin with all in order."""
        self.server = server
        self.seen: Counter[str] = Counter()
        self.chance = random.Random(seed)
        self.requests = [tokens(1, 9, seed=i) for i in range(_N_REQUESTS)]
        self.caches = [self._start() for _ in range(2)]
        with self.caches[0].disabled():
            self.expected = [self.caches[0](ids).logits for ids in self.requests]
        # Since a namespace was purged, who computed which request: anybody's hit before that would be stale.
        self.computed: dict[str, set[int]] = {name: set() for name in _NAMESPACES}
        self.kinds: dict[str, Callable[[], None]] = {
            "none": lambda: None,
            "killed": self.kill,
            "paused": self.pause,
            "connections reset": server.reset_connections,
            "numbers lost": lambda: self.lose("generations"),
            "stream lost": lambda: self.lose("events"),
            "value cut": lambda: self.damage(lambda value: value[: len(value) // 2]),
            "byte flipped": lambda: self.damage(self._flip),
            "values exchanged": self.exchange,
            "all removed": lambda: server.do("FLUSHALL"),
            "out of memory": self.fill,
            "cache restarted": self.restart,
        }

    def run(self, times: int) -> None:
        """Inject faults, and ask after each."""
        for _ in range(times):
            name = self.chance.choice(list(self.kinds))
            self.seen[f"fault: {name}"] += 1
            self.kinds[name]()
            for _ in range(4):
                self.ask()
            if self.chance.random() < 0.3:
                self.purge()
            self.ask()

    def ask(self) -> None:
        """One request of one cache."""
        number, namespace = self.chance.randrange(_N_REQUESTS), self.chance.choice(_NAMESPACES)
        cache = self.chance.choice(self.caches)
        with cache.namespace(namespace):
            output: Tensor = cache(self.requests[number]).logits
        is_hit = cache.last[0].rung == "exact"
        self.seen["requests"] += 1
        self.seen["hits"] += is_hit
        self.seen["wrong"] += not torch.equal(output, self.expected[number])
        self.seen["stale"] += is_hit and number not in self.computed[namespace]
        self.computed[namespace].add(number)

    def purge(self) -> None:
        namespace = self.chance.choice(_NAMESPACES)
        try:
            self.chance.choice(self.caches).purge(namespace=namespace)
        except StoreError:
            self.seen["purges that failed"] += 1
        else:
            self.seen["purges"] += 1
            self.computed[namespace].clear()

    def kill(self) -> None:
        self.server.kill()
        for _ in range(self.chance.randrange(8)):
            self.ask()
        if self.chance.random() < 0.3:
            self.purge()
        self.server.start()
        time.sleep(self.chance.choice((0, 0.3)))

    def pause(self) -> None:
        with self.server.paused():
            for _ in range(self.chance.randrange(8)):
                self.ask()
            time.sleep(self.chance.choice((0, 1.2)))

    def lose(self, name: str) -> None:
        for found in self.server.names(f"*:{name}"):
            self.server.do("DEL", found)

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        for name in self._values():
            if (value := self.server.do("GET", name)) is not None:
                self.server.do("SET", name, change(value), "EX", 1000)

    def exchange(self) -> None:
        names = self._values()
        values = [self.server.do("GET", name) for name in names]
        for name, value in zip(names, [*values[1:], *values[:1]], strict=True):
            if value is not None:
                self.server.do("SET", name, value, "EX", 1000)

    def fill(self) -> None:
        self.server.do("CONFIG", "SET", "maxmemory", "1mb", "maxmemory-policy", "noeviction")
        for _ in range(4):
            self.ask()
        if self.chance.random() < 0.3:
            self.purge()
        self.server.do("CONFIG", "SET", "maxmemory", 0)

    def restart(self) -> None:
        """One of the caches ends, and another one begins, which knows nothing."""
        self._stop(self.caches.pop(self.chance.randrange(2)))
        self.caches.append(self._start())

    def close(self) -> None:
        for cache in self.caches:
            self._stop(cache)

    def _start(self) -> LLMCache:
        store = {"name": "redis", "url": self.server.url, "timeout_ms": 50.0}
        settings = {"store": store, "store_least_tokens": 0, "auto_bypass": False}
        return LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)

    def _stop(self, cache: LLMCache) -> None:
        store = cache.stats().store
        assert store is not None
        self.seen["read from Redis"] += store.n_found
        self.seen["mismatched"] += sum(store.n_mismatched.values())
        cache.unwrap()

    def _values(self) -> list[str]:
        return self.server.names("llmcache:*:*:*")

    def _flip(self, value: bytes) -> bytes:
        place = self.chance.randrange(len(value))
        return value[:place] + bytes([value[place] ^ 1 << self.chance.randrange(8)]) + value[place + 1 :]


def inject(folder: Path, times: int, seed: int = 0) -> Counter[str]:
    """So many faults; what was seen."""
    with redis_server(folder) as server:
        faults = Faults(server, seed)
        try:
            faults.run(times)
        finally:
            with suppress(StoreError):
                faults.close()
        return faults.seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.stdout.write(json.dumps(inject(Path(place), int(sys.argv[1])), indent=1) + "\n")
