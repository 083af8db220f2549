"""The steps of a calibration, one by one: what a replay counts is what serving does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from llmcache import LLMCache
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.risk_target import RiskTarget
from llmcache.errors import CalibrationError, WrapError
from llmcache.request.observation import Observation
from tests.calibration.test_calibrated_reuse import ask
from tests.topics import classifier, requests

N = 700
CLAIM = RiskTarget(0.05, 0.05, "changed", "frozen", 0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def cache(model: nn.Module) -> Iterator[LLMCache]:
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        yield cache


def learned(cache: LLMCache, n: int = N) -> tuple[CalibratedReuse, list[Observation]]:
    observed = cache.observe(requests(n)[0])
    assert cache.calibrated is not None
    return cache.calibrated, observed


def test_what_was_observed_is_calibrated_on_as_if_it_were_computed_now(cache: LLMCache) -> None:
    inputs, labels = requests(N)
    observed = cache.observe(inputs, labels=labels)
    assert cache.calibrated is not None and cache.calibration is None
    assert [case.label for case in observed] == labels
    assert cache.stats().n_stored == 0  # observing stores nothing
    again = cache.calibrated.calibrate(observed, CLAIM)
    assert again.curve == cache.calibrate(inputs, max_drop=0.05).curve


def test_growing_sources_widen_what_serves_and_leave_the_decision_as_the_limit_was_chosen_for_it(
    cache: LLMCache,
) -> None:
    calibrated, observed = learned(cache)
    frozen, taught = calibrated.calibrate(observed, CLAIM), calibrated.state()
    growing = calibrated.calibrate(observed, replace(CLAIM, sources="growing"))
    assert growing.curve == frozen.curve and growing.chosen == frozen.chosen
    assert growing.n_sources == frozen.n_sources + frozen.n_tested  # C serves, too
    assert all(np.array_equal(array, taught[name]) for name, array in calibrated.state().items())


def test_learning_allows_nothing(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    calibrated.calibrate(observed, CLAIM)
    limits = calibrated.learn(observed)
    assert cache.calibration is None
    assert len(limits) > 10 and (np.diff(limits) > 0).all() and limits[-1] <= calibrated.chooser.max_risk
    assert "semantic" not in ask(cache, requests(60, seed=7)[0])[1]


def test_doubts_tell_what_serving_does(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    found = calibrated.calibrate(observed, CLAIM)
    assert found.chosen is not None
    fresh = requests(200, seed=7)[0]
    cases = cache.observe(fresh)
    risks, sources = calibrated.fitter.risks(cases, set())
    _, rungs = ask(cache, fresh)
    near = [rung == "semantic" for rung in rungs]
    assert near == (risks <= found.chosen.limit).tolist()
    assert 20 < sum(near) < 180
    held = {case.row.key for case in observed}
    assert all(source in held for source, is_near in zip(sources, near, strict=True) if is_near)


def test_of_repeats_there_is_no_doubt(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    calibrated.learn(observed)
    keys = {case.row.key for case in observed[:5]}
    risks, sources = calibrated.fitter.risks(observed[:10], keys)
    assert np.isneginf(risks[:5]).all() and np.isfinite(risks[5:]).any()
    assert sources[:5] == [case.row.key for case in observed[:5]]


def test_after_a_restart_only_those_who_were_named_serve(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    calibrated.learn(observed)
    few = observed[:40]
    calibrated.fitter.restart(few)
    calibrated.fitter.stand(observed[40:50])
    _, sources = calibrated.fitter.risks(cache.observe(requests(100, seed=7)[0]), set())
    named = {case.row.key for case in observed[:50]}
    assert {source for source in sources if source is not None} <= named
    assert len(set(sources)) > 5


def test_a_trial_counts_what_changes(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    calibrated.learn(observed)
    fresh = cache.observe(requests(200, seed=7)[0])
    held = {case.row.key: case for case in observed}
    trial = calibrated.fitter.trial(fresh, held, "changed")
    _, sources = calibrated.fitter.risks(fresh, set(held))
    changed = [
        source is not None and not np.array_equal(case.answer, held[source].answer)
        for case, source in zip(fresh, sources, strict=True)
    ]
    assert trial.loss.tolist() == [float(value) for value in changed]
    assert 0 < trial.loss.sum() < len(fresh)


def test_what_cannot_be_observed_is_refused(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="2 labels for 1 requests"):
        cache.observe(requests(1)[0], labels=[0, 1])
    assert cache.calibrated is not None
    cache.unwrap()
    with pytest.raises(WrapError, match="was unwrapped"):
        cache.observe(requests(1)[0])


def test_nothing_of_the_requests_is_left_with_the_teacher_once_a_calibration_has_ended(cache: LLMCache) -> None:
    calibrated, observed = learned(cache)
    calibrated.calibrate(observed, CLAIM)
    assert not calibrated.fitter._forecasts
    with pytest.raises(CalibrationError):
        calibrated.calibrate(observed[:5], CLAIM)
    assert not calibrated.fitter._forecasts


def test_a_request_that_comes_again_is_looked_up_once(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated, observed = learned(cache)
    calibrated.learn(observed[:600])
    asked = [*observed[600:], *observed[600:]]
    alone = [calibrated.fitter.look_up([case], ())[0] for case in asked]
    looked, find = [], calibrated.fitter._find
    monkeypatch.setattr(calibrated.fitter, "_find", lambda case: looked.append(case) or find(case))
    assert calibrated.fitter.look_up(asked, ()) == alone
    assert len(looked) == len({case.row.key for case in asked}) < len(asked)
