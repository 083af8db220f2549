"""Measures what a simulation draws from: real caches of this process, and a Redis of their own.

What the Redis spends is what it says of itself (`INFO`), over many requests of one kind. What it spends on telling a
worker is the slope over the number of workers that follow, once for values that come one by one, and once for some that
come at once: whoever is told late is told of all that came meanwhile.

| time | how it is measured |
|---|---|
| compute, hit | calls of requests that are new, and of the same again |
| fetch | calls of requests that another cache stored, less calls of the same again, in pairs |
| look | asking the store for values that it has not |
| delay | from the end of a call that computes to when a worker that follows has heard |
| hear | calls after some announcements less calls after none, by announcement |
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import Any

from experiments.simulation.times import Ladder, Times, Use
from experiments.support.progress import tracked
from experiments.support.redis_server import RedisServer
from llmcache import STORES, LLMCache
from llmcache.banks.stores import Put, StoreKey

_POLL_S = 0.0002
_PATIENCE_S = 10.0
_SETTLE_S = 0.5  # until what was announced has been heard
_TRIES = 100
_HEARD_AT_ONCE = 16
_TOLD_AT_ONCE, _TURNS = 32, 20
_FOLLOWERS = (0, 8)  # beside the cache's own
_NEVER = StoreKey("default", "0" * 64, "never")


@dataclass(frozen=True)
class Asked:
    """How requests of one kind are asked.

    Attributes:
        open: Wraps a model of its own, with a store; caches of all models find each other's.
        ask: Asks a cache for one request.
        draw: A request of a size that nobody asked for yet.
        sizes: Those that are measured, in entries or blocks.
        n: Requests of each size, and of each kind of use.
        announces: Whether requests are announced, too.
    """

    open: Callable[[], LLMCache]
    ask: Callable[[LLMCache, Any], None]
    draw: Callable[[int], Any]
    sizes: Sequence[int]
    n: int
    announces: bool


def measure(asked: Asked, server: RedisServer) -> Times:
    """All times of a kind of request."""
    gone, look = _asking(asked, server)
    with _opened(asked) as writer:
        written, told, follow_s = _writing(asked, server, writer)
        longer = _spent(asked, server, writer, asked.sizes[len(asked.sizes) // 2])
        delay, note_nbytes = _delays(asked, server, writer, written + told)
        with _opened(asked) as reader:
            calls = [_calls(asked, server, writer, reader, size) for size in asked.sizes]
            hear = _hearing(asked, writer, reader) if asked.announces else [0.0]
    at_once, follow_at_once_s = _telling(asked, server, note_nbytes)
    told_more = Use(*(_of_further(*pair) for pair in zip(told, at_once, strict=True)))
    n_more, read = asked.sizes[len(asked.sizes) // 2] - 1, calls[-1].used
    written_more = (longer - written - told) * (1 / n_more) - told_more if n_more else written - gone
    return Times(
        compute=Ladder({one.size: one.compute for one in calls}),
        hit=Ladder({one.size: one.again for one in calls}),
        fetch=Ladder({one.size: one.longer(read) for one in calls}),
        look=Ladder({1: [max(0.0, one - gone.cpu_s) for one in look]}),
        delay=Ladder({1: delay}),
        hear=Ladder({1: hear}),
        follow_s=follow_s,
        follow_more_s=_of_further(follow_s, follow_at_once_s),
        asked=gone,
        read=read,
        written=(written - gone).floored,  # each call has asked in vain before it computed
        written_more=written_more.floored,
        told=told.floored,
        told_more=told_more,
        nbytes=round(read.nbytes),
    )


@dataclass(frozen=True, slots=True)
class _Calls:
    """Seconds of calls of one size, and what the Redis spent on a value that was read."""

    size: int
    compute: Sequence[float]
    remote: Sequence[float]
    again: Sequence[float]
    used: Use

    def longer(self, read: Use) -> list[float]:
        """How much longer a call takes that reads, without what the Redis works."""
        pairs = zip(self.remote, self.again, strict=True)
        return [max(0.0, remote - again - self.size * read.cpu_s) for remote, again in pairs]


@contextmanager
def _opened(asked: Asked) -> Iterator[LLMCache]:
    """A cache that has seen some calls."""
    cache = asked.open()
    try:
        for _ in range(3):
            _compute(asked, cache, asked.sizes[0])
        cache.drain()
        yield cache
    finally:
        cache.unwrap()


@contextmanager
def _followers(server: RedisServer, n: int) -> Iterator[list[Any]]:
    """Stores that follow what happens, and have begun to."""
    stores = [STORES["redis"](url=server.url, timeout_ms=1e3 * _PATIENCE_S) for _ in range(n)]
    try:
        time.sleep(_SETTLE_S)
        yield stores
    finally:
        for store in stores:
            store.close()


def _asking(asked: Asked, server: RedisServer) -> tuple[Use, list[float]]:
    """What the Redis spends on asking in vain, and seconds that it takes."""
    n, look = 10 * asked.n, []
    with _followers(server, 1) as (store,):
        before = _used(server)
        for _ in range(n):
            began = perf_counter()
            store.get_many([_NEVER], monotonic() + _PATIENCE_S)
            look.append(perf_counter() - began)
        return (_used(server) - before) * (1 / n), look


def _writing(asked: Asked, server: RedisServer, writer: LLMCache) -> tuple[Use, Use, float]:
    """What the Redis spends on a value that is computed, and on telling one worker of it; and a follower's time."""
    spent, follow_s = [], 0.0
    for n_followers in _FOLLOWERS:
        with _followers(server, n_followers):
            cpu_s = _followers_cpu_s()
            spent.append(_spent(asked, server, writer, 1))
            follow_s = (_followers_cpu_s() - cpu_s) / (asked.n * (n_followers + 1))
    told = (spent[1] - spent[0]) * (1 / (_FOLLOWERS[1] - _FOLLOWERS[0]))
    return spent[0] - told, told, follow_s


def _spent(asked: Asked, server: RedisServer, writer: LLMCache, size: int) -> Use:
    """What the Redis spends on a request of a size that is computed and written."""
    before = _used(server)
    for _ in tracked(range(asked.n), asked.n, f"Writing, size {size}"):
        _compute(asked, writer, size)
        writer.drain()
    time.sleep(_SETTLE_S / 10)
    return (_used(server) - before) * (1 / asked.n)


def _telling(asked: Asked, server: RedisServer, note_nbytes: int) -> tuple[Use, float]:
    """What the Redis and a follower spend on a value where some are told at once, as where they had to wait."""
    spent, follow_s = [], 0.0
    for n_followers in _FOLLOWERS:
        with _followers(server, n_followers + 1) as (store, *_):
            generation = store.generation(_NEVER.namespace)
            before, cpu_s = _used(server), _followers_cpu_s()
            for turn in range(_TURNS):
                names = [f"{n_followers}.{turn}.{i}" for i in range(_TOLD_AT_ONCE)]
                puts = [Put(replace(_NEVER, name=name), b"some", generation) for name in names]
                if asked.announces:
                    notes = [
                        Put(replace(_NEVER, name=f"{name}n"), b"", generation, bytes(note_nbytes)) for name in names
                    ]
                    puts = [one for pair in zip(puts, notes, strict=True) for one in pair]
                store.put_many(puts)
                time.sleep(_SETTLE_S / 5)
            n = _TURNS * _TOLD_AT_ONCE
            spent.append((_used(server) - before) * (1 / n))
            follow_s = (_followers_cpu_s() - cpu_s) / (n * (n_followers + 1))
    return (spent[1] - spent[0]) * (1 / (_FOLLOWERS[1] - _FOLLOWERS[0])), follow_s


def _of_further(one: float, at_once: float) -> float:
    """What each further value takes, given what one alone takes, and each of some that are told at once."""
    return max(0.0, (_TOLD_AT_ONCE * at_once - one) / (_TOLD_AT_ONCE - 1))


def _delays(asked: Asked, server: RedisServer, writer: LLMCache, use: Use) -> tuple[list[float], int]:
    """Seconds until a follower has heard, without what the Redis works; and the bytes of what is announced."""
    delays, note_nbytes = [], 0
    with _followers(server, 1) as (store,):
        for _ in tracked(range(asked.n), asked.n, "Announcing"):
            cursor = store.events(None).cursor
            _compute(asked, writer, asked.sizes[0])
            began = perf_counter()
            while not store.events(cursor).found:
                if perf_counter() > began + _PATIENCE_S:
                    raise TimeoutError("a request was not announced")
                time.sleep(_POLL_S)
            delays.append(max(0.0, perf_counter() - began - use.cpu_s))
            writer.drain()
            time.sleep(_SETTLE_S / 10)
            note_nbytes = max(len(event.note) for event in store.events(cursor).found)
    return delays, note_nbytes


def _calls(asked: Asked, server: RedisServer, writer: LLMCache, reader: LLMCache, size: int) -> _Calls:
    """Calls that compute; of a cache that has to fetch what these left; and of the same cache once more."""
    requests, compute = [], []
    for _ in tracked(range(asked.n), asked.n, f"Computing, size {size}"):
        request, seconds = _compute(asked, writer, size)
        writer.drain()
        requests.append(request)
        compute.append(seconds)
    time.sleep(_SETTLE_S)
    _find(asked, reader, requests[0])  # hears what was announced
    before = _used(server)
    remote = [_find(asked, reader, request) for request in requests[1:]]
    used = (_used(server) - before) * (1 / (size * len(remote)))
    return _Calls(size, compute, remote, [_find(asked, reader, request) for request in requests[1:]], used)


def _hearing(asked: Asked, writer: LLMCache, reader: LLMCache) -> list[float]:
    """Seconds that a call takes longer by announcement."""
    known, _ = _compute(asked, reader, 1)
    heard = []
    for _ in tracked(range(asked.n // 4), asked.n // 4, "Hearing"):
        for _ in range(_HEARD_AT_ONCE):
            _compute(asked, writer, 1)
        writer.drain()
        time.sleep(_SETTLE_S / 10)
        longer_s = _find(asked, reader, known) - _find(asked, reader, known)
        heard.append(max(0.0, longer_s) / _HEARD_AT_ONCE)
    return heard


def _compute(asked: Asked, cache: LLMCache, size: int) -> tuple[Any, float]:
    """A request that the cache knows nothing of, and the seconds of computing it."""
    for _ in range(_TRIES):
        request = asked.draw(size)
        began = perf_counter()
        asked.ask(cache, request)
        seconds = perf_counter() - began
        if cache.last[0].rung is None:
            return request, seconds
    raise RuntimeError("requests that were made up are served from others")


def _find(asked: Asked, cache: LLMCache, request: Any) -> float:
    """Seconds of a call that the cache or its store has."""
    began = perf_counter()
    asked.ask(cache, request)
    seconds = perf_counter() - began
    if cache.last[0].rung is None:
        raise RuntimeError(f"a request that was stored was computed: {cache.stats().health}")
    return seconds


def _used(server: RedisServer) -> Use:
    """What the server has spent so far."""
    told = server.do("INFO", "all")
    cpu_s = told["used_cpu_user_main_thread"] + told["used_cpu_sys_main_thread"]
    nbytes = told["total_net_input_bytes"] + told["total_net_output_bytes"]
    return Use(cpu_s, told["total_commands_processed"], nbytes)


def _followers_cpu_s() -> float:
    """Processor time of the threads that follow."""
    idents = [one.ident for one in threading.enumerate() if one.name == "llmcache-redis" and one.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)
