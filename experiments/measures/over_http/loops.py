"""Load on a server: an open loop with arrival times fixed in advance, or a closed loop of waiting clients.

In an open loop, latency counts from the time a request is due, not from when it was sent, so a slow load generator
cannot make answers look faster. All requests use one route, and their bytes are made beforehand.

Sizes: N requests.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.measures.over_http.client import CUT, NO_CONNECTION, OK, TIMED_OUT, Client, Reply
from llmcache import ConfigError

NAMES = {CUT: "not asked", TIMED_OUT: "timed out", NO_CONNECTION: "no connection"}
PERCENTILES = (50, 90, 99)
MOST_RATES = 40

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limit:
    ms: float  # longest latency
    share: float = 0.99  # of all requests; refused and failed requests count as late

    def most_late(self, n: int) -> int:
        return int(n * (1 - self.share) + 1e-9)


@dataclass(frozen=True, slots=True)
class Load:
    """Outcomes of requests (N,), with times in seconds from the start of the loop."""

    due_s: Times
    sent_s: Times
    done_s: Times
    status: NDArray[np.int64]  # HTTP status, or a key of `NAMES`
    replies: list[Reply | None]  # replies that were kept, else None
    wall_s: float
    cpu_s: float  # CPU time of this process

    @property
    def is_cut(self) -> bool:
        """Whether the loop was cut short because too many requests were late."""
        return bool((self.status == CUT).any())

    @property
    def latency_ms(self) -> Times:
        """Latencies from the due time, of requests answered with 200, ms."""
        return (self.done_s - self.due_s)[self.status == OK] * 1e3

    def n_kept(self, limit: Limit) -> int:
        return int((self.latency_ms <= limit.ms).sum())

    def keeps(self, limit: Limit) -> bool:
        n = len(self.status)
        return not self.is_cut and n - self.n_kept(limit) <= limit.most_late(n)

    def figures(self) -> dict[str, Any]:
        """Return latencies of requests answered with 200, and counts of all requests."""
        is_sent = ~np.isnan(self.sent_s)
        lag_ms = (self.sent_s - self.due_s)[is_sent] * 1e3
        ms = self.latency_ms
        told = [float(one) for one in np.percentile(ms, PERCENTILES)] if len(ms) else [None] * len(PERCENTILES)
        return {
            "n": len(self.status),
            "n_ok": len(ms),
            **{f"p{p}_ms": value for p, value in zip(PERCENTILES, told, strict=True)},
            "throughput": len(ms) / self.wall_s,
            "statuses": {NAMES.get(code, str(code)): n for code, n in sorted(Counter(self.status.tolist()).items())},
            "is_cut": self.is_cut,
            "wall_s": self.wall_s,
            "generator_cpu_s": self.cpu_s,
            "lag_p99_ms": float(np.percentile(lag_ms, 99)),
        }


def poisson(n: int, rng: np.random.Generator) -> Times:
    """Return `n` arrivals of a Poisson process, from 0 on with a mean gap of 1."""
    later = rng.exponential(size=n - 1).cumsum()
    return np.concatenate([[0.0], later * (len(later) / later[-1])])


class _Recorder:
    """Sends requests and records their outcomes. Keeps every `keep`-th reply; 0: none."""

    def __init__(self, port: int, requests: Sequence[bytes], due_s: Times, timeout_s: float, keep: int) -> None:
        n = len(due_s)
        self.load = Load(due_s, np.full(n, np.nan), np.full(n, np.nan), np.full(n, CUT), [None] * n, 0.0, 0.0)
        self._client, self._requests, self._timeout_s, self._keep = Client(port), requests, timeout_s, keep
        self._started = 0.0

    @property
    def now_s(self) -> float:
        return perf_counter() - self._started

    async def ask(self, i: int) -> None:
        """Send one request and record its outcome; a failure raises nothing."""
        load = self.load
        load.sent_s[i] = self.now_s
        reply = await self._client.attempt(self._requests[i], self._timeout_s)
        load.done_s[i] = self.now_s
        load.status[i] = reply.status
        if self._keep and i % self._keep == 0:
            load.replies[i] = reply

    def run(self, loop: Coroutine[Any, Any, None]) -> Load:

        async def whole() -> Load:
            self._started, cpu_s = perf_counter(), process_time()
            try:
                await loop
            finally:
                self._client.close()
            return replace(self.load, wall_s=self.now_s, cpu_s=process_time() - cpu_s)

        with _quiet_collector():
            return asyncio.run(whole())


def open_loop(
    port: int,
    requests: Sequence[bytes],
    due_s: Times,
    *,
    limit: Limit | None = None,
    timeout_s: float = 30.0,
    keep: int = 1,
) -> Load:
    """Send each request when it is due. With a limit, stop as soon as the limit is certainly broken."""
    recorder = _Recorder(port, requests, due_s, timeout_s, keep)
    return recorder.run(_ask_when_due(recorder, due_s, limit))


async def _ask_when_due(recorder: _Recorder, due_s: Times, limit: Limit | None) -> None:
    tasks: list[asyncio.Task[None]] = []
    for i, due in enumerate(due_s):
        if (early := due - recorder.now_s) > 0:
            await asyncio.sleep(early)
        elif i % 16 == 0:
            await asyncio.sleep(0)  # late requests are still sent, and replies are read meanwhile
        tasks.append(asyncio.create_task(recorder.ask(i)))
        if limit is not None and i % 16 == 0 and _is_broken(recorder, limit, i):
            break
    while limit is not None and not all(task.done() for task in tasks):
        if _is_broken(recorder, limit, len(tasks)):
            break
        await asyncio.sleep(0.01)
    else:
        await asyncio.gather(*tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_broken(recorder: _Recorder, limit: Limit, n_sent: int) -> bool:
    """Whether more requests are already late than the limit allows, including those still waiting."""
    load = recorder.load
    done_s = np.where(load.status == OK, load.done_s, np.inf)[:n_sent]
    is_over = (load.status[:n_sent] != CUT) | (load.due_s[:n_sent] < recorder.now_s - limit.ms / 1e3)
    is_late = is_over & (done_s - load.due_s[:n_sent] > limit.ms / 1e3)
    return int(is_late.sum()) > limit.most_late(len(load.status))


def closed_loop(
    port: int, requests: Sequence[bytes], at_once: int, *, seconds: float | None = None, keep: int = 1
) -> Load:
    """Run `at_once` clients that each send their next request once answered; none sends after `seconds`."""
    recorder = _Recorder(port, requests, np.zeros(len(requests)), 30.0, keep)
    numbers = iter(range(len(requests)))

    async def ask_on() -> None:
        for i in numbers:
            if seconds is not None and recorder.now_s > seconds:
                return
            recorder.load.due_s[i] = recorder.now_s
            await recorder.ask(i)

    async def ask_all() -> None:
        await asyncio.gather(*(ask_on() for _ in range(at_once)))

    return recorder.run(ask_all())


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Exempt existing objects from garbage collection, which would take a tenth of a second to scan them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def largest_rate(is_held: Callable[[float], bool], first: float, precision: float) -> float:
    """Return the largest rate that is held: double the rate until it breaks, then bisect.

    The search ends when the lowest broken rate is at most `1 + precision` times the highest held rate.
    """
    held, broken = 0.0, 0.0
    rate = first
    for _ in range(MOST_RATES):
        if is_held(rate):
            held = rate
        else:
            broken = rate
        if held and broken and broken <= held * (1 + precision):
            return held
        rate = (held + broken) / 2 if held and broken else 2 * held or broken / 2
    raise ConfigError(
        f"first_rate={first:g}: no rate was found in {MOST_RATES} trials that is held, beside one that is not"
    )
