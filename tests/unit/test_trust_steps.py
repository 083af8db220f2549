"""The steps of a calibration, one by one: what a replay counts is what serving does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from llmcache import LLMCache
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.claim import RiskTarget
from llmcache.errors import CalibrationError, WrapError
from llmcache.request.observation import Observation
from tests.topics import classifier, requests
from tests.unit.test_trust import ask

N = 700
CLAIM = RiskTarget(0.05, 0.05, "changed", "frozen", 0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def cache(model: nn.Module) -> Iterator[LLMCache]:
    with LLMCache.wrap(model, step_aside=False) as cache:
        yield cache


def learned(cache: LLMCache, n: int = N) -> tuple[CalibratedReuse, list[Observation]]:
    observed = cache.observe(requests(n)[0])
    assert cache.trust is not None
    return cache.trust, observed


def test_what_was_observed_is_calibrated_on_as_if_it_were_computed_now(cache: LLMCache) -> None:
    inputs, labels = requests(N)
    observed = cache.observe(inputs, labels=labels)
    assert cache.trust is not None and cache.calibration is None
    assert [case.label for case in observed] == labels
    assert cache.stats().n_stored == 0  # observing stores nothing
    again = cache.trust.calibrate(observed, CLAIM)
    assert again.curve == cache.calibrate(inputs, max_drop=0.05).curve


def test_growing_sources_widen_what_serves_and_leave_the_decision_as_the_limit_was_chosen_for_it(
    cache: LLMCache,
) -> None:
    trust, observed = learned(cache)
    frozen, taught = trust.calibrate(observed, CLAIM), trust.state()
    growing = trust.calibrate(observed, replace(CLAIM, sources="growing"))
    assert growing.curve == frozen.curve and growing.chosen == frozen.chosen
    assert growing.n_sources == frozen.n_sources + frozen.n_tested  # C serves, too
    assert all(np.array_equal(array, taught[name]) for name, array in trust.state().items())


def test_learning_allows_nothing(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    trust.calibrate(observed, CLAIM)
    limits = trust.learn(observed)
    assert cache.calibration is None
    assert len(limits) > 10 and (np.diff(limits) > 0).all() and limits[-1] <= trust.chooser.most
    assert "semantic" not in ask(cache, requests(60, seed=7)[0])[1]


def test_doubts_tell_what_serving_does(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    found = trust.calibrate(observed, CLAIM)
    assert found.chosen is not None
    fresh = requests(200, seed=7)[0]
    cases = cache.observe(fresh)
    doubts, sources = trust.teacher.doubts(cases, set())
    _, rungs = ask(cache, fresh)
    near = [rung == "semantic" for rung in rungs]
    assert near == (doubts <= found.chosen.limit).tolist()
    assert 20 < sum(near) < 180
    held = {case.row.key for case in observed}
    assert all(source in held for source, is_near in zip(sources, near, strict=True) if is_near)


def test_of_repeats_there_is_no_doubt(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    trust.learn(observed)
    keys = {case.row.key for case in observed[:5]}
    doubts, sources = trust.teacher.doubts(observed[:10], keys)
    assert np.isneginf(doubts[:5]).all() and np.isfinite(doubts[5:]).any()
    assert sources[:5] == [case.row.key for case in observed[:5]]


def test_after_a_restart_only_those_who_were_named_serve(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    trust.learn(observed)
    few = observed[:40]
    trust.teacher.restart(few)
    trust.teacher.stand(observed[40:50])
    _, sources = trust.teacher.doubts(cache.observe(requests(100, seed=7)[0]), set())
    named = {case.row.key for case in observed[:50]}
    assert {source for source in sources if source is not None} <= named
    assert len(set(sources)) > 5


def test_a_trial_counts_what_changes(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    trust.learn(observed)
    fresh = cache.observe(requests(200, seed=7)[0])
    held = {case.row.key: case for case in observed}
    trial = trust.teacher.trial(fresh, held, "changed")
    _, sources = trust.teacher.doubts(fresh, set(held))
    changed = [
        source is not None and not np.array_equal(case.answer, held[source].answer)
        for case, source in zip(fresh, sources, strict=True)
    ]
    assert trial.loss.tolist() == [float(value) for value in changed]
    assert 0 < trial.loss.sum() < len(fresh)


def test_what_cannot_be_observed_is_refused(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="2 labels for 1 requests"):
        cache.observe(requests(1)[0], labels=[0, 1])
    assert cache.trust is not None
    cache.unwrap()
    with pytest.raises(WrapError, match="was unwrapped"):
        cache.observe(requests(1)[0])


def test_nothing_of_the_requests_is_left_with_the_teacher_once_a_calibration_has_ended(cache: LLMCache) -> None:
    trust, observed = learned(cache)
    trust.calibrate(observed, CLAIM)
    assert not trust.teacher._foreseen
    with pytest.raises(CalibrationError):
        trust.calibrate(observed[:5], CLAIM)
    assert not trust.teacher._foreseen


def test_a_request_that_comes_again_is_looked_up_once(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    trust, observed = learned(cache)
    trust.learn(observed[:600])
    asked = [*observed[600:], *observed[600:]]
    alone = [trust.teacher.look_up([case], ())[0] for case in asked]
    looked, find = [], trust.teacher._find
    monkeypatch.setattr(trust.teacher, "_find", lambda case: looked.append(case) or find(case))
    assert trust.teacher.look_up(asked, ()) == alone
    assert len(looked) == len({case.row.key for case in asked}) < len(asked)
