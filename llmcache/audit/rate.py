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
    all events, seen or not. The same is staked on every request, whatever its probability: then the limits are limits
    of the mean rate so far, also of one that changes, as a product of factors that average to at most 1 is at most 1.

    A sample of which nothing is known yet, or ever, counts as an event for the upper limit and as none for the lower,
    so neither is wrong because samples wait. The caller holds a lock.
    """

    def __init__(self, floor: float) -> None:
        """Begin without requests.

        Args:
            floor: The least probability with which events will ever be looked for, over 0, at most 1.
        """
        self._floor = floor
        self.n = 0  # requests
        self._open: Counter[float] = Counter()  # samples by weight
        self._found: Counter[float] = Counter()  # events, likewise

    @property
    def mean(self) -> float | None:
        """Estimated rate; None without requests."""
        return sum(weight * n for weight, n in self._found.items()) / self.n if self.n else None

    def see(self) -> None:
        """Take in a request."""
        self.n += 1

    def draw(self, weight: float) -> None:
        """The last request is looked into, which had the probability 1 / `weight`."""
        self._open[weight] += 1

    def settle(self, weight: float, has_event: bool) -> None:
        """What was found in a request that had been drawn so."""
        self._open[weight] -= 1
        self._found[weight] += has_event

    def lower(self, alpha: float) -> float:
        """The rate is at least this at all times, but for a chance of `alpha`."""
        nothing = np.log1p(-_STAKES * self._floor)  # what a request without an event leaves of a unit

        def is_possible(rate: float) -> bool:
            """Whether no gambler on a larger rate got rich."""
            wealth = self.n * nothing
            for weight, n in self._found.items():
                wealth = wealth + n * (np.log1p(_STAKES * self._floor * (weight / rate - 1)) - nothing)
            return mixed(wealth) < log(1 / alpha)

        return edge(is_possible, 0.0, 1.0) if self._found.total() else 0.0

    def upper(self, alpha: float) -> float:
        """The rate is at most this at all times, but for a chance of `alpha`."""
        events = self._found + self._open

        def is_refuted(rate: float) -> bool:
            """Whether a gambler on a smaller rate got rich."""
            nothing = self._kept(rate, 0.0)
            wealth = self.n * nothing
            for weight, n in events.items():
                wealth = wealth + n * (self._kept(rate, weight) - nothing)
            return mixed(wealth) >= log(1 / alpha)

        return edge(is_refuted, 0.0, 1.0) if self.n else 1.0

    def _kept(self, rate: float, weight: float) -> Doubles:
        """Logarithm of what bets on less than `rate` make of a unit (J,), at a request that counted `weight`."""
        change: Doubles = np.log1p(_STAKES * (rate - weight) / (1 / self._floor - rate))
        return change
