"""Divergence: evicts first the entries whose reuse differs most from computing."""

import random

from llmcache.memory.policies.ranking import Ranked


class Divergence(Ranked):
    """The entry with the largest average divergence is evicted first; among equals, the least recently used.

    An approximate reuse is checked with probability `check_rate`: the request is computed, and answered by that. The
    divergence is 1 - cosine of the computed and the stored state, both after compression. It updates the entry's
    exponential moving average, which starts at 0. An entry whose average exceeds `limit` is removed at once. Bansal
    (2025) names divergence-aware eviction among the duties of the refresh and replacement controller and does not
    define it; this is our reading.
    """

    lets_entries_leave_early = True
    checks_reuse = True

    def __init__(self, check_rate: float = 0.05, limit: float = 0.15, weight: float = 0.5, seed: int = 0) -> None:
        """Create an empty policy.

        Args:
            check_rate: Probability of a check, 0 to 1. The default computes one in 20 reuses.
            limit: Largest average an entry may have, over 0 and at most 2. The default asks states to be as similar
                (cosine 0.85) as the paper's tau asks inputs to be.
            weight: Weight of the latest check in the average, over 0 and at most 1. Checks of one entry are rare, so by
                default the latest weighs as much as all earlier ones.
            seed: Seed for choosing which reuses are checked.
        """
        if not 0 <= check_rate <= 1:
            raise ValueError(f"check_rate={check_rate}: give a probability from 0 to 1")
        if not 0 < limit <= 2:
            raise ValueError(f"limit={limit}: give a number over 0 and at most 2, the range of 1 - cosine")
        if not 0 < weight <= 1:
            raise ValueError(f"weight={weight}: give a number over 0 and at most 1")
        self.check_rate, self.limit, self.weight = check_rate, limit, weight
        super().__init__()  # ranked by average, highest first, then by use
        self._random = random.Random(seed)
        self._over: dict[str, None] = {}

    def on_put(self, key: str, nbytes: int) -> None:
        self.on_remove(key)
        self._ranking[key] = (0.0, next(self._uses))

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            self._ranking[key] = (self._ranking[key][0], next(self._uses))

    def on_remove(self, key: str) -> None:
        super().on_remove(key)
        self._over.pop(key, None)

    def expired(self) -> list[str]:
        """Return the keys whose average exceeds the limit, in the order in which they exceeded it."""
        return list(self._over)

    def should_check(self, key: str) -> bool:
        return self._random.random() < self.check_rate

    def on_check(self, key: str, divergence: float) -> None:
        """Move the key's average by `weight` towards the divergence."""
        if not divergence >= 0:
            raise ValueError(f"divergence={divergence}: 1 - cosine is a number from 0 to 2")
        if key not in self._ranking:
            return
        average, use = -self._ranking[key][0], self._ranking[key][1]
        average += self.weight * (divergence - average)
        self._ranking[key] = (-average, use)
        self._over.pop(key, None)
        if average > self.limit:
            self._over[key] = None
