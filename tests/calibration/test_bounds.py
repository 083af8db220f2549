"""Bounds hold as often as they promise, agree with known values, and are not vacuous."""

import numpy as np
import pytest

from llmcache.reuse.calibration.bounds import draws_needed, mean_upper, share_upper


@pytest.mark.parametrize(
    ("k", "n", "limit"),
    [(0, 598, 0.004997), (0, 59, 0.04951), (2, 1250, 0.005031), (5, 5, 1.0), (3, 10, 0.6066)],
)
def test_share_upper_gives_known_values(k: int, n: int, limit: float) -> None:
    assert share_upper(k, n, 0.05) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize(("limit", "k", "n"), [(0.005, 0, 598), (0.005, 1, 947), (0.01, 0, 299), (0.02, 0, 149)])
def test_draws_needed_are_the_least(limit: float, k: int, n: int) -> None:
    assert draws_needed(limit, 0.05, k) == n
    assert share_upper(k, n, 0.05) <= limit < share_upper(k, n - 1, 0.05)


@pytest.mark.parametrize(
    ("values", "shares", "is_close"),
    [
        *(([0.0, 1.0], [1 - mean, mean], mean + 5 * (mean / 1000) ** 0.5 + 0.008) for mean in (0.002, 0.02, 0.2)),
        ([-1.0, 0.0, 0.5], [0.02, 0.94, 0.04], 0.03),  # a difference
    ],
)
def test_mean_upper_covers_a_mean(values: list[float], shares: list[float], is_close: float) -> None:
    rng = np.random.default_rng(0)
    draws = [rng.choice(values, p=shares, size=1000) for _ in range(200)]
    limits = [mean_upper(x, values[0], 1, 0.05) for x in draws]
    assert sum(limit < np.dot(values, shares) for limit in limits) <= 20
    assert np.median(limits) < is_close


def test_mean_upper_of_nothing_is_all() -> None:
    assert mean_upper(np.empty(0), 0, 1, 0.05) == pytest.approx(1.0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0)])
def test_mean_upper_is_where_gamblers_get_rich(low: float, high: float) -> None:
    """A gambler who bets against a mean, draw by draw, gets rich if the draws are below it."""
    x = np.random.default_rng(2).choice([low, 0.0, high], p=[0.02, 0.95, 0.03], size=300)

    def richest(mean: float) -> float:
        wealth = [1.0] * 24
        for draw in x:
            for number, share in enumerate(np.geomspace(1 / 300, 0.99, 24)):
                wealth[number] *= 1 + share * (mean - draw) / (high - mean)
        return sum(wealth) / 24

    limit = mean_upper(x, low, high, 0.05)
    assert richest(limit - 5e-6) < 20 < richest(limit + 5e-6)
