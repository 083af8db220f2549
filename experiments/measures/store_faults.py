"""Measure `store_faults`: faults of Redis and of workers, injected while caches that share the Redis serve requests.

After each fault, both caches get requests that either may have stored, in several namespaces, some of which are purged.
Counted are answers that differ from the model's (`wrong`), hits on entries computed before a completed purge of their
namespace (`stale`), and calls that raised (`crashed`).
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from pydantic import Field

from experiments.measures.base import Experiment, Outcome
from experiments.measures.store_pair import N_REQUESTS, NAMESPACES, Pair, kill_worker, model, settings
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import RedisServer, check_installed, redis_server
from llmcache import LLMCache, StoreError

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
