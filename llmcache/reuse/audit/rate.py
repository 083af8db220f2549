"""Estimates a rate over time, with limits that hold at all times simultaneously.

The limits come from a mixture martingale. For each candidate rate, gamblers with different stakes bet that the true
rate is another one. If the candidate is the true rate, their bets are fair, and their mean wealth ever exceeds
1 / alpha with probability alpha at most (Ville 1939). So the rates against which nobody has won so much are a
confidence interval (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024). `bounds`
does the same for a fixed number of requests.
"""

from collections import Counter
from math import log

import numpy as np

from llmcache.reuse.calibration.bounds import edge, mixed, stakes
from llmcache.support.arrays import Doubles

_STAKES = stakes(1e-5)  # the least is fixed: the number of observations has no end, and stakes may not depend on it


class Rate:
    """Share of requests that have an event, where only some requests are checked for it.

    A request counts 0, or, if an event was found, the inverse of the probability with which it was checked. So the mean
    estimates the rate of all events, found or not. The limits bound the mean rate so far, also of a rate that changes.

    A stake may be as large as the least probability of being checked (the floor) allows. `scale`, over 0 and at most 1,
    lowers the floor for some requests; it must be fixed before the request, so that each bet is fair, given the past.
    The limits then bound a mean in which such requests count less, about in proportion to `scale`; the estimate counts
    all requests alike.

    The stakes are fixed, so limits depend on counts alone.

    A sample without a verdict, yet or for ever, counts as an event for the upper limit and as none for the lower one,
    so waiting samples make neither limit wrong. The caller holds a lock.
    """

    def __init__(self, floor: float) -> None:
        """Begin without requests; `floor`, over 0, is the least probability with which a request is checked."""
        self._floor = floor
        self._by_scale: Counter[float] = Counter()  # requests, by the factor on their least probability
        self._open: Counter[tuple[float, float]] = Counter()  # samples without a verdict, by weight and scale
        self._found: Counter[tuple[float, float]] = Counter()  # samples with an event, by weight and scale

    @property
    def n(self) -> int:
        return self._by_scale.total()

    @property
    def mean(self) -> float | None:
        """Estimated rate; None without requests."""
        found = sum(weight * n for (weight, _), n in self._found.items())
        return found / self.n if self.n else None

    def see(self, scale: float = 1.0) -> None:
        """Add a request, whose least draw probability is the floor times `scale`, over 0 and at most 1."""
        self._by_scale[scale] += 1

    def draw(self, weight: float, scale: float = 1.0) -> None:
        """Note that the last request was drawn, with probability 1 / `weight`."""
        self._open[weight, scale] += 1

    def settle(self, weight: float, has_event: bool, scale: float = 1.0) -> None:
        """Add the verdict on a request that was drawn with this weight and scale."""
        self._open[weight, scale] -= 1
        self._found[weight, scale] += has_event

    def lower(self, alpha: float) -> float:
        """Return a lower limit of the rate; all lower limits over time hold with probability 1 - `alpha`."""
        weights, scales, counts = _columns(self._found)

        def lost(scale: float | Doubles) -> Doubles:
            """Return the log factors (J,) of a request without an event."""
            return np.log1p(-_STAKES * self._floor * scale)

        idle = sum((n * lost(scale) for scale, n in self._by_scale.items()), np.zeros(len(_STAKES)))

        def is_possible(rate: float) -> bool:
            """Whether bets that the true rate is larger stay below 1 / alpha."""
            won = np.log1p(_STAKES * self._floor * scales * (weights / rate - 1))
            return mixed(idle + (counts * (won - lost(scales))).sum(axis=0)) < log(1 / alpha)

        return edge(is_possible, 0.0, 1.0) if self._found.total() else 0.0

    def upper(self, alpha: float) -> float:
        """Return an upper limit of the rate; all upper limits over time hold with probability 1 - `alpha`."""
        weights, scales, counts = _columns(self._found + self._open)

        def is_refuted(rate: float) -> bool:
            """Whether bets that the true rate is smaller reach 1 / alpha."""
            wealth = sum(
                (n * self._kept(rate, 0.0, scale) for scale, n in self._by_scale.items()),
                np.zeros(len(_STAKES)),
            )
            kept = self._kept(rate, weights, scales) - self._kept(rate, 0.0, scales)
            return mixed(wealth + (counts * kept).sum(axis=0)) >= log(1 / alpha)

        return edge(is_refuted, 0.0, 1.0) if self.n else 1.0

    def _kept(self, rate: float, weight: float | Doubles, scale: float | Doubles) -> Doubles:
        """Return the log factors (J,) of bets on a rate below `rate`, for a request that counts `weight`."""
        return np.log1p(_STAKES * (rate - weight) / (1 / (self._floor * scale) - rate))


def _columns(samples: Counter[tuple[float, float]]) -> tuple[Doubles, Doubles, Doubles]:
    """Return the weights, scales and numbers of samples, each (K, 1)."""
    pairs = np.array([pair for pair, n in samples.items() if n], np.float64).reshape(-1, 2)
    return pairs[:, :1], pairs[:, 1:], np.array([[n] for n in samples.values() if n], np.float64).reshape(-1, 1)
