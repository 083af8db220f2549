"""Samples of the cache's statistics over the last hour, for the plots of the page at `/`."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from llmcache.stats import AuditStats, Stats

EVERY_S: Final = 5.0
_MAX_SAMPLES = 720  # one hour
_MAX_DRAWN = 120  # samples drawn


class Sample(NamedTuple):
    """Statistics at one time; `at_s` is in seconds of a monotonic clock."""

    at_s: float
    n_requests: int
    hits: Mapping[str, int]
    audit: AuditStats | None


class Interval(NamedTuple):
    """Requests between two samples; `shares` is the hit rate of each rung, 0 to 1."""

    seconds: float
    n_requests: int
    shares: Mapping[str, float]


class History:
    """Ring buffer of samples. Written by one thread at a time, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without samples; `clock` returns seconds."""
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)

    def add(self, stats: Stats) -> None:
        self._samples.append(Sample(self._clock(), stats.n_requests, dict(stats.hits), stats.audit))

    def samples(self) -> list[Sample]:
        """Return the samples to draw, evenly thinned, oldest first; the latest is always included."""
        samples = list(self._samples)
        step = -(-len(samples) // _MAX_DRAWN) or 1
        return samples[::-1][::step][::-1]

    def intervals(self) -> list[Interval]:
        """Return the intervals between `samples()`, oldest first."""
        found = []
        for first, last in pairwise(self.samples()):
            n_requests = last.n_requests - first.n_requests
            served = {rung: n - first.hits.get(rung, 0) for rung, n in last.hits.items()}
            shares = {rung: n / n_requests for rung, n in served.items() if n_requests > 0 and n > 0}
            found.append(Interval(last.at_s - first.at_s, n_requests, shares))
        return found
