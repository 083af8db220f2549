"""Confidence bounds on rates: pure functions of counts.

Shares by Clopper and Pearson (1934), exact. Means of bounded numbers by betting (Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting", sections 3 and 4): if a claim holds, a gambler who bets part
of his wealth that the truth is worse multiplies his wealth by more than 1 / delta with probability delta at most.
Their bets follow the data; ours are a mixture of fixed bets, whose wealth depends on counts alone.

Sizes: N observations, J bets.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import log

import numpy as np

from llmcache.support.arrays import Doubles

N_BETS = 24
_MOST_DRAWS = 1 << 40  # that any limit needs
_PRECISION = 1e-6  # of `edge`, as a share of the range


def share_upper(k: int, n: int, delta: float) -> float:
    """Return an upper limit of a share of which `k` of `n` independent draws are; wrong with probability `delta`."""
    from scipy.special import betaincinv  # the same as scipy.stats.beta.ppf, in a twentieth of its time

    return 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - delta))


def draws_needed(limit: float, delta: float, k: int = 0) -> int:
    """Return the least number of draws for which `share_upper` of `k` is at most `limit`."""
    return bisect_left(range(_MOST_DRAWS), True, key=lambda n: share_upper(k, n, delta) <= limit)


def mean_upper(x: Doubles, low: float, high: float, delta: float) -> float:
    """Return an upper limit of the mean of independent draws (N,) in [low, high]; wrong with probability `delta`."""
    values, counts = np.unique(x, return_counts=True)
    shares = stakes(1 / max(len(x), 1))

    def is_refuted(mean: float) -> bool:
        """Whether bets that the true mean is smaller reach 1 / delta; their wealth rises with `mean`."""
        won = np.log1p(shares[:, None] * ((mean - values) / (high - mean))[None])
        return mixed(won @ counts) >= log(1 / delta)

    return edge(is_refuted, low, high)


def stakes(least: float) -> Doubles:
    """Return stakes (J,) as shares of the wealth, evenly spaced in their logarithm: one is good for any rate."""
    return np.geomspace(min(least, 0.5), 0.99, N_BETS)


def mixed(wealth: Doubles, n_bets: int | None = None) -> float:
    """Return the log wealth of a gambler who spreads his money evenly over `n_bets` bets, from the log of each."""
    most = float(wealth.max())
    return most + log(float(np.exp(wealth - most).sum()) / (n_bets or len(wealth)))


def edge(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return where in [`low`, `high`] a predicate that is false below and true above begins to hold."""
    precision = (high - low) * _PRECISION
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
