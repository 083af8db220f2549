"""Bounds hold as often as they promise, agree with known values, and are not vacuous."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.bounds import Alarm, Rate, draws_needed, mean_upper, share_upper


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


@given(st.integers(0, 40), st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_share_upper_grows_with_events_and_falls_with_draws(k: int, n: int) -> None:
    k = min(k, n)
    assert share_upper(k, n + 1, 0.05) <= share_upper(k, n, 0.05) <= share_upper(min(k + 1, n), n, 0.05)


@pytest.mark.parametrize("mean", [0.002, 0.02, 0.2])
def test_mean_upper_covers_a_share(mean: float) -> None:
    rng = np.random.default_rng(0)
    limits = [mean_upper((rng.random(1000) < mean).astype(float), 0, 1, 0.05) for _ in range(200)]
    assert sum(limit < mean for limit in limits) <= 20
    assert np.median(limits) < mean + 5 * np.sqrt(mean / 1000) + 0.008


def test_mean_upper_covers_a_difference_that_can_be_negative() -> None:
    rng = np.random.default_rng(1)
    draws = [rng.choice([-1.0, 0.0, 0.5], p=[0.02, 0.94, 0.04], size=800) for _ in range(200)]
    limits = [mean_upper(x, -1, 1, 0.05) for x in draws]
    assert sum(limit < 0.0 for limit in limits) <= 20
    assert np.median(limits) < 0.03


def test_mean_upper_of_nothing_is_all() -> None:
    assert mean_upper(np.empty(0), 0, 1, 0.05) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.002, 0.02])
def test_limits_of_a_rate_hold_at_every_moment(rate: float) -> None:
    rng = np.random.default_rng(2)
    n_wrong = [0, 0]
    for _ in range(60):
        seen = Rate()
        wrong = [False, False]
        for _ in range(12):
            n_found = int((rng.random(250) < rate * 0.1).sum())
            for _ in range(250):
                seen.see(floor=0.1)
            for _ in range(n_found):
                seen.found(10.0, floor=0.1)
            wrong[0] |= seen.lower(0.05) > rate
            wrong[1] |= seen.upper(0.05) < rate
        n_wrong[0] += wrong[0]
        n_wrong[1] += wrong[1]
    assert max(n_wrong) <= 7
    assert seen.lower(0.05) <= rate * 5
    assert rate / 5 <= seen.upper(0.05) <= rate + 0.05


def test_a_rate_without_observations_may_be_anything() -> None:
    seen = Rate()
    assert (seen.lower(0.05), seen.upper(0.05), seen.mean) == (0.0, 1.0, None)


def test_a_rate_is_estimated_without_bias() -> None:
    seen = Rate()
    for _ in range(100):
        seen.see(floor=0.1)
    seen.found(10.0, floor=0.1)
    for _ in range(9):
        seen.found(2.0, floor=0.1)
    assert seen.mean == pytest.approx(0.28)


def passes(alarm: Alarm, has_event: bool, weight: float) -> bool:
    """Whether the alarm rings at one more observation."""
    number = alarm.see()
    return bool(has_event) and alarm.found(number, weight)


def test_an_event_that_is_found_late_counts_for_those_who_had_bet_on_it() -> None:
    at_once, late = Alarm(0.05, floor=0.5, epoch=10), Alarm(0.05, floor=0.5, epoch=10)
    for n in range(25):
        for alarm in (at_once, late):
            number = alarm.see()
            if alarm is at_once and n == 3:
                alarm.found(number, 2.0)
    late.found(3, 2.0)
    np.testing.assert_allclose(at_once._wealth, late._wealth)


def test_an_alarm_seldom_rings_while_all_is_in_order() -> None:
    rng = np.random.default_rng(3)
    rang = 0
    for _ in range(60):
        alarm = Alarm(0.01, floor=0.2)
        rang += any(passes(alarm, has_event, 5.0) for has_event in rng.random(4000) < 0.01 * 0.2)
    assert rang <= 7


def test_an_alarm_rings_about_when_expected_after_a_late_change() -> None:
    rng = np.random.default_rng(4)
    heard = []
    for _ in range(40):
        alarm = Alarm(0.01, floor=0.2)
        assert not any(passes(alarm, rng.random() < 0.002 * 0.2, 5.0) for _ in range(3000))
        expected = alarm.needed(0.1, probability=0.2)
        after = next(n for n in range(1, 20_000) if passes(alarm, rng.random() < 0.1 * 0.2, 5.0))
        heard.append(after / expected)
    assert 0.2 < np.median(heard) < 1.3
