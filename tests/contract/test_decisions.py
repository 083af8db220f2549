"""Calibrated reuse reproduces `decisions.json`: limits, hits and risks."""

import re
from contextlib import nullcontext

import pytest

from llmcache import CalibrationError, LLMCache
from tests.contract.decisions import CASES, ROUNDING, check_same, decide, draw, make_model, read_recorded

RECORDED = read_recorded()
CASE = CASES["arguments"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_seeds_decide_the_same(name: str) -> None:
    """docs/calibration.md: half of the requests are drawn by seed, and the last limit that passes its test is used."""
    found = decide(CASES[name])
    check_same(found, RECORDED[name])
    for by, risk in zip(found["served"].lower(), found["risks"], strict=True):
        if by == "e":
            assert risk is None  # an exact hit: no search
        else:
            assert (risk <= found["limit"]) == (by == "s"), "a request is served if the risk is within the limit"


def test_recorded_decisions_are_worth_comparing() -> None:
    """Every recorded case has hits and misses, and no risk so near the limit that rounding decides."""
    assert list(RECORDED) == list(CASES)
    for name, one in RECORDED.items():
        assert set(one["served"].lower()) == {"-", "e", "s"}, name
        told = [risk for risk in one["risks"] if risk is not None]
        assert min(abs(risk - one["limit"]) for risk in told) > 2 * ROUNDING, name
        assert one["bound"] <= CASES[name].calibrate.get("max_drop", CASES[name].settings.get("max_drop")), name
    learned, grown = RECORDED["learn"], RECORDED["growing"]
    assert learned["limit"] == grown["limit"] and learned["risks"] != grown["risks"]
    assert RECORDED["audit"]["n_changed"] and RECORDED["audit"]["n_quarantined"]


RECORD = {"limit": 0.2, "hit_rate": 0.5, "served": "s-", "risks": [0.1, 0.2 + 1e-5]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"limit": 0.2 + 1e-5, "risks": [0.1 + 1e-5, 0.2]}, None),
        ({"served": "ss", "hit_rate": 1.0}, None),  # the second risk equals the limit but for rounding
        ({"limit": 0.2 + 1e-4}, "limit"),
        ({"served": "--"}, "request 0"),
        ({"served": "S-"}, "request 0"),
        ({"risks": [0.1 + 1e-4, 0.2]}, "request 0: risk"),
        ({"risks": [None, 0.2]}, "request 0: risk"),
        ({"hit_rate": 0.6}, "hit_rate"),
    ],
)
def test_another_decision_is_told_and_rounding_is_none(change: dict[str, object], told: str | None) -> None:
    """Limits and risks may differ by rounding, and so may hits at the limit; nothing else may."""
    with nullcontext() if told is None else pytest.raises(AssertionError, match=told):
        check_same({**RECORD, **change}, RECORD)


def test_a_calibration_that_fails_leaves_the_lossless_rungs() -> None:
    """docs/calibration.md: with too few requests, or nothing to learn, the claim is refused, and nothing is reused."""
    inputs, same = draw(120, 1)[0], draw(1, 1)[0]
    with LLMCache.wrap(make_model(CASE), auto_bypass=False) as cache:
        with pytest.raises(CalibrationError) as refused:  # the defaults: 0.5 % changed, 95 % sure
            cache.calibrate([{"input_ids": inputs}])
        assert re.search(r"\b1,?196\b", str(refused.value)), "the error says how many requests it takes"
        with pytest.raises(CalibrationError):
            cache.calibrate([{"input_ids": same.repeat(200, 1)}], max_drop=0.1)
        assert cache.calibration is None
        for row in (*inputs[:3].split(1), same, same):
            cache(input_ids=row)
            assert cache.last[0].risk is None
        assert cache.stats().hits == {"exact": 1}
