"""Confidence bounds on rates: pure functions of counts.

Shares by Clopper and Pearson (1934), exact. Means of bounded numbers by betting (Waudby-Smith and Ramdas 2024,
"Estimating means of bounded random variables by betting", sections 3 and 4): a gambler who stakes part of his wealth on
the truth being worse than claimed multiplies it, if the claim holds, by more than 1 / delta with probability delta at
most. Theirs are bets that follow the data; ours is a mixture of fixed ones, whose wealth depends on counts alone.

Sizes: N observations, J bets.
"""

from collections.abc import Callable
from math import log

import numpy as np

from llmcache.arrays import Doubles

N_BETS = 24
_PRECISION = 1e-6  # of a limit that is searched for, as a share of the range


def share_upper(k: int, n: int, delta: float) -> float:
    """Upper limit of the share that `k` of `n` independent draws had, wrong with a chance of `delta`."""
    from scipy.special import betaincinv  # what scipy.stats.beta.ppf is, in a twentieth of its time

    return 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - delta))


def draws_needed(limit: float, delta: float, k: int = 0) -> int:
    """Least number of draws at which `k` of them with the property still bound its share by `limit`."""
    low, high = k, max(1, k)
    while share_upper(k, high, delta) > limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share_upper(k, middle, delta) <= limit else (middle, high)
    return high


def mean_upper(x: Doubles, low: float, high: float, delta: float) -> float:
    """Upper limit of the mean of independent draws (N,) from `low` to `high`, wrong with a chance of `delta`."""
    values, counts = np.unique(x, return_counts=True)
    shares = stakes(1 / max(len(x), 1))

    def is_refuted(mean: float) -> bool:
        """Whether a gambler on a smaller mean got rich: the larger the mean he bets against, the richer he is."""
        won = np.log1p(shares[:, None] * ((mean - values) / (high - mean))[None])
        return mixed(won @ counts) >= log(1 / delta)

    return edge(is_refuted, low, high)


def stakes(least: float) -> Doubles:
    """Return stakes (J,) as shares of the wealth, evenly spaced in their logarithm: for any rate one is good."""
    return np.geomspace(min(least, 0.5), 0.99, N_BETS)


def mixed(wealth: Doubles, n_bets: int | None = None) -> float:
    """Logarithm of the wealth of a gambler who spreads his money evenly over bets, given the logarithms of each."""
    most = float(wealth.max())
    return most + log(float(np.exp(wealth - most).sum()) / (n_bets or len(wealth)))


def edge(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value between two limits at which a statement holds that is false below and true above."""
    precision = (high - low) * _PRECISION
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
