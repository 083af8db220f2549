"""Latencies of requests, in seconds, by the definitions of vLLM's serving benchmark (`vllm bench serve`).

| name | from | to |
|---|---|---|
| TTFT | the request | its first token |
| ITL | a token | the next; one value per gap |
| E2EL | the request | its last token |
| TPOT | (E2EL - TTFT) / (tokens - 1): the mean gap of a request; None for one token | |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from llmcache.errors import RequestError

QUOTABLE = 200  # values needed to report the 90th and 99th percentile: of 200, two exceed the 99th
MISS = "miss"


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one request.

    Attributes:
        times_s: Time of each token, at least one, in seconds since the request.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise `RequestError` if there is no token."""
        if not self.times_s:
            raise RequestError("times_s=(): a latency takes one token at least")

    @property
    def ttft_s(self) -> float:
        """Time to the first token, in seconds."""
        return self.times_s[0]

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies in seconds, one fewer than tokens."""
        return tuple(after - before for before, after in pairwise(self.times_s))

    @property
    def e2el_s(self) -> float:
        """End-to-end latency, in seconds."""
        return self.times_s[-1]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds; None for one token."""
        n_gaps = len(self.times_s) - 1
        return (self.e2el_s - self.ttft_s) / n_gaps if n_gaps else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary statistics of many values, in seconds.

    Attributes:
        n: Number of values.
        mean: Their mean.
        median: Their median.
        p90: The 90th percentile, interpolated; None below `QUOTABLE` values.
        p99: The 99th percentile, interpolated; None below `QUOTABLE` values.
    """

    n: int
    mean: float
    median: float
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Return the statistics of some values in seconds; None if there are none."""
        if not values:
            return None
        median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        is_quotable = len(values) >= QUOTABLE
        return cls(len(values), float(np.mean(values)), median, *((p90, p99) if is_quotable else (None, None)))


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """The latencies of many requests.

    Attributes:
        n_requests: Number of requests.
        ttft: Over requests.
        tpot: Over requests of two tokens or more; None if there are none.
        itl: Over the gaps of all requests; None if there are none.
        e2el: Over requests.
    """

    n_requests: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None


class Latencies:
    """Collects latencies of requests by the rung that served the prefill. One thread at a time."""

    def __init__(self) -> None:
        self._by_rung: dict[str, list[Latency]] = {}

    def add(self, latency: Latency, rung: str | None = None) -> None:
        """Add a request.

        Args:
            latency: Its latencies.
            rung: The rung that served its prefill (`Generation.rung`); None: it was computed.
        """
        self._by_rung.setdefault(rung or MISS, []).append(latency)

    def summary(self) -> dict[str, LatencySummary]:
        """Return a summary for each rung that served requests, and under `miss` for computed requests, if any."""
        return {
            rung: LatencySummary(
                len(latencies),
                ttft=Spread.of([latency.ttft_s for latency in latencies]),
                tpot=Spread.of([latency.tpot_s for latency in latencies if latency.tpot_s is not None]),
                itl=Spread.of([gap for latency in latencies for gap in latency.itl_s]),
                e2el=Spread.of([latency.e2el_s for latency in latencies]),
            )
            for rung, latencies in self._by_rung.items()
        }
