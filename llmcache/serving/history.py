"""What the page at `/` draws: samples of the cache's figures, one every few seconds, for the last hour."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from llmcache.stats import Stats

logger = logging.getLogger("llmcache")

EVERY_S: Final = 5.0
_LATEST = 720  # an hour
_MOST_INTERVALS = 120  # that are drawn


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one moment.

    Attributes:
        at_s: The moment, seconds of a clock that only runs forward.
        n_requests: Rows so far.
        hits: Those served, by rung.
        rate: Estimated share of changed answers; None where nothing is audited.
        lower: Its lower bound.
        upper: Its upper bound.
    """

    at_s: float
    n_requests: int
    hits: Mapping[str, int]
    rate: float | None = None
    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two samples.

    Attributes:
        seconds: Its length.
        n_requests: Rows that came in it.
        shares: Of these, those served, by rung, 0 to 1; of rungs that served any.
    """

    seconds: float
    n_requests: int
    shares: Mapping[str, float]


class History:
    """A ring of samples. Filled by one thread at a time, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """None yet."""
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=_LATEST)

    def add(self, stats: Stats) -> None:
        """Take a sample."""
        audit = stats.audit
        bound = (None, None, None) if audit is None else (audit.rate, audit.lower, audit.upper)
        self._samples.append(Sample(self._clock(), stats.n_requests, dict(stats.hits), *bound))

    def samples(self) -> list[Sample]:
        """So many as are drawn, oldest first, the latest among them."""
        samples = list(self._samples)
        step = -(-len(samples) // _MOST_INTERVALS) or 1
        return samples[::-1][::step][::-1]

    def intervals(self) -> list[Interval]:
        """What happened between them, oldest first."""
        samples = self.samples()
        return [_between(*pair) for pair in pairwise(samples)]

    @asynccontextmanager
    async def kept(self, read: Callable[[], Stats], every_s: float = EVERY_S) -> AsyncIterator[None]:
        """Within: a sample is taken every few seconds, in a thread of its own since `read` may wait."""

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
