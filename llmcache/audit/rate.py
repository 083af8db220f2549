"""Estimates a rate over time, with limits that hold at all times at once: by betting, as in `bounds`."""

from collections import Counter
from math import log

import numpy as np

from llmcache.arrays import Doubles
from llmcache.calibration.bounds import edge, mixed, stakes

_STAKES = stakes(1e-5)  # the least: stakes of what is watched without end may not follow the number of observations


class Rate:
    """Share of requests with an event that is looked for in some of them only.

    A request counts 0, or, if an event was found, 1 / probability with which it was looked for: the mean is the rate of
    all events, seen or not. The same share of what may be staked is staked on every request, whatever its probability:
    then the limits are limits of the mean rate so far, also of one that changes, as a product of factors that average
    to at most 1 is at most 1. What may be staked follows from the least probability that a request can have. That may
    be lower for some (`ease`), if it is fixed before the request: each factor is fair, given what was before. In the
    mean that the limits are of, such requests then count less, about as `ease` says; the estimate counts all alike.

    The stakes are fixed, so limits depend on counts alone.

    A sample of which nothing is known yet, or ever, counts as an event for the upper limit and as none for the lower,
    so neither is wrong because samples wait. The caller holds a lock.
    """

    def __init__(self, floor: float) -> None:
        """Begin without requests; `floor`, over 0, is the least probability with which events are looked for."""
        self._floor = floor
        self._by_ease: Counter[float] = Counter()  # requests, by what their least probability was multiplied by
        self._open: Counter[tuple[float, float]] = Counter()  # samples without a verdict, by weight and ease
        self._found: Counter[tuple[float, float]] = Counter()  # samples with an event, likewise

    @property
    def n(self) -> int:
        """Requests."""
        return self._by_ease.total()

    @property
    def mean(self) -> float | None:
        """Estimated rate; None without requests."""
        found = sum(weight * n for (weight, _), n in self._found.items())
        return found / self.n if self.n else None

    def see(self, ease: float = 1.0) -> None:
        """Add a request, whose least probability of a draw is the floor times `ease`, over 0, at most 1."""
        self._by_ease[ease] += 1

    def draw(self, weight: float, ease: float = 1.0) -> None:
        """Note that the last request was drawn, with probability 1 / `weight`."""
        self._open[weight, ease] += 1

    def settle(self, weight: float, has_event: bool, ease: float = 1.0) -> None:
        """Add the verdict on a request that was drawn with this weight and ease."""
        self._open[weight, ease] -= 1
        self._found[weight, ease] += has_event

    def lower(self, alpha: float) -> float:
        """The rate is at least this at all times, but for a chance of `alpha`."""
        weights, eases, counts = _columns(self._found)

        def lost(ease: float | Doubles) -> Doubles:
            """Return log factors (J,) of a request without an event."""
            left: Doubles = np.log1p(-_STAKES * self._floor * ease)
            return left

        idle = sum((n * lost(ease) for ease, n in self._by_ease.items()), np.zeros(len(_STAKES)))

        def is_possible(rate: float) -> bool:
            """Whether no gambler on a larger rate got rich."""
            won = np.log1p(_STAKES * self._floor * eases * (weights / rate - 1))
            return mixed(idle + (counts * (won - lost(eases))).sum(axis=0)) < log(1 / alpha)

        return edge(is_possible, 0.0, 1.0) if self._found.total() else 0.0

    def upper(self, alpha: float) -> float:
        """The rate is at most this at all times, but for a chance of `alpha`."""
        weights, eases, counts = _columns(self._found + self._open)

        def is_refuted(rate: float) -> bool:
            """Whether a gambler on a smaller rate got rich."""
            wealth = sum((n * self._kept(rate, 0.0, ease) for ease, n in self._by_ease.items()), np.zeros(len(_STAKES)))
            kept = self._kept(rate, weights, eases) - self._kept(rate, 0.0, eases)
            return mixed(wealth + (counts * kept).sum(axis=0)) >= log(1 / alpha)

        return edge(is_refuted, 0.0, 1.0) if self.n else 1.0

    def _kept(self, rate: float, weight: float | Doubles, ease: float | Doubles) -> Doubles:
        """Return log factors (J,) of bets on less than `rate`, for a request that counted `weight`."""
        change: Doubles = np.log1p(_STAKES * (rate - weight) / (1 / (self._floor * ease) - rate))
        return change


def _columns(samples: Counter[tuple[float, float]]) -> tuple[Doubles, Doubles, Doubles]:
    """Weights and eases of samples, and how many there are of each, each (K, 1)."""
    pairs = np.array([pair for pair, n in samples.items() if n], np.float64).reshape(-1, 2)
    return pairs[:, :1], pairs[:, 1:], np.array([[n] for n in samples.values() if n], np.float64).reshape(-1, 1)
