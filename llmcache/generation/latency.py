"""How long a request took, by the definitions of vLLM's serving benchmark (`vllm bench serve`), in seconds.

| name | from | to |
|---|---|---|
| TTFT | the request | its first token |
| ITL | a token | the next; one a gap |
| E2EL | the request | its last token |
| TPOT | (E2EL - TTFT) / (tokens - 1): the mean gap of a request; none for one token | |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from llmcache.errors import RequestError

QUOTABLE = 200  # values that a 90th and a 99th percentile take: of 200, two lie beyond the 99th
MISS = "miss"


@dataclass(frozen=True, slots=True)
class Latency:
    """One request.

    Attributes:
        times_s: When each of its tokens came, one at least, in seconds since the request.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse a request without tokens, which took no time that could be told.

        Raises:
            RequestError: There is none.
        """
        if not self.times_s:
            raise RequestError("times_s=(): a latency takes one token at least")

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0]

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies, one less than tokens."""
        return tuple(after - before for before, after in pairwise(self.times_s))

    @property
    def e2el_s(self) -> float:
        """End-to-end latency."""
        return self.times_s[-1]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for one token."""
        n_gaps = len(self.times_s) - 1
        return (self.e2el_s - self.ttft_s) / n_gaps if n_gaps else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Many values in few numbers, in seconds.

    Attributes:
        n: Values.
        mean: Their mean.
        median: Their median.
        p90: The 90th percentile, interpolated; None below `QUOTABLE` values.
        p99: The 99th, likewise.
    """

    n: int
    mean: float
    median: float
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """That of some values; None without any."""
        if not values:
            return None
        median, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        is_quotable = len(values) >= QUOTABLE
        return cls(
            len(values), float(np.mean(values)), median, p90 if is_quotable else None, p99 if is_quotable else None
        )


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Many requests of one kind.

    Attributes:
        n_requests: How many.
        ttft: A value a request.
        tpot: A value a request of two tokens or more; None without any.
        itl: A value a gap, those of all requests together; None without any.
        e2el: A value a request.
    """

    n_requests: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None


class Latencies:
    """Collects requests, those of each rung apart. One thread at a time."""

    def __init__(self) -> None:
        self._by_rung: dict[str, list[Latency]] = {}

    def add(self, latency: Latency, rung: str | None = None) -> None:
        """Add a request.

        Args:
            latency: Its times.
            rung: What served its prefill (`Generation.rung`), or None: it was computed.
        """
        self._by_rung.setdefault(rung or MISS, []).append(latency)

    def summary(self) -> dict[str, LatencySummary]:
        """By rung, `miss` for requests that were computed; only those that there were."""
        return {rung: _summarise(latencies) for rung, latencies in self._by_rung.items()}


def _summarise(latencies: Sequence[Latency]) -> LatencySummary:
    return LatencySummary(
        len(latencies),
        ttft=Spread.of([latency.ttft_s for latency in latencies]),
        tpot=Spread.of([latency.tpot_s for latency in latencies if latency.tpot_s is not None]),
        itl=Spread.of([gap for latency in latencies for gap in latency.itl_s]),
        e2el=Spread.of([latency.e2el_s for latency in latencies]),
    )
