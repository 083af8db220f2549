"""How a calibration weighs sources and a draft, what it takes for it, and what becomes of it."""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmcache import ConfigError, LLMCache, Metric
from llmcache.errors import UnfitBankError
from llmcache.reuse.answers import ANSWERS
from llmcache.reuse.calibration import training
from llmcache.reuse.calibration.calibration import Costs, HoldoutOutcome, choose_shares, combined, try_limits
from tests import inside
from tests.calibration.drafting import BOTH, MAX_DROP, only_copy, only_model, stranger, student, wrap
from tests.contract.models import fresh
from tests.contract.streams import ask, batched, classifier, requests
from tests.tiny_models import tokenizer

LEARNED = batched(requests(400)[0])
AUDITED = {"rate": 1.0, "in_background": False}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses sources and draft, whatever their times."""
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)


@pytest.fixture
def draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the draft alone."""
    monkeypatch.setattr(training, "choose_shares", lambda *given: {"draft": 1.0})


# -- rungs under one limit ---------------------------------------------------------------------------------------------


def outcome(risk: list[float], loss: list[float]) -> HoldoutOutcome:
    return HoldoutOutcome(np.array(risk), np.array(loss))


def test_the_first_rung_within_the_limit_serves() -> None:
    alone = {"semantic": outcome([0.1, 0.3, -np.inf], [1, 0, 0]), "draft": outcome([0.2, 0.1, np.inf], [0, 1, 0])}
    both = combined(alone, {"semantic": 0.5, "draft": 1.0})
    assert both.dial.tolist() == [0.2, 0.1, -np.inf]
    assert both.serve(0.0)[0].tolist() == [[False, False, True], [False, False, False]]
    first, losses = both.serve(0.2)
    assert first.tolist() == [[True, False, True], [False, True, False]] and losses.tolist() == [1, 1, 0]
    engine = replace(both, computed=np.array([1.0, 1.0, 1.0]))  # which changes what it computes
    assert engine.serve(0.0)[1].tolist() == [1, 1, 0]
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


@pytest.mark.parametrize("name", ["class", "labels"])
def test_margins_are_finite_and_rise_with_certainty(name: str) -> None:
    outputs = np.array([[9.0, -9.0, -9.5], [0.2, -0.3, -2.0], [0.0, 0.0, 0.0]], np.float32)
    margins = np.array(list(map(ANSWERS[name]().margins, outputs)))
    assert np.isfinite(margins).all() and (np.diff(margins, axis=0) < 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["slow", "says nothing"])
def test_a_draft_that_does_not_pay_is_left_out(home: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "slow":
        monkeypatch.setattr("llmcache.reuse.draft.perf_counter", partial(next, count(0, 100.0)))
    # A stranger takes no token types, which calls may give all the same.
    typed = [{**one, "token_type_ids": torch.zeros_like(one["input_ids"])} for one in LEARNED]
    with wrap(home, draft=student() if why == "slow" else stranger()) as cache:
        made = cache.calibrate(typed)
        assert made.draft and made.chosen is not None and set(made.shares) == {"semantic"}
        assert "left out, since it is no faster: draft" in str(made)
        assert "draft" not in ask(cache, requests(40, seed=1)[0])


# -- what may draft ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: stranger(num_labels=4), "it has 4 labels"),
        (lambda: stranger(id2label=dict(enumerate("abcde"))), "as labels"),
        (lambda: stranger(vocab_size=90), "it has 90 tokens"),
        (lambda: stranger(pad_token_id=1), "same tokenizer"),
        (lambda: stranger().train(), "training mode"),
        (lambda: stranger().to("meta"), "it is on meta"),
        (lambda: stranger().apply(lambda part: [one.data.fill_(torch.nan) for one in part.parameters()]), "NaN"),
        (nn.ReLU, "no weights"),
        (lambda: nn.Linear(4, 5).eval(), "does not answer"),
        (lambda: 3, "give 'int8', options or a model"),
        (lambda: {"engine": "model"}, "needs the model"),
        (lambda: {"engine": "onnxruntime", "precision": "int4"}, "should be 'int8'"),
        (lambda: {"engines": "onnxruntime"}, "did you mean 'engine'"),
        (lambda: {"engine": "onnxruntime", "model": stranger()}, "drafts by itself: leave engine='onnxruntime' out"),
    ],
)
def test_what_cannot_draft_is_refused_in_a_line(model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){says}") as raised:
        LLMCache.wrap(classifier(), draft=model())
    assert "\n" not in str(raised.value)


class Centred(nn.Linear):
    """A head whose logits of a computed row would depend on the placeholder states of a drafted row."""

    def forward(self, states: Tensor) -> Tensor:
        made = super().forward(states)
        return made - 0.1 * made.mean(dim=0)


def test_models_beside_which_none_can_draft_are_refused(home: Path) -> None:
    model, other, mixing = classifier(), student(), classifier()
    mixing.classifier = Centred(32, 5)
    with pytest.raises(ConfigError, match="the model itself"):
        LLMCache.wrap(model, draft=model)
    with pytest.raises(ConfigError, match="answer_of"):
        LLMCache.wrap(model, draft=other, answer_of=lambda output: output.logits)
    with LLMCache.wrap(other), pytest.raises(ConfigError, match="unwrap"):
        LLMCache.wrap(model, draft=other)
    with pytest.raises(ConfigError, match="mixes the rows"):
        LLMCache.wrap(mixing.eval(), draft=other)
    with pytest.raises(ConfigError, match="vectors cannot take the place"):
        LLMCache.wrap(model.bert, draft=stranger(), payload="mean").calibrate(LEARNED)
    with pytest.raises(ConfigError, match="measured on one vector; set payload"):
        wrap(home, classifier().bert).calibrate(LEARNED)


@pytest.mark.slow
def test_without_a_draft_sources_are_calibrated(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llmcache.calls.core.OnnxGraph", lambda *given: 1 / 0)
    made = wrap(home).calibrate(LEARNED)
    assert made.chosen is not None and (made.draft, dict(made.shares)) == ("", {"semantic": 1.0})
    assert sum("there is no draft" in one.message for one in caplog.records) == 2  # when it was made, and calibrated


class Single(nn.Linear):
    """A head that takes one row at a time."""

    def forward(self, states: Tensor) -> Tensor:
        assert len(states) == 1
        return super().forward(states)


def test_a_head_that_takes_one_row_at_a_time_has_a_draft(home: Path) -> None:
    model = classifier()
    model.classifier = Single(32, 5)
    assert inside.draft(wrap(home, model.eval())).drafter_name


@pytest.mark.slow
def test_a_decoder_has_a_draft(home: Path) -> None:
    model = fresh("gpt2", "classifier")
    model.config.pad_token_id = None
    assert inside.draft(wrap(home, model)).drafter_name


@pytest.mark.slow
@pytest.mark.parametrize(("least", "serves"), [(0.9, "all"), (0.99999, "none")])
@pytest.mark.usefixtures("draft_alone")
def test_an_embeddings_draft_serves_all_or_none(home: Path, least: float, serves: str) -> None:
    model, plain = classifier().bert, classifier().bert
    options = {"engine": "onnxruntime", "precision": "int8", "min_cosine": least}
    with wrap(home, model, draft=options, payload="mean", max_drop=0.05) as cache:
        made = cache.calibrate(LEARNED)
        assert made.drafted is not None and made.drafted.loss <= made.drafted.bound
        assert f"the draft serves {serves}: {made.drafted.loss:.2%} of its vectors are under min_cosine" in str(made)
        assert (made.drafted.bound <= 0.05) == (serves == "all") == (made.chosen is not None)
        rungs = []
        for row in requests(20, seed=1)[0].split(1):
            with torch.inference_mode():
                found, own = (one(input_ids=row).last_hidden_state.mean(1) for one in (cache.model, plain))
            rungs.append(cache.last[0].rung)
            cosine = torch.nn.functional.cosine_similarity(found, own)
            assert cosine > (least if rungs[-1] == "draft" else 0.9999)
        assert set(rungs) == ({"draft"} if serves == "all" else {None}) and cache.stats().errors == 0


@pytest.mark.slow
@pytest.mark.usefixtures("draft_alone")
def test_a_classifier_of_sentence_transformers_has_a_draft_and_an_audit(home: Path, tmp_path: Path) -> None:
    """Its forward takes one dict, and is replaced twice."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    fitted = classifier()
    fitted.bert.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    head = Dense(32, 5, activation_function=torch.nn.Identity())
    model = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32, "mean"), head], device="cpu").eval()
    with torch.no_grad():
        head.linear.weight.copy_(fitted.classifier.weight)
    with wrap(home, model, answer="class", answer_of=lambda output: output["sentence_embedding"], audit=1.0) as cache:
        assert cache.calibrate(LEARNED).shares == {"draft": 1.0}
        rungs = []
        for row in requests(40, seed=5)[0]:
            cache({"input_ids": row[None], "attention_mask": torch.ones_like(row[None])})
            rungs.append(cache.last[0].rung)
        cache.drain()
        audit = cache.stats().audit
        assert "draft" in rungs and audit is not None and audit.n_recomputed > 0
        assert cache.stats().errors == 0


# -- what it is calibrated on, and for ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("both")
def test_accuracy_and_a_metric_count_what_the_draft_loses(home: Path) -> None:
    ids, topics = requests(400)
    right = Metric(lambda output, label: float(output.argmax() == label), 0.0, 1.0)
    cache = wrap(home)
    for metric, max_drop in (("accuracy", 0.05), (right, 0.2)):
        made = cache.calibrate(batched(ids), labels=topics.tolist(), metric=metric, max_drop=max_drop)
        assert made.chosen is not None and made.chosen.bound <= max_drop
        assert {"semantic", "draft"} <= set(ask(cache, requests(100, seed=14)[0]))


@pytest.mark.slow
@pytest.mark.usefixtures("both")
def test_a_draft_that_is_edited_while_requests_are_collected_counts_for_nothing(home: Path) -> None:
    other = student()
    with wrap(home, draft=other, learn=400) as cache:
        cache(**LEARNED[0])
        with torch.no_grad():
            other.classifier.bias.add_(1.0)
        for inputs in LEARNED[1:]:
            cache(**inputs)
        cache.drain()
        made = cache.calibration
        assert made is not None and (made.draft, set(made.shares)) == ("", {"semantic"})


# -- what becomes of it ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("draft_alone")
def test_drafts_are_audited_like_hits(home: Path) -> None:
    cache, own, n_drafted, n_changed = wrap(home, audit=AUDITED, max_drop=0.2), classifier(), 0, 0
    assert "left out, since it is no faster: semantic" in str(cache.calibrate(LEARNED))
    for row in requests(150, seed=12)[0].split(1):
        found = cache(input_ids=row).logits
        n_drafted += (is_drafted := cache.last[0].rung == "draft")
        n_changed += is_drafted and int(found.argmax()) != int(own(input_ids=row).logits.argmax())
    cache.drain()
    audit = cache.stats().audit
    assert audit is not None and audit.n_recomputed == audit.n_drawn >= n_drafted > 30
    assert audit.n_changed >= n_changed > 0 and audit.n_quarantined == 0  # there is no source


@only_copy
def test_an_alarm_lowers_the_limits_of_both_rungs_and_drift_ends_both(drafted: LLMCache) -> None:
    made = drafted.calibration
    assert drafted.calibrated is not None and made is not None
    drafted.calibrated.alarm(made)
    now = drafted.calibration
    assert now is not None and now.is_of(made) and now.limits.keys() == BOTH.keys()
    assert all(limit < made.limits[rung] for rung, limit in now.limits.items())
    assert replace(made, has_drifted=True).limits == {}


@only_copy
def test_other_settings_weights_drafts_and_engines_need_a_calibration(
    drafted: LLMCache, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((ConfigError, UnfitBankError), match="draft is None"):
        LLMCache.load(classifier(), saved, config={"auto_bypass": False, "audit": 0, "max_drop": MAX_DROP})
    made, ids = drafted.calibration, requests(40, seed=4)[0]
    assert drafted.calibrated is not None and made is not None
    for other in ({"draft": "another version"}, {"engine": "another"}):
        drafted.calibrated.semantic.calibration = replace(made, **other)
        drafted.save(tmp_path)
        with LLMCache.load(classifier(), tmp_path) as loaded:
            assert loaded.calibration is None and set(ask(loaded, ids)) == {None}
    assert sum("is left out" in one.message for one in caplog.records) == 2
    drafted.calibrated.semantic.calibration = made
    with torch.no_grad():
        drafted.model.bert.encoder.layer[0].output.dense.weight.mul_(1.01)
    assert set(ask(drafted, ids)) == {None}


@only_model
def test_another_model_needs_a_calibration(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnfitBankError, match="needs the model"):
        LLMCache.load(classifier(), saved)
    other = student()
    with torch.no_grad():
        other.classifier.bias.add_(0.01)
    with LLMCache.load(classifier(), saved, draft=other) as cache:
        assert cache.calibration is None and set(ask(cache, requests(20, seed=1)[0])) == {None}
    assert "is left out" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("both")
def test_drafts_are_no_sources_and_a_renewal_keeps_the_draft(home: Path) -> None:
    with wrap(home, draft=student(), sources="growing", audit=AUDITED, recalibrate=120) as cache:
        made = cache.calibrate(LEARNED)
        assert made.sources == "growing" and made.limits.keys() == BOTH.keys()
        rungs = ask(cache, requests(140, seed=5)[0])
        assert "draft" in rungs and made.n_sources == 400  # whether any is computed hangs on the processor
        assert len(inside.sources(cache)) == 400 + rungs.count(None)
        cache.drain()
        renewed = cache.calibration
        assert renewed is not None and renewed is not made and renewed.draft == made.draft
        assert renewed.limits.keys() == BOTH.keys() and cache.stats().errors == 0
        assert "draft" in ask(cache, requests(40, seed=6)[0])
