"""What can be said of a rate with stated confidence: pure functions of what was counted.

Shares by Clopper and Pearson (1934), exact. Means of bounded numbers, and rates that are watched without end, by
betting (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", sections 3 and 4): a
gambler who stakes part of his wealth on the truth being worse than claimed multiplies it, if the claim holds, by more
than 1 / delta with probability delta at most. Theirs are bets that follow the data; ours is a mixture of fixed ones,
whose wealth depends on counts alone.

Sizes: N observations, J bets.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil, inf, log

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

N_BETS = 24
_LEAST_STAKE = 1e-5  # of what is watched without end: stakes may not follow the number of observations
_PRECISION = 1e-6  # of a limit that is searched for, as a share of the range


def share_upper(k: int, n: int, delta: float) -> float:
    """Upper limit of a share when `k` of `n` independent draws were seen to have it (Clopper and Pearson 1934).

    Args:
        k: 0 to `n`.
        n: At least 1.
        delta: Chance that the share is larger than the limit, over 0, under 1.
    """
    from scipy.stats import beta

    return 1.0 if k >= n else float(beta.ppf(1 - delta, k + 1, n - k))


def draws_needed(limit: float, delta: float, k: int = 0) -> int:
    """Least number of draws at which `k` of them with the property still bound its share by `limit`.

    Args:
        limit: Over 0, under 1.
        delta: Chance of error, over 0, under 1.
        k: Draws that have the property.
    """
    low, high = k, max(1, k)
    while share_upper(k, high, delta) > limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share_upper(k, middle, delta) <= limit else (middle, high)
    return high


def mean_upper(x: Doubles, low: float, high: float, delta: float) -> float:
    """Upper limit of the mean of independent draws.

    Args:
        x: Draws (N,).
        low: Their least possible value.
        high: Their largest possible value.
        delta: Chance that the mean is larger than the limit, over 0, under 1.
    """
    values, counts = np.unique(x, return_counts=True)
    stakes = _stakes(1 / max(len(x), 1))

    def is_refuted(mean: float) -> bool:
        """Whether a gambler on a smaller mean got rich; the more so, the larger the mean that he bets against."""
        won = np.log1p(stakes[:, None] * ((mean - values) / (high - mean))[None])
        return _mixed(won @ counts) >= log(1 / delta)

    return _edge(is_refuted, low, high)


class Rate:
    """A rate observed through weighted samples, with limits that hold at every moment at once.

    An observation is 0, or `1 / probability` of an event that was looked for with that probability: its mean is the
    rate of the events, seen or not. How much is staked on one may follow the least probability at that time, but not
    the observation itself, or the limits would not hold for all of them together.
    """

    def __init__(self) -> None:
        """Begin without observations."""
        self._seen: Counter[float] = Counter()  # by least probability
        self._found: Counter[tuple[float, float]] = Counter()  # by weight and least probability

    @property
    def n(self) -> int:
        """Observations."""
        return self._seen.total()

    def see(self, floor: float) -> None:
        """Take in an observation, 0 until an event is found in it; events are looked for at least with `floor`."""
        self._seen[floor] += 1

    def found(self, weight: float, floor: float) -> None:
        """An event was found in one of them, looked for with probability 1 / `weight`."""
        self._found[weight, floor] += 1

    @property
    def mean(self) -> float | None:
        """Estimated rate; None without observations."""
        return sum(weight * n for (weight, _), n in self._found.items()) / self.n if self.n else None

    def lower(self, alpha: float) -> float:
        """The rate is at least this at all times, but for a chance of `alpha`."""
        stakes = _stakes(_LEAST_STAKE)

        def is_possible(rate: float) -> bool:
            won = sum(n * np.log1p(-stakes * floor) for floor, n in self._seen.items())
            for (weight, floor), n in self._found.items():
                won = won + n * (np.log1p(stakes * floor * (weight / rate - 1)) - np.log1p(-stakes * floor))
            return _mixed(np.asarray(won)) < log(1 / alpha)

        return _edge(is_possible, 0.0, 1.0) if self._found else 0.0

    def upper(self, alpha: float) -> float:
        """The rate is at most this at all times, but for a chance of `alpha`."""
        stakes = _stakes(_LEAST_STAKE)

        def is_refuted(rate: float) -> bool:
            won = sum(n * np.log1p(stakes * rate / (1 / floor - rate)) for floor, n in self._seen.items())
            for (weight, floor), n in self._found.items():
                room = 1 / floor - rate
                won = won + n * (np.log1p(stakes * (rate - weight) / room) - np.log1p(stakes * rate / room))
            return _mixed(np.asarray(won)) >= log(1 / alpha)

        return _edge(is_refuted, 0.0, 1.0) if self._seen else 1.0


class Alarm:
    """Rings when a rate that may change exceeds a limit; while it never does, with probability `alpha` at most.

    A gambler who bets from the beginning has lost nearly all when the rate changes late. So one sets out every `epoch`
    observations, with a share 1 / (e (e + 1)) of the money that number e may begin with; all of it together is 1.
    """

    def __init__(self, limit: float, floor: float, alpha: float = 0.05, epoch: int = 500) -> None:
        """Begin without observations.

        Args:
            limit: The largest rate that is in order, over 0, under 1.
            floor: The least probability with which an event is looked for, over 0, at most 1.
            alpha: Chance of a false alarm, ever, over 0, under 1.
            epoch: Observations between two gamblers, at least 1.
        """
        self.limit = limit
        self.alpha = alpha
        self.epoch = epoch
        self._stakes = _stakes(limit * floor / 4)
        self._lost = np.log1p(-self._stakes)
        self._wealth = np.empty((0, N_BETS))  # logarithms, a row a gambler, the oldest first
        self._began = np.empty(0, np.int64)  # at which observation each set out
        self.n = 0

    def see(self) -> int:
        """Take in an observation, 0 until an event is found in it, and return its number."""
        if self.n % self.epoch == 0:
            e = self.n // self.epoch + 1
            is_kept = self._wealth.max(axis=1, initial=-inf) > -_FORGOTTEN
            self._wealth = np.vstack([self._wealth[is_kept], np.full(N_BETS, -log(e * (e + 1)))])
            self._began = np.append(self._began[is_kept], self.n)
        self._wealth += self._lost
        self.n += 1
        return self.n - 1

    def found(self, number: int, weight: float) -> bool:
        """An event was found in an observation, looked for with probability 1 / `weight`; whether the alarm rings now.

        It may be found long after: what is not looked into yet counts as 0, which is never to the gamblers' advantage.
        """
        won = np.log(1 - self._stakes + self._stakes * weight / self.limit) - self._lost
        self._wealth[self._began <= number] += won
        return _mixed(self._wealth.ravel(), N_BETS) >= log(1 / self.alpha)

    def needed(self, rate: float, probability: float) -> int:
        """Observations after which it can be expected to ring once the rate has risen now.

        Wald's estimate: what the gambler who sets out next lacks, over what the best of his bets brings him at each
        observation; and up to an epoch until he sets out.

        Args:
            rate: What it has risen to, over the limit.
            probability: With which events are looked for.
        """
        seen = rate * probability
        growth = seen * np.log(1 - self._stakes + self._stakes / (probability * self.limit)) + (1 - seen) * self._lost
        e = self.n // self.epoch + 1
        return self.epoch + ceil(log(N_BETS * e * (e + 1) / self.alpha) / float(growth.max()))


_FORGOTTEN = 60.0  # a gambler with e**-60 of the money will not be heard of again; to forget him is only cautious


def _stakes(least: float) -> Doubles:
    """Shares of the wealth that are staked (J,), evenly spread in their logarithm: at any rate one is good."""
    return np.geomspace(min(least, 0.5), 0.99, N_BETS)


def _mixed(wealth: Doubles, n_bets: int | None = None) -> float:
    """Logarithm of the wealth of a gambler who spreads his money evenly over bets, given the logarithms of each."""
    most = float(wealth.max())
    return most + log(float(np.exp(wealth - most).sum()) / (n_bets or len(wealth)))


def _edge(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least value at which a statement begins to hold that is false below and true above, between two limits."""
    precision = (high - low) * _PRECISION
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
