"""Requests to a server: in an open loop at times that are fixed in advance, in a closed one by clients that wait.

In an open loop latency is from the time at which a request is due, not from when it was sent: a generator that falls
behind makes no answer look quicker. All requests are alike: one route, and bytes that were made beforehand.

Sizes: N requests.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from experiments.measures.over_http.client import Client, Reply

OK = 200
#: In place of a status: never sent or given up when the loop was cut; no answer in time; no connection.
CUT, TIMED_OUT, NO_CONNECTION = 0, 1, 2
NAMES = {CUT: "not asked", TIMED_OUT: "timed out", NO_CONNECTION: "no connection"}
PERCENTILES = (50, 90, 99)

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limit:
    """What an answer has to keep to, and how many may fail to."""

    ms: float
    share: float = 0.99  # of all requests; those that are refused or fail do not keep to it

    def most_late(self, n: int) -> int:
        """How many of `n` may be late, or fail."""
        return int(n * (1 - self.share) + 1e-9)


@dataclass(frozen=True, slots=True)
class Load:
    """What became of requests (N,); seconds from the start of the loop."""

    due_s: Times
    sent_s: Times
    done_s: Times
    status: NDArray[np.int64]  # of HTTP, or one of `NAMES`
    replies: list[Reply | None]  # those that were kept
    wall_s: float
    cpu_s: float  # of this process

    @classmethod
    def empty(cls, due_s: Times) -> Self:
        """Of requests that were not sent yet."""
        n = len(due_s)
        return cls(due_s, np.full(n, np.nan), np.full(n, np.nan), np.full(n, CUT), [None] * n, 0.0, 0.0)

    @property
    def is_cut(self) -> bool:
        """Whether some were not asked: too many were late by then."""
        return bool((self.status == CUT).any())

    @property
    def latency_ms(self) -> Times:
        """Of the requests that were answered with 200, from when they were due."""
        is_ok = self.status == OK
        return (self.done_s - self.due_s)[is_ok] * 1e3

    def n_kept(self, limit: Limit) -> int:
        """Requests that were answered within the limit."""
        return int((self.latency_ms <= limit.ms).sum())

    def keeps(self, limit: Limit) -> bool:
        """Whether enough of all requests were."""
        n = len(self.status)
        return not self.is_cut and n - self.n_kept(limit) <= limit.most_late(n)

    def figures(self) -> dict[str, Any]:
        """Latencies of what was answered with 200, and counts of all."""
        is_sent = ~np.isnan(self.sent_s)
        lag_ms = (self.sent_s - self.due_s)[is_sent] * 1e3
        n_ok = int((self.status == OK).sum())
        return {
            "n": len(self.status),
            "n_ok": n_ok,
            **percentiles(self.latency_ms),
            "throughput": n_ok / self.wall_s,
            "statuses": {NAMES.get(code, str(code)): n for code, n in sorted(Counter(self.status.tolist()).items())},
            "is_cut": self.is_cut,
            "wall_s": self.wall_s,
            "generator_cpu_s": self.cpu_s,
            "lag_p99_ms": float(np.percentile(lag_ms, 99)),
        }


def percentiles(ms: Times) -> dict[str, float | None]:
    """Those that are told of a service, `p50_ms` and so on; None without any."""
    found = np.percentile(ms, PERCENTILES) if len(ms) else [None] * len(PERCENTILES)
    return {f"p{p}_ms": None if value is None else float(value) for p, value in zip(PERCENTILES, found, strict=True)}


class Recorder:
    """Asks, and notes what becomes of requests."""

    def __init__(self, client: Client, requests: Sequence[bytes], due_s: Times, timeout_s: float, keep: int) -> None:
        """Of the replies every one whose number `keep` divides is kept; 0: none."""
        self.load = Load.empty(due_s)
        self._client, self._requests, self._timeout_s, self._keep = client, requests, timeout_s, keep
        self._started = perf_counter()

    @property
    def now_s(self) -> float:
        """Since the start."""
        return perf_counter() - self._started

    async def ask(self, i: int) -> None:
        """Have one request answered; it is no error if it is not."""
        load = self.load
        load.sent_s[i] = self.now_s
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._client.ask(self._requests[i])
        except TimeoutError:
            reply = Reply(TIMED_OUT, b"")
        except OSError:
            reply = Reply(NO_CONNECTION, b"")
        load.done_s[i] = self.now_s
        load.status[i] = reply.status
        if self._keep and i % self._keep == 0:
            load.replies[i] = reply


async def open_loop(
    client: Client,
    requests: Sequence[bytes],
    due_s: Times,
    *,
    limit: Limit | None = None,
    timeout_s: float = 30.0,
    keep: int = 1,
) -> Load:
    """Send each request when it is due. With a limit the loop is cut as soon as it is known to be broken."""
    with _quiet_collector():
        recorder = Recorder(client, requests, due_s, timeout_s, keep)
        started = process_time()
        tasks: list[asyncio.Task[None]] = []
        for i, due in enumerate(due_s):
            if (early := due - recorder.now_s) > 0:
                await asyncio.sleep(early)
            elif i % 16 == 0:
                await asyncio.sleep(0)  # what is late is sent all the same, and answers are read meanwhile
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
        return _ended(recorder, started)


def _is_broken(recorder: Recorder, limit: Limit, n_sent: int) -> bool:
    """Whether more requests are late already than may be, those that wait still included."""
    load = recorder.load
    done_s = np.where(load.status == OK, load.done_s, np.inf)[:n_sent]
    is_over = (load.status[:n_sent] != CUT) | (load.due_s[:n_sent] < recorder.now_s - limit.ms / 1e3)
    is_late = is_over & (done_s - load.due_s[:n_sent] > limit.ms / 1e3)
    return int(is_late.sum()) > limit.most_late(len(load.status))


async def closed_loop(
    client: Client,
    requests: Sequence[bytes],
    at_once: int,
    *,
    seconds: float | None = None,
    timeout_s: float = 30.0,
    keep: int = 1,
) -> Load:
    """So many clients, each of which asks when it was answered; after `seconds` none asks again."""
    with _quiet_collector():
        recorder = Recorder(client, requests, np.zeros(len(requests)), timeout_s, keep)
        started = process_time()
        numbers = iter(range(len(requests)))

        async def ask_on() -> None:
            for i in numbers:
                if seconds is not None and recorder.now_s > seconds:
                    return
                recorder.load.due_s[i] = recorder.now_s
                await recorder.ask(i)

        await asyncio.gather(*(ask_on() for _ in range(at_once)))
        return _ended(recorder, started)


def _ended(recorder: Recorder, started: float) -> Load:
    load = recorder.load
    parts = (load.due_s, load.sent_s, load.done_s, load.status, load.replies)
    return Load(*parts, wall_s=recorder.now_s, cpu_s=process_time() - started)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Within: the garbage collector passes over what is there already, which would take it a tenth of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_loop(loop: Coroutine[Any, Any, Load], client: Client) -> Load:
    """Run a loop to its end, and close the connections."""

    async def whole() -> Load:
        try:
            return await loop
        finally:
            client.close()

    return asyncio.run(whole())
