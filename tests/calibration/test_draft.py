"""The rung `draft`: one dial for sources and an int8 copy of the trunk, under one bound."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llmcache import ConfigError, LLMCache, Metric
from llmcache.errors import UnfitBankError
from llmcache.reuse.answers import ANSWERS
from llmcache.reuse.calibration import training
from llmcache.reuse.calibration.calibration import Costs, HoldoutOutcome, choose_shares, combined, try_limits
from llmcache.reuse.draft import Draft
from llmcache.reuse.search_cost import Account
from tests.contract.models import fresh
from tests.contract.streams import ask, batched, classifier, requests
from tests.forks import in_child
from tests.tiny_models import batch, tokenizer

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
    margins = ANSWERS[name]().margins(outputs)
    assert np.isfinite(margins).all() and (np.diff(margins, axis=0) < 0).all()


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
    draft = cache._core.forward.draft
    assert draft is not None
    draft.forget()  # else no row is run again
    together = cache(**batch([row[None] for row in rows])).logits
    served = [number for number, rung in enumerate(rungs) if rung == "draft"]
    assert len(served) > 5
    assert [cache.last[number].rung for number in served] == ["draft"] * len(served)
    torch.testing.assert_close(together[served], torch.cat(alone)[served], atol=1e-4, rtol=1e-4)  # the head rounds


def test_a_loss_is_not_drafted(cache: LLMCache) -> None:
    (row, *_), labels = [row[None] for row in requests(240, seed=3)[0] if ask(cache, row[None]) == ["draft"]], [3]
    with torch.inference_mode():
        found, expected = (model(input_ids=row, labels=torch.tensor(labels)) for model in (cache.model, classifier()))
    torch.testing.assert_close(found.loss, expected.loss)
    assert cache.last[0].rung is None


@pytest.mark.parametrize("edit", ["hook", "weights", "module"])
def test_a_draft_serves_only_under_the_head_that_it_was_judged_with(cache: LLMCache, edit: str) -> None:
    ids = requests(240, seed=3)[0]
    served = [row[None] for row in ids if ask(cache, row[None]) == ["draft"]]
    assert len(served) > 5
    head, bias = cache.model.classifier, torch.tensor([0.0, 99.0, 0.0, 0.0, 0.0])
    if edit == "hook":
        head.register_forward_hook(lambda module, args, output: output + bias)
    elif edit == "weights":
        with torch.no_grad():
            head.bias.add_(bias)
    else:
        cache.model.classifier = nn.Sequential(head)
    for row in served:
        found = cache(input_ids=row).logits
        assert cache.last[0].rung in (None, "exact")  # some rows come again
        assert edit == "module" or int(found.argmax()) == 1
    assert cache.stats().errors == 0


def test_a_decoder_that_takes_one_row_at_a_time_has_a_draft(tmp_path: Path) -> None:
    model = fresh("gpt2", "classifier")
    model.config.pad_token_id = None
    drafter = wrap(tmp_path, model)._core.learn().draft.drafter  # type: ignore[union-attr]
    assert drafter is not None and drafter.name


def test_a_damaged_graph_of_the_draft_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = wrap(tmp_path)._core.learn().draft.drafter  # type: ignore[union-attr]
    drafter.engine._path.write_bytes(drafter.engine._path.read_bytes()[:1000])  # type: ignore[union-attr]
    again = wrap(tmp_path)._core.learn().draft.drafter  # type: ignore[union-attr]
    assert again.name == drafter.name != ""  # type: ignore[union-attr]
    assert sum("is not used" in one.message for one in caplog.records) == 1


def test_drafts_are_audited_like_hits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: {"draft": 1.0})
    cache = wrap(home, audit={"rate": 1.0, "in_background": False})
    made = cache.calibrate(batched(requests(600)[0]))
    assert "left out, since it is no faster: semantic" in str(made)
    rungs = ask(cache, requests(100, seed=3)[0])
    cache.drain()
    audit = cache.stats().audit
    assert rungs.count("draft") > 30 and audit is not None and audit.status == "certified"
    assert audit.n_recomputed == audit.n_drawn >= rungs.count("draft") and audit.n_quarantined == 0
    assert cache.calibrated is not None and made.chosen is not None
    # A limit that serves all: more answers change than are allowed, and the audit finds that out.
    cache.calibrated.in_force.calibration = replace(made, chosen=replace(made.chosen, limit=1.0))
    for row in requests(300, seed=12)[0]:
        ask(cache, row[None])
        cache.drain()
    audit = cache.stats().audit
    assert audit is not None and audit.n_alarms > 0


def test_an_alarm_lowers_the_limits_of_both_rungs(cache: LLMCache) -> None:
    made = cache.calibration
    assert cache.calibrated is not None and made is not None
    cache.calibrated.alarm(made)
    now = cache.calibration
    assert now is not None and now.limits.keys() == BOTH.keys()
    assert all(limit < made.limits[rung] for rung, limit in now.limits.items())


def test_other_settings_weights_and_engines_need_a_calibration(
    saved: Path, cache: LLMCache, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"auto_bypass": False, "audit": 0, "max_drop": 0.05}
    with pytest.raises((ConfigError, UnfitBankError), match="draft is None"):
        LLMCache.load(classifier(), saved, config=settings)
    ids = requests(40, seed=4)[0]
    with torch.no_grad():
        cache.model.bert.encoder.layer[0].output.dense.weight.mul_(1.01)
    assert set(ask(cache, ids)) == {None}
    engine = {"name": "onnxruntime", "folder": str(home)}
    other = LLMCache.load(classifier(), saved, config={**settings, "draft": "int8", "engine": engine})
    assert other.calibration is None and set(ask(other, ids)) == {None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxruntime.__version__", "0.0")
        other = LLMCache.load(classifier(), saved)
    assert other.calibration is None and set(ask(other, ids)) == {None}
    assert sum("is left out" in one.message for one in caplog.records) == 2


def test_a_withdrawn_source_is_not_replaced_by_the_draft(cache: LLMCache) -> None:
    """The calibration counted what the source would serve, so the draft's answers to these requests have no bound."""
    ids = requests(150, seed=6)[0]
    served = [(row, cache.last[0].source) for row in ids if ask(cache, row[None]) == ["semantic"]]
    assert len(served) > 20 and cache.calibrated is not None
    for _, source in served:
        cache.calibrated.fitter.sources.quarantine(str(source), "default")
    assert {rung for row, _ in served for rung in ask(cache, row[None])} == {None}


def test_searches_that_are_turned_off_leave_nothing_to_the_draft(cache: LLMCache) -> None:
    account = cache._core.forward.account = Account()
    ids = requests(40, seed=7)[0]
    assert "draft" in ask(cache, ids)
    account.pays = lambda call: False  # type: ignore[method-assign]
    assert set(ask(cache, requests(40, seed=8)[0])) == {None}


def test_input_that_the_model_refuses_is_not_drafted(cache: LLMCache, caplog: pytest.LogCaptureFixture) -> None:
    row = requests(1, seed=9)[0]
    types = torch.zeros_like(row)
    for seed in range(20):  # the cache knows calls with types now
        cache(input_ids=requests(1, seed=20 + seed)[0], token_type_ids=types)
    assert cache.stats().hits["draft"] > 0
    long = torch.cat([row, torch.zeros(1, 80, dtype=torch.int64)], dim=1)
    mask = (torch.arange(long.shape[1]) < row.shape[1]).long()[None]
    wrong: list[dict[str, Any]] = [
        {"input_ids": row, "token_type_ids": types + 9},
        {"input_ids": row, "token_type_ids": types - 1},
        {"input_ids": long, "attention_mask": mask},
    ]
    for inputs in wrong:
        with pytest.raises((IndexError, RuntimeError)):
            cache(**inputs)
    assert cache.stats().errors == 0 and not caplog.records
    assert "draft" in ask(cache, requests(40, seed=10)[0])


def test_a_draft_that_fails_is_not_used_again(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = requests(60, seed=5)[0]
    assert "draft" in ask(cache, ids[:30])

    def fail(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    draft = cache._core.forward.draft
    monkeypatch.setattr(draft.drafter, "run", fail)  # type: ignore[union-attr]
    assert set(ask(cache, ids[30:])) <= {None, "semantic"}
    assert sum("run the draft" in one.message for one in caplog.records) == 1


def test_drafts_are_looked_up_first_and_forgotten(cache: LLMCache) -> None:
    ids = requests(60, seed=11)[0]
    found = cache.look_up({"input_ids": ids})
    assert found.served is not None
    cache(**found.served.inputs)
    assert "draft" in {one.rung for one in cache.last}
    draft = cache._core.forward.draft
    assert isinstance(draft, Draft) and draft._recent
    cache.clear()
    assert not draft._recent


def test_a_draft_that_cannot_be_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="measured on one vector; set payload"):
        wrap(home, fresh("bert", "bare")).calibrate(batched(requests(600)[0]))
    monkeypatch.setattr("llmcache.calls.core.OnnxTrunk", lambda *given: 1 / 0)
    cache = wrap(home)
    made = cache.calibrate(batched(requests(600)[0]))
    assert made.chosen is not None and (made.draft, dict(made.shares)) == ("", {"semantic": 1.0})
    assert sum("there is no draft" in one.message for one in caplog.records) == 2  # when it was made, and calibrated


@pytest.mark.parametrize(("least", "serves"), [(0.9, "all"), (0.99999, "none")])
def test_an_embeddings_draft_serves_all_or_none(home: Path, least: float, serves: str) -> None:
    model = fresh("bert", "bare")
    options = {"engine": "onnxruntime", "precision": "int8", "min_cosine": least}
    with wrap(home, model, draft=options, payload="mean") as cache:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "choose_shares", lambda *given: {"draft": 1.0})
            made = cache.calibrate(batched(requests(400)[0]))
        assert made.drafted is not None and made.drafted.loss <= made.drafted.bound
        assert f"the draft serves {serves}: {made.drafted.loss:.2%} of its vectors are under min_cosine" in str(made)
        assert (made.drafted.bound <= 0.05) == (serves == "all") == (made.chosen is not None)
        rungs = []
        plain = fresh("bert", "bare")
        for row in requests(40, seed=1)[0].split(1):
            with torch.inference_mode():
                found, own = (one(input_ids=row).last_hidden_state.mean(1) for one in (cache.model, plain))
            rungs.append(cache.last[0].rung)
            cosine = torch.nn.functional.cosine_similarity(found, own)
            assert cosine > (least if rungs[-1] == "draft" else 0.9999)
        assert set(rungs) == ({"draft"} if serves == "all" else {None}) and cache.stats().errors == 0


def test_calls_that_the_graph_does_not_cover_are_not_drafted(cache: LLMCache) -> None:
    rows = [row for row in requests(150, seed=16)[0].split(1) if ask(cache, row) == ["draft"]]
    assert len(rows) > 4
    cache(**batch([rows[0], rows[1][:, :4]], left=True))
    assert cache.last[1].rung != "draft"
    cache(input_ids=rows[2], position_ids=torch.arange(1, 9)[None])
    assert cache.last[0].rung is None
    with torch.autocast("cpu", torch.bfloat16):
        assert ask(cache, rows[3]) == [None]
    assert ask(cache, rows[4]) == ["draft"] and cache.stats().errors == 0


def test_threads_a_batch_and_a_fork_get_the_same_drafts(cache: LLMCache) -> None:
    ids = requests(96, seed=17)[0]
    logits = [cache(input_ids=row).logits for row in ids.split(1)]
    rungs = ask(cache, ids)
    served = [number for number, rung in enumerate(rungs) if rung == "draft"]
    assert len(served) > 5
    found: dict[int, torch.Tensor] = {}

    def work(first: int) -> None:
        together = cache(input_ids=ids[first : first + 32]).logits
        found.update({first + place: row for place, row in enumerate(together)})

    draft = cache._core.forward.draft
    assert draft is not None
    draft.forget()
    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 32, 64)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number in served:
        torch.testing.assert_close(found[number], logits[number][0], atol=1e-4, rtol=1e-4)
    assert cache.stats().hits["draft"] == 3 * len(served) and cache.stats().errors == 0
    if hasattr(os, "fork"):
        draft.forget()
        row = ids[served[0]][None]
        assert in_child(lambda: ask(cache, row)) == ["draft"]


def test_a_calibration_equals_itself_with_other_alarms(cache: LLMCache) -> None:
    made = cache.calibration
    assert made is not None and made.is_of(replace(made, n_alarms=1)) and replace(made, has_drifted=True).limits == {}


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["class", "labels"])
def test_classes_and_labels_beside_another_engine(home: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)
    engine = {"name": "onnxruntime", "folder": home}
    cache = LLMCache.wrap(classifier(), draft="int8", engine=engine, answer=answer, max_drop=0.1, learn=600, audit=0)
    for inputs in batched(requests(600)[0]):
        cache(**inputs)
    cache.drain()
    made = cache.calibration
    assert made is not None and dict(made.shares) == BOTH and made.engine.startswith("onnxruntime")
    rungs = ask(cache, requests(200, seed=13)[0])
    assert made.chosen is not None and rungs.count("draft") > 10 and cache.stats().errors == 0
    assert figures_of(cache).n_requests >= 600 + rungs.count(None)


def figures_of(cache: LLMCache) -> Any:
    found = cache.stats().engine
    assert found is not None
    return found


@pytest.mark.slow
def test_accuracy_and_a_metric_count_what_the_draft_loses(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)
    ids, topics = requests(800)
    cache = wrap(home)
    right = Metric(lambda output, label: float(output.argmax() == label), 0.0, 1.0)
    for metric, max_drop in (("accuracy", 0.05), (right, 0.2)):
        made = cache.calibrate(batched(ids), labels=topics.tolist(), metric=metric, max_drop=max_drop)
        assert made.chosen is not None and made.chosen.bound <= max_drop
        assert {"semantic", "draft"} <= set(ask(cache, requests(100, seed=14)[0]))


@pytest.mark.slow
def test_caches_with_and_without_a_draft_share_no_calibration(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)
    shared = {"store": {"name": "disk", "folder": str(tmp_path)}, "share_calibration": True}
    with wrap(home, **shared) as first:
        made = first.calibrate(batched(requests(600)[0]))
        first.drain()
        for draft, is_adopted in ((None, False), ("int8", True)):
            with wrap(home, draft=draft, **shared) as other:
                other(input_ids=requests(1, seed=15)[0])
                other.drain()
                found = other.calibration
                assert (found is not None and found.is_of(made)) == is_adopted


def test_a_classifier_of_sentence_transformers_has_a_draft_and_an_audit(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(training, "choose_shares", lambda *given: {"draft": 1.0})
    with wrap(home, model, answer="class", answer_of=lambda output: output["sentence_embedding"], audit=1.0) as cache:
        assert cache.calibrate(batched(requests(400)[0])).shares == {"draft": 1.0}
        rungs = []
        for row in requests(40, seed=5)[0]:
            cache({"input_ids": row[None], "attention_mask": torch.ones_like(row[None])})
            rungs.append(cache.last[0].rung)
        cache.drain()
        audit = cache.stats().audit
        assert "draft" in rungs and audit is not None and audit.n_recomputed > 0
        assert cache.stats().errors == 0
