"""The steps of a calibration, one by one: a replay counts what serving does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.errors import CalibrationError, WrapError
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.risk_target import RiskTarget
from llmcache.reuse.decide import MAX_RISK
from llmcache.reuse.observation import Observation
from tests.contract.streams import classifier
from tests.topics import N_CALIBRATED, batched, requests, rungs_of

SAMPLE, LABELS = requests(N_CALIBRATED)
FRESH = batched(requests(200, seed=7)[0])
CLAIM = RiskTarget(0.05, 0.05, "changed", "frozen", 0)


@pytest.fixture
def cache() -> Iterator[LLMCache]:
    with LLMCache.wrap(classifier()) as cache:
        yield cache


@pytest.fixture
def observed(cache: LLMCache) -> list[Observation]:
    return cache.observe(batched(SAMPLE), labels=LABELS)


@pytest.fixture
def calibrated(cache: LLMCache, observed: list[Observation]) -> CalibratedReuse:
    """The calibrated reuse of a cache that has observed, and learned nothing yet."""
    return cache.calibrated


@pytest.mark.slow
def test_what_was_observed_is_calibrated_on_as_if_it_were_computed_now(
    cache: LLMCache, calibrated: CalibratedReuse, observed: list[Observation]
) -> None:
    assert cache.calibration is None
    assert [case.label for case in observed] == LABELS
    assert cache.stats().n_stored == 0  # observing stores nothing
    again = calibrated.calibrate(observed, CLAIM)
    assert not calibrated.fitter._forecasts  # no forecast of the requests is kept
    assert again.curve == cache.calibrate(batched(SAMPLE), max_drop=0.05).curve
    with pytest.raises(CalibrationError):
        calibrated.calibrate(observed[:5], CLAIM)
    assert not calibrated.fitter._forecasts


@pytest.mark.slow
def test_growing_sources_widen_what_serves_and_leave_the_decision_as_the_limit_was_chosen_for_it(
    calibrated: CalibratedReuse, observed: list[Observation]
) -> None:
    frozen, taught = calibrated.calibrate(observed, CLAIM), calibrated.chooser.state()
    growing = calibrated.calibrate(observed, replace(CLAIM, sources="growing"))
    assert growing.curve == frozen.curve and growing.chosen == frozen.chosen
    assert growing.n_sources == frozen.n_sources + frozen.n_tested  # tested requests serve, too
    assert all(np.array_equal(array, taught[name]) for name, array in calibrated.chooser.state().items())


@pytest.mark.slow
def test_doubts_tell_what_serving_does(
    cache: LLMCache, calibrated: CalibratedReuse, observed: list[Observation]
) -> None:
    found = calibrated.calibrate(observed, CLAIM)
    risks, sources = calibrated.fitter.risks(cache.observe(FRESH), set())
    near = [rung == "semantic" for rung in rungs_of(cache, FRESH)]
    assert near == (risks <= found.chosen.limit).tolist()
    assert 20 < sum(near) < 190
    held = {case.row.key for case in observed}
    assert all(source in held for source, is_near in zip(sources, near, strict=True) if is_near)


@pytest.mark.slow
def test_learning_allows_nothing_and_doubts_no_repeats(
    cache: LLMCache, calibrated: CalibratedReuse, observed: list[Observation]
) -> None:
    calibrated.calibrate(observed, CLAIM)
    limits = calibrated.learn(observed)
    assert cache.calibration is None
    assert len(limits) > 10 and (np.diff(limits) > 0).all() and limits[-1] <= MAX_RISK
    keys = [case.row.key for case in observed[:5]]
    risks, sources = calibrated.fitter.risks(observed[:10], set(keys))
    assert np.isneginf(risks[:5]).all() and np.isfinite(risks[5:]).any()
    assert sources[:5] == keys
    assert "semantic" not in rungs_of(cache, FRESH)


@pytest.mark.slow
def test_a_trial_counts_what_changes(cache: LLMCache, calibrated: CalibratedReuse, observed: list[Observation]) -> None:
    calibrated.learn(observed)
    fitter, fresh = calibrated.fitter, cache.observe(FRESH)
    held = {case.row.key: case for case in observed}
    _, sources = fitter.risks(fresh, set(held))
    changed = [
        source is not None and not np.array_equal(case.answer, held[source].answer)
        for case, source in zip(fresh, sources, strict=True)
    ]
    assert fitter.trial(fresh, held, "changed").loss.tolist() == [float(value) for value in changed]
    assert 0 < sum(changed) < len(fresh)


def test_what_cannot_be_observed_is_refused(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="2 labels for 1 requests"):
        cache.observe(SAMPLE[:1], labels=[0, 1])
    assert cache.calibrated is not None
    cache.unwrap()
    with pytest.raises(WrapError, match="was unwrapped"):
        cache.observe(SAMPLE[:1])
