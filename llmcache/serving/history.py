"""What the page at `/` draws: samples of the cache's figures, one every few seconds, for the last hour."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Final, NamedTuple

from llmcache.stats import AuditStats, Stats

logger = logging.getLogger("llmcache")

EVERY_S: Final = 5.0
_LATEST = 720  # an hour
_MOST_INTERVALS = 120  # that are drawn


class Sample(NamedTuple):
    """Figures of one moment, in seconds of a clock that only runs forward."""

    at_s: float
    n_requests: int
    hits: Mapping[str, int]
    audit: AuditStats | None


class Interval(NamedTuple):
    """What happened between two samples: `shares` of the requests were served, by rung, 0 to 1."""

    seconds: float
    n_requests: int
    shares: Mapping[str, float]


class History:
    """A ring of samples. Filled by one thread at a time, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without samples."""
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=_LATEST)

    def add(self, stats: Stats) -> None:
        """Take a sample."""
        self._samples.append(Sample(self._clock(), stats.n_requests, dict(stats.hits), stats.audit))

    def samples(self) -> list[Sample]:
        """Return as many as are drawn, oldest first, the latest among them."""
        samples = list(self._samples)
        step = -(-len(samples) // _MOST_INTERVALS) or 1
        return samples[::-1][::step][::-1]

    def intervals(self) -> list[Interval]:
        """Return what happened between them, oldest first."""
        return [_between(*pair) for pair in pairwise(self.samples())]

    @asynccontextmanager
    async def kept(self, read: Callable[[], Stats], every_s: float = EVERY_S) -> AsyncIterator[None]:
        """Within: take a sample every few seconds, in a thread of its own since `read` may wait."""

        async def keep() -> None:
            is_failing = False
            while True:
                try:
                    self.add(await asyncio.to_thread(read))
                    is_failing = False
                except Exception:  # the page then lacks a sample, and no request an answer
                    logger.log(logging.DEBUG if is_failing else logging.WARNING, "no sample was taken", exc_info=True)
                    is_failing = True
                await asyncio.sleep(every_s)

        task = asyncio.create_task(keep())
        try:
            yield
        finally:
            task.cancel()


def _between(first: Sample, last: Sample) -> Interval:
    n_requests = last.n_requests - first.n_requests
    served = {rung: n - first.hits.get(rung, 0) for rung, n in last.hits.items()}
    shares = {rung: n / n_requests for rung, n in served.items() if n_requests > 0 and n > 0}
    return Interval(last.at_s - first.at_s, n_requests, shares)
