"""Times that were measured, to draw from, and what they came with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_N_QUANTILES = 100


class Ladder:
    """Seconds by size, at some sizes of which there are samples; between two they are interpolated."""

    def __init__(self, samples: Mapping[int, Sequence[float]]) -> None:
        """Take samples in seconds by size, at least one each."""
        steps = (np.arange(_N_QUANTILES) + 0.5) / _N_QUANTILES
        self._sizes = sorted(samples)
        self._quantiles = [np.quantile(samples[size], steps).tolist() for size in self._sizes]
        self._means = [float(np.mean(samples[size])) for size in self._sizes]

    def draw(self, size: int, share: float) -> float:
        """The time that so large a share of times, 0 to 1, stays below; beyond the largest size it grows with size."""
        return self._at(size, [row[int(share * _N_QUANTILES)] for row in self._quantiles])

    def mean(self, size: int) -> float:
        return self._at(size, self._means)

    def figures(self) -> list[dict[str, float]]:
        """For results: milliseconds by size."""
        rows = zip(self._sizes, self._quantiles, self._means, strict=True)
        return [
            {"size": size, "p50_ms": 1e3 * row[_N_QUANTILES // 2], "p99_ms": 1e3 * row[-1], "mean_ms": 1e3 * mean}
            for size, row, mean in rows
        ]

    def _at(self, size: int, values: Sequence[float]) -> float:
        if size == 0:
            return 0.0
        if size > self._sizes[-1]:
            return values[-1] * size / self._sizes[-1]
        return float(np.interp(size, self._sizes, values)) if len(values) > 1 else values[0]


@dataclass(frozen=True, slots=True)
class Use:
    """What a Redis spends."""

    cpu_s: float = 0.0  # of its thread
    ops: float = 0.0  # commands
    nbytes: float = 0.0  # in and out

    def __iter__(self) -> Iterator[float]:
        return iter((self.cpu_s, self.ops, self.nbytes))

    @property
    def floored(self) -> "Use":
        """Without what noise made negative."""
        return Use(*(max(0.0, one) for one in self))

    def __add__(self, other: "Use") -> "Use":
        return Use(self.cpu_s + other.cpu_s, self.ops + other.ops, self.nbytes + other.nbytes)

    def __sub__(self, other: "Use") -> "Use":
        return self + other * -1

    def __mul__(self, factor: float) -> "Use":
        return Use(self.cpu_s * factor, self.ops * factor, self.nbytes * factor)


@dataclass(frozen=True, slots=True)
class Times:
    """What one kind of request takes; sizes are entries or blocks.

    Attributes:
        compute: A call that computes so many and finds none.
        hit: A call that has so many in memory.
        fetch: What a call takes longer where so many come from the Redis, without the server's own time.
        look: Asking the Redis for what it has not, likewise.
        delay: From the end of a call that computes to when others could have heard, without the server's own time.
        hear: What a call takes longer for an announcement.
        follow_s: Processor time of the thread that follows the stream, for one value that others computed.
        follow_more_s: Likewise, for each further one that it is told of at once.
        asked: What the Redis spends on asking in vain.
        read: On a value that is read.
        written: On a value that is written, announcement included.
        written_more: On each further one that is written at once.
        told: On telling one worker of one value.
        told_more: On each further one that it is told of at once.
        nbytes: Of a value.
    """

    compute: Ladder
    hit: Ladder
    fetch: Ladder
    look: Ladder
    delay: Ladder
    hear: Ladder
    follow_s: float
    follow_more_s: float
    asked: Use
    read: Use
    written: Use
    written_more: Use
    told: Use
    told_more: Use
    nbytes: int

    def of_calls(self, compute: Sequence[float], hit: Sequence[float]) -> "Times":
        """With other seconds for calls that compute and that hit, of requests of one entry."""
        return replace(self, compute=Ladder({1: compute}), hit=Ladder({1: hit}))

    def figures(self) -> dict[str, Any]:
        """For results."""
        ladders = {name: getattr(self, name).figures() for name in ("compute", "hit", "fetch", "look", "delay", "hear")}
        redis = {
            f"{name}_{what}": 1e6 * use.cpu_s if what == "cpu_us" else getattr(use, what)
            for name in ("asked", "read", "written", "written_more", "told", "told_more")
            for use in (getattr(self, name),)
            for what in ("cpu_us", "ops", "nbytes")
        }
        follow = {"follow_us": 1e6 * self.follow_s, "follow_more_us": 1e6 * self.follow_more_s}
        return {**ladders, **redis, **follow, "entry_nbytes": self.nbytes}
