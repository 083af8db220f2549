"""The rung `draft`: one dial for sources and an int8 copy of the trunk, under one bound."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache import ConfigError, LLMCache
from llmcache.answers import ANSWERS
from llmcache.calibration import training
from llmcache.calibration.calibration import Costs, HoldoutOutcome, choose_shares, combined, try_limits
from llmcache.errors import UnfitBankError
from tests.contract.models import fresh
from tests.contract.streams import ask, batched, classifier, requests
from tests.tiny_models import batch

BOTH = {"semantic": 0.5, "draft": 1.0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests keep graphs."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def saved(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was calibrated with sources and a draft in use."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch, wrap(home) as cache:
        patch.setattr(training, "choose_shares", lambda *given: BOTH)
        assert cache.calibrate(batched(requests(600)[0])).is_certified
        cache.save(folder)
    return folder


@pytest.fixture
def cache(saved: Path) -> Iterator[LLMCache]:
    with LLMCache.load(classifier(), saved) as made:
        yield made


def wrap(home: Path, model: Any = None, **settings: Any) -> LLMCache:
    settings = {"draft": "int8", "max_drop": 0.05, "auto_bypass": False, "audit": 0, **settings}
    return LLMCache.wrap(classifier() if model is None else model, engine={"name": "eager", "folder": home}, **settings)


def outcome(risk: list[float], loss: list[float]) -> HoldoutOutcome:
    return HoldoutOutcome(np.array(risk), np.array(loss))


def test_the_first_rung_within_the_limit_serves() -> None:
    alone = {"semantic": outcome([0.1, 0.3, -np.inf], [1, 0, 0]), "draft": outcome([0.2, 0.1, np.inf], [0, 1, 0])}
    both = combined(alone, {"semantic": 0.5, "draft": 1.0})
    assert both.dial.tolist() == [0.2, 0.1, -np.inf]
    assert both.serve(0.0)[0].tolist() == [[False, False, True], [False, False, False]]
    first, losses = both.serve(0.2)
    assert first.tolist() == [[True, False, True], [False, True, False]] and losses.tolist() == [1, 1, 0]
    (point,) = try_limits(both, np.array([0.2]), 0.01, 0.05)
    assert (point.hit_rate, round(point.loss, 3)) == (1.0, 0.667)


@pytest.mark.parametrize(
    ("costs", "rungs"),
    [
        (Costs(0.05, 0.2, 1.0), {"semantic", "draft"}),  # each serves what the other cannot
        (Costs(0.05, 1.2, 1.0), {"semantic"}),  # the draft is slower than the model
        (Costs(0.9, 0.2, 1.0), {"draft"}),  # a search costs more than it saves
    ],
)
def test_rungs_that_do_not_pay_are_left_out(costs: Costs, rungs: set[str]) -> None:
    rng = np.random.default_rng(0)
    easy = rng.random((2, 2000)) < [[0.5], [0.7]]  # which requests each rung answers right for sure
    risk, loss = np.where(easy, 1e-3, 0.4), ~easy & (rng.random((2, 2000)) < 0.5)
    semantic, draft = (HoldoutOutcome(*one) for one in zip(risk, loss.astype(float), strict=True))
    shares = choose_shares(semantic, draft, costs, 0.01, 0.05)
    assert shares.keys() == rungs
    if len(rungs) == 2:
        assert 0.2 < shares["semantic"] < 0.6 and shares["draft"] == 1.0


@pytest.mark.parametrize("name", ["class", "labels", "score"])
def test_margins_are_finite_and_rise_with_certainty(name: str) -> None:
    sure, unsure = np.array([[9.0, -9.0]], np.float32), np.array([[0.1, -0.1]], np.float32)
    known, other = (ANSWERS[name]().margins(one)[0] for one in (sure, unsure))
    assert np.isfinite([*known, *other]).all() and known[0] > other[0]


def test_sources_and_draft_serve_within_one_bound_and_store_nothing(cache: LLMCache) -> None:
    made, alone = cache.calibration, classifier()
    assert made is not None and made.shares == BOTH and made.limit is not None
    assert made.limits == {"semantic": made.limit / 2, "draft": made.limit}
    ids, rungs, n_changed = requests(300, seed=1)[0], [], 0
    for row in ids:
        with torch.inference_mode():
            answer = int(cache.model(input_ids=row[None]).logits.argmax())
            n_changed += answer != int(alone(input_ids=row[None]).logits.argmax())
        (found,) = cache.last
        rungs.append(found.rung)
        if found.rung == "draft":
            assert found.risk is not None and found.risk <= made.limits["draft"]
            assert (found.source, found.similarity) == (None, None)
    stats = cache.stats()
    assert min(rungs.count("semantic"), rungs.count("draft")) > 20 and n_changed <= 0.05 * len(ids)
    assert stats.hits["draft"] == rungs.count("draft") and stats.errors == 0
    again = ask(cache, ids)
    assert [one for one, before in zip(again, rungs, strict=True) if before == "draft"] == ["draft"] * rungs.count(
        "draft"
    )


def test_a_row_gets_the_same_answer_in_any_batch(cache: LLMCache) -> None:
    ids = requests(120, seed=2)[0]
    rows = [row[: 5 + number % 4] for number, row in enumerate(ids)]
    alone, rungs = [], []
    for row in rows:
        alone.append(cache(input_ids=row[None], attention_mask=torch.ones(1, len(row), dtype=torch.int64)).logits)
        rungs.append(cache.last[0].rung)
    together = cache(**batch([row[None] for row in rows])).logits
    served = [number for number, rung in enumerate(rungs) if rung == "draft"]
    assert len(served) > 5
    assert [cache.last[number].rung for number in served] == ["draft"] * len(served)
    torch.testing.assert_close(together[served], torch.cat(alone)[served], atol=1e-4, rtol=1e-4)  # the head rounds


def test_drafts_are_audited_like_hits(saved: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: {"draft": 1.0})
    cache = wrap(home, audit={"rate": 1.0, "in_background": False})
    made = cache.calibrate(batched(requests(600)[0]))
    assert "left out, since it is no faster: semantic" in str(made)
    rungs = ask(cache, requests(100, seed=3)[0])
    cache.drain()
    audit = cache.stats().audit
    assert rungs.count("semantic") == 0 and rungs.count("draft") > 30
    assert audit is not None and audit.n_recomputed == audit.n_drawn >= rungs.count("draft")
    assert audit.n_quarantined == 0 and audit.status == "certified"


def test_other_settings_weights_and_versions_need_a_calibration(
    saved: Path, cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for config in ({"draft": None, "max_drop": 0.05}, {"draft": "int8", "max_drop": 0.05, "engine": "onnxruntime"}):
        with pytest.raises((ConfigError, UnfitBankError), match=r"draft is None|engine is"):
            LLMCache.load(classifier(), saved, config={"auto_bypass": False, "audit": 0, **config})
    ids = requests(40, seed=4)[0]
    with torch.no_grad():
        cache.model.bert.encoder.layer[0].output.dense.weight.mul_(1.01)
    assert set(ask(cache, ids)) == {None}
    monkeypatch.setattr("onnxruntime.__version__", "0.0")
    other = LLMCache.load(classifier(), saved)
    assert other.calibration is None and sum("left out: call calibrate()" in one.message for one in caplog.records) == 1
    assert set(ask(other, ids)) == {None}


def test_a_draft_that_fails_is_not_used_again_and_wrong_input_does_not_fail_it(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = requests(60, seed=5)[0]
    with pytest.raises(IndexError), torch.inference_mode():
        cache.model(input_ids=ids[:1], token_type_ids=torch.full((1, ids.shape[1]), 9))
    assert "draft" in ask(cache, ids[:30])
    draft = cache._core.forward.rungs[-1]

    def fail(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft.engine, "compute", fail)
    assert set(ask(cache, ids[30:])) <= {None, "semantic"}
    assert sum("draft failed" in one.message for one in caplog.records) == 1


def test_a_draft_that_cannot_be_made_or_has_no_margin(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="margin"):
        wrap(home, fresh("bert", "bare")).calibrate(batched(requests(600)[0]))
    monkeypatch.setattr("llmcache.core.OnnxTrunk", lambda *given: 1 / 0)
    cache = wrap(home)
    made = cache.calibrate(batched(requests(600)[0]))
    assert made.chosen is not None and (made.draft, dict(made.shares)) == ("", {"semantic": 1.0})
    assert sum("there is no draft" in one.message for one in caplog.records) == 2  # when it was made, and calibrated


def test_a_calibration_equals_itself_with_other_alarms(cache: LLMCache) -> None:
    made = cache.calibration
    assert made is not None and made.is_of(replace(made, n_alarms=1)) and replace(made, has_drifted=True).limits == {}
