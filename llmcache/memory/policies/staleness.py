"""Staleness: evicts the entries with the lowest rate of matches, where old matches count less."""

import math
import time
from collections.abc import Callable

from llmcache.memory.policies.ranking import Ranked

LEAST_S = 1e-3  # with a shorter half-life, float64 would not distinguish single matches after years of service


class Staleness(Ranked):
    """The entry with the lowest score is evicted first; among equals, the one put first.

    The score is the number of matches; the weight of each halves every `half_life_s`. Storing an entry is its first
    match: otherwise new entries would be evicted before any entry that was ever hit. Bansal (2025) names staleness, a
    decayed match rate, among the duties of the refresh and replacement controller and gives no formula; this is our
    reading.

    A score s at time t is stored as the level log2(s) + t / half-life, which is constant between matches and does not
    overflow. Levels compare like scores at any time.
    """

    def __init__(self, half_life_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Halve the weight of a match every `half_life_s` seconds, at least 0.001; `now` is a monotonic clock."""
        if not LEAST_S <= half_life_s < math.inf:
            raise ValueError(f"half_life_s must be at least {LEAST_S} and finite, got {half_life_s}")
        super().__init__()  # ranked by level, then by arrival
        self.half_life_s = half_life_s
        self._now = now
        self._start_s = now()

    def on_put(self, key: str, nbytes: int) -> None:
        self._ranking[key] = (self._half_lives(), next(self._uses))

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            level, arrival = self._ranking[key]
            low, high = sorted((level, self._half_lives()))
            self._ranking[key] = (high + math.log2(1 + 2 ** (low - high)), arrival)

    def _half_lives(self) -> float:
        """Return the half-lives since the start: the level of a score of 1 now."""
        return (self._now() - self._start_s) / self.half_life_s
