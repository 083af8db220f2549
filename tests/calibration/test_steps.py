"""The steps of a calibration, one by one: a replay counts what serving does."""

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.errors import CalibrationError, WrapError
from llmcache.reuse.calibration.risk_target import RiskTarget
from tests.contract.streams import classifier
from tests.topics import N_CALIBRATED, batched, requests, rungs_of

SAMPLE, LABELS = requests(N_CALIBRATED)
FRESH = batched(requests(200, seed=7)[0])


@pytest.mark.slow
def test_a_replay_counts_what_serving_does() -> None:
    with LLMCache.wrap(classifier()) as cache:
        observed, claim = cache.observe(batched(SAMPLE), labels=LABELS), RiskTarget(0.05, 0.05, "changed", "frozen", 0)
        assert cache.calibration is None and cache.stats().n_stored == 0
        assert [case.label for case in observed] == LABELS
        reuse = cache.calibrated
        assert reuse is not None
        found, fresh = reuse.calibrate(observed, claim), cache.observe(FRESH)
        assert found.chosen is not None and not reuse.fitter._forecasts  # no forecast of the requests is kept
        risks, sources = reuse.fitter.risks(fresh, set())
        near = [rung == "semantic" for rung in rungs_of(cache, FRESH)]
        assert near == (risks <= found.chosen.limit).tolist() and 20 < sum(near) < 190
        held = {case.row.key: case for case in observed}
        changed = [
            source is not None and not np.array_equal(case.answer, held[source].answer)
            for case, source in zip(fresh, sources, strict=True)
        ]
        assert reuse.fitter.trial(fresh, held, "changed").loss.tolist() == changed and 0 < sum(changed) < len(fresh)
        assert found.curve == cache.calibrate(batched(SAMPLE), max_drop=0.05).curve


@pytest.mark.slow
def test_learning_alone_allows_nothing_and_doubts_no_repeats() -> None:
    with LLMCache.wrap(classifier()) as cache:
        observed, reuse = cache.observe(batched(SAMPLE)), cache.calibrated
        assert reuse is not None
        limits = reuse.learn(observed)
        assert len(limits) > 10 and (np.diff(limits) > 0).all()
        keys = [case.row.key for case in observed[:5]]
        risks, sources = reuse.fitter.risks(observed[:10], set(keys))
        assert np.isneginf(risks[:5]).all() and np.isfinite(risks[5:]).any() and sources[:5] == keys
        assert cache.calibration is None and "semantic" not in rungs_of(cache, FRESH)


def test_what_cannot_be_observed_is_refused() -> None:
    with LLMCache.wrap(classifier()) as cache, pytest.raises(CalibrationError, match="2 labels for 1 requests"):
        cache.observe(SAMPLE[:1], labels=[0, 1])
    with pytest.raises(WrapError, match="was unwrapped"):
        cache.observe(SAMPLE[:1])
