"""Decides from measured times whether looking a value up pays, by length in tokens.

Where it does not, most look-ups are left out; one in so many is still made, so that all are made again once they pay.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import sqrt

_SURE = 1.645  # standard deviations: a one-sided upper limit of 95 %


@dataclass(slots=True)
class Mean:
    """The mean of n values. Beyond `window` values, older ones fade."""

    window: int
    n: int = 0
    value: float = 0.0

    def add(self, total: float, n: int) -> None:
        """Add n values by their sum."""
        self.n += n
        self.value += (total - n * self.value) / max(n, min(self.n, self.window))


class Times:
    """Means over the values of one length: seconds to look up and to compute, and the share of hits."""

    def __init__(self, window: int) -> None:
        self.look_up_s, self.hit_rate, self.computing_s = Mean(window), Mean(window), Mean(window)
        self.n_skipped, self.is_off = 0, False

    def pays(self) -> bool:
        """Whether the largest likely hit rate saves more time than looking up takes."""
        n = min(self.hit_rate.n, self.hit_rate.window)
        rate = (self.hit_rate.value * n + 1) / (n + 2)
        most = min(1.0, rate + _SURE * sqrt(rate * (1 - rate) / n))
        return most * self.computing_s.value >= self.look_up_s.value


class LookUpTimes:
    """Times by length, in powers of two. Two threads at once may lose a measurement, and nothing else."""

    def __init__(self, least: int, least_computed: int, window: int, seldom: int) -> None:
        """Decide once `least` look-ups and `least_computed` values were timed; then make at least one in `seldom`."""
        self._least, self._least_computed, self._seldom = least, least_computed, seldom
        self._by_length = defaultdict[int, Times](lambda: Times(window))

    def of(self, n_tokens: int) -> Times:
        return self._by_length[n_tokens.bit_length()]

    @property
    def least_tokens(self) -> int:
        """Least number of tokens from which on looking up pays, by the measurements so far."""
        return max((1 << length for length, times in list(self._by_length.items()) if times.is_off), default=0)

    def pays(self, n_tokens: int) -> bool:
        times = self.of(n_tokens)
        times.n_skipped = (times.n_skipped + 1) % self._seldom if times.is_off else 0
        return times.n_skipped == 0

    def looked_up(self, n_tokens: int, seconds: float, n: int = 1, n_hits: int = 1) -> None:
        """Add the time that n look-ups took together."""
        times = self.of(n_tokens)
        times.look_up_s.add(seconds, n)
        times.hit_rate.add(n_hits, n)
        self._decide(times)

    def computed(self, n_tokens: int, seconds: float, n: int = 1) -> None:
        """Add the time that computing n values took together."""
        times = self.of(n_tokens)
        times.computing_s.add(seconds, n)
        self._decide(times)

    def _decide(self, times: Times) -> None:
        if times.look_up_s.n >= self._least and times.computing_s.n >= self._least_computed:
            times.is_off = not times.pays()
