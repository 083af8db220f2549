"""Limits are tested in their order, on requests of their own, at the given confidence."""

from typing import Any

import numpy as np
import pytest

from llmcache.errors import CalibrationError, ConfigError
from llmcache.reuse.calibration.calibration import (
    TESTED,
    Calibration,
    HoldoutOutcome,
    OperatingPoint,
    check_size,
    choose_limit,
    losses,
    split,
    try_limits,
    watch,
)
from llmcache.reuse.calibration.risk_target import Metric, RiskTarget


def risk_target(max_drop: float, metric: Any = "changed") -> RiskTarget:
    return RiskTarget(max_drop, 0.05, metric, "frozen", 0)


def test_shares_are_tested_on_a_step_near_half_and_other_metrics_on_half() -> None:
    assert len(split(1000, risk_target(0.05))[1]) == pytest.approx(1000 * TESTED, rel=0.03)
    learned, tested = split(3000, risk_target(0.05, metric=Metric(lambda output, label: 1.0)))
    assert len(learned) == len(tested) == 1500


@pytest.mark.parametrize(("n", "max_drop"), [(1195, 0.005), (597, 0.01), (100, 0.02)])
def test_too_few_requests_are_refused_with_the_number_that_would_do(n: int, max_drop: float) -> None:
    with pytest.raises(CalibrationError, match="at least") as refused:
        check_size(n, max_drop, 0.05)
    needed = int(str(refused.value).split("at least ")[1].split()[0])
    check_size(needed, max_drop, 0.05)
    with pytest.raises(CalibrationError):
        check_size(needed - 1, max_drop, 0.05)


def test_a_calibration_prints_in_three_lines_and_as_a_call_on_a_screen() -> None:
    curve = tuple(OperatingPoint(risk / 200, 0.1, 0.0, 0.001) for risk in range(200))
    made = Calibration(curve[3], curve, "changed", 0.01, 0.05, 1000, 100, "frozen", "w" * 64, "h" * 64)
    assert "limit=0.015" in repr(made) and len(repr(made)) < 600
    first, second, third = str(made).splitlines()
    assert first == "10% hits, at most 0.10% changed at 95%, 1,000 sources" and first in made._repr_html_()
    assert "100 requests tested" in second and third == "certified"
    assert len(made.to_dict()["curve"]) == 200


def test_without_a_neighbour_nothing_is_lost() -> None:
    lonely = HoldoutOutcome(np.array([np.inf] * 299 + [0.1]), np.ones(300))
    (point,) = try_limits(lonely, np.array([0.5]), 0.02, 0.05)
    assert point.hit_rate == point.loss == pytest.approx(1 / 300)
    assert try_limits(lonely, np.empty(0), 0.01, 0.05) == ()


@pytest.mark.slow
def test_the_chosen_setting_is_seldom_worse_than_claimed() -> None:
    rng = np.random.default_rng(0)
    n_wrong, rates = 0, []
    for _ in range(300):
        risk = rng.random(900)
        loss = (rng.random(900) < 0.05 * risk).astype(float)
        best = choose_limit(try_limits(HoldoutOutcome(risk, loss), np.linspace(0.01, 1, 100), 0.01, 0.05), 0.01)
        if best is not None:
            n_wrong += 0.05 * best.limit**2 / 2 > 0.01  # expected loss at this limit
            rates.append(best.limit)
    assert n_wrong <= 24
    assert np.median(rates) > 0.3


@pytest.mark.parametrize("risks", [[0.1] * 5, [0.1, 0.2, 0.2, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4], [0.0]])
def test_after_an_alarm_at_most_half_of_the_hits_are_served(risks: list[float]) -> None:
    """Risks may be tied."""
    trial = HoldoutOutcome(np.array([*risks, np.inf, -np.inf]), np.zeros(len(risks) + 2))
    tighter = watch(trial, OperatingPoint(max(risks), 0.9, 0.0, 0.01), 0.01, 0.05).tighter
    assert sum(risk <= tighter for risk in risks) <= len(risks) / 2


def test_a_metric_that_is_not_a_share_is_bounded_by_betting() -> None:
    rng = np.random.default_rng(1)
    risk = rng.random(2000)
    loss = np.where(risk < 0.5, rng.choice([-0.1, 0.0, 0.1], 2000), rng.choice([0.0, 0.5], 2000))
    trial = HoldoutOutcome(risk, loss, -1.0, 1.0, is_share=False)
    best = choose_limit(try_limits(trial, np.array([0.1, 0.3, 0.5, 0.8]), 0.02, 0.05), 0.02)
    assert best.limit in (0.3, 0.5)


@pytest.mark.parametrize("bounds", [(0.0, np.inf), (1.0, 1.0), (np.nan, 1.0)])
def test_unbounded_metrics_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="finite range"):
        Metric(lambda output, label: 0.0, *bounds)


def test_losses_are_differences_of_scores() -> None:
    metric = Metric(lambda output, label: float(output == label))
    assert losses(metric, ["a", "b", "c"], ["a", "a", None], ["a", "b", "c"], [0, 1, 2]).tolist() == [0.0, 1.0, 0.0]
