"""A rate that is watched without end, with limits that hold at every moment at once.

By betting (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", sections 3 and 4).
Theirs are bets that follow the data; ours is a mixture of fixed ones, whose wealth depends on counts alone.
"""

from collections import Counter
from math import log

import numpy as np

from llmcache.arrays import Doubles
from llmcache.bounds import edge, mixed, stakes

_STAKES = stakes(1e-5)  # the least: stakes of what is watched without end may not follow the number of observations


class Rate:
    """Share of requests with an event that is looked for in some of them only.

    A request counts 0, or, if an event was found, 1 / probability with which it was looked for: the mean is the rate of
    all events, seen or not. How much is staked on a request may follow the least probability at its time, but not the
    request, or the limits would not hold for all of them together. They are limits of the mean rate so far, also of one
    that changes, as a product of factors that average to at most 1 is at most 1.

    A sample of which nothing is known yet, or ever, counts as an event for the upper limit and as none for the lower,
    so neither is wrong because samples wait. The caller holds a lock.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._seen: Counter[float] = Counter()  # requests by least probability
        self._open: Counter[tuple[float, float]] = Counter()  # samples by weight and least probability
        self._found: Counter[tuple[float, float]] = Counter()  # events, likewise

    @property
    def n(self) -> int:
        """Requests."""
        return self._seen.total()

    @property
    def mean(self) -> float | None:
        """Estimated rate; None without requests."""
        return sum(weight * n for (weight, _), n in self._found.items()) / self.n if self.n else None

    def see(self, floor: float) -> None:
        """Take in a request, in which an event would have been looked for with probability `floor` at least."""
        self._seen[floor] += 1

    def draw(self, weight: float, floor: float) -> None:
        """The last request is looked into, which had the probability 1 / `weight`."""
        self._open[weight, floor] += 1

    def settle(self, weight: float, floor: float, has_event: bool) -> None:
        """What was found in a request that had been drawn so."""
        self._open[weight, floor] -= 1
        self._found[weight, floor] += has_event

    def lower(self, alpha: float) -> float:
        """The rate is at least this at all times, but for a chance of `alpha`."""

        def is_possible(rate: float) -> bool:
            """Whether no gambler on a larger rate got rich."""
            wealth = np.zeros(len(_STAKES))
            for floor, n in self._seen.items():
                wealth += n * np.log1p(-_STAKES * floor)
            for (weight, floor), n in self._found.items():
                wealth += n * (np.log1p(_STAKES * floor * (weight / rate - 1)) - np.log1p(-_STAKES * floor))
            return mixed(wealth) < log(1 / alpha)

        return edge(is_possible, 0.0, 1.0) if self._found.total() else 0.0

    def upper(self, alpha: float) -> float:
        """The rate is at most this at all times, but for a chance of `alpha`."""
        events = self._found + self._open

        def is_refuted(rate: float) -> bool:
            """Whether a gambler on a smaller rate got rich."""
            wealth = sum((n * self._kept(rate, 0.0, floor) for floor, n in self._seen.items()), np.zeros(len(_STAKES)))
            for (weight, floor), n in events.items():
                wealth += n * (self._kept(rate, weight, floor) - self._kept(rate, 0.0, floor))
            return mixed(wealth) >= log(1 / alpha)

        return edge(is_refuted, 0.0, 1.0) if self.n else 1.0

    @staticmethod
    def _kept(rate: float, weight: float, floor: float) -> Doubles:
        """Logarithm of what bets on less than `rate` make of a unit (J,), at a request that counted `weight`."""
        change: Doubles = np.log1p(_STAKES * (rate - weight) / (1 / floor - rate))
        return change
