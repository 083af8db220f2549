"""The rung `draft` with another model: its logits stand in the model's output, under the same bound."""

import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from llmcache import ConfigError, LLMCache
from llmcache.errors import UnfitBankError
from llmcache.reuse.calibration import training
from tests.contract.streams import ask, batched, classifier, requests
from tests.forks import in_child
from tests.tiny_models import VOCABULARY, batch, build

BOTH = {"semantic": 0.3, "draft": 1.0}
SETTINGS: dict[str, Any] = {"max_drop": 0.08, "auto_bypass": False, "audit": 0}
SIZES: dict[str, Any] = {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32}


def make(**sizes: Any) -> Any:
    """Return a tiny DistilBERT in eval mode, of which all answers are random."""
    config = DistilBertConfig(**{**SIZES, "vocab_size": VOCABULARY, "num_labels": 5, **sizes})
    return build(lambda: DistilBertForSequenceClassification(config), seed=1)


def student() -> Any:
    """Return a model like the classifier, with noise on its weights and half of its positions."""
    model = classifier()
    with torch.no_grad():
        rng = torch.Generator().manual_seed(3)
        for one in model.parameters():
            one.add_(0.001 * one.std() * torch.randn(one.shape, generator=rng) if one.ndim > 1 else 0)
    table = model.bert.embeddings.position_embeddings
    table.weight, model.config.max_position_embeddings = nn.Parameter(table.weight[:32].detach().clone()), 32
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was calibrated with sources and another model in use."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch, LLMCache.wrap(classifier(), draft=student(), **SETTINGS) as cache:
        patch.setattr(training, "choose_shares", lambda *given: BOTH)
        made = cache.calibrate(batched(requests(600)[0]))
        assert made.is_certified and made.draft.startswith("BertForSequenceClassification ")
        cache.save(folder)
    return folder


@pytest.fixture
def drafting() -> Any:
    return student()


@pytest.fixture
def cache(saved: Path, drafting: Any) -> Iterator[LLMCache]:
    with LLMCache.load(classifier(), saved, draft=drafting) as made:
        yield made


def drafted(cache: LLMCache, n: int = 10, seed: int = 1) -> list[Tensor]:
    """Return rows (1, T) that the draft serves."""
    served = [row for row in requests(80, seed=seed)[0].split(1) if ask(cache, row) == ["draft"]]
    assert len(served) >= n
    return served


def forget(cache: LLMCache) -> None:
    """Make the draft answer anew."""
    assert cache._core.forward.draft is not None
    cache._core.forward.draft.forget()


def test_a_row_has_the_drafts_logits_alone_and_in_a_batch(cache: LLMCache) -> None:
    ids = requests(200, seed=2)[0]
    rows = [row[None, : 5 + number % 4] for number, row in enumerate(ids)]
    own, plain, rungs, logits, n_changed = classifier(), student(), [], [], 0
    with torch.inference_mode():
        for row in rows:
            logits.append(cache(input_ids=row, attention_mask=torch.ones_like(row)).logits)
            rungs.append(cache.last[0].rung)
            models = own(input_ids=row).logits
            n_changed += int(logits[-1].argmax()) != int(models.argmax())
            if rungs[-1] == "draft":
                assert torch.equal(logits[-1], plain(input_ids=row).logits)
            elif rungs[-1] is None:
                torch.testing.assert_close(logits[-1], models)
    assert {"draft", "semantic", None} == set(rungs) and n_changed <= 0.08 * len(ids)
    forget(cache)
    for first in range(0, len(rows), 32):
        together = cache(**batch(rows[first : first + 32])).logits
        assert together.isfinite().all()
        for place, found in enumerate(cache.last):
            if rungs[first + place] == "draft":  # nothing of it was stored
                assert found.rung == "draft" and torch.equal(together[place], logits[first + place][0])
            elif rungs[first + place] is None:
                assert found.rung == "exact"
    assert cache.stats().errors == 0


def test_outputs_that_logits_cannot_be_put_into_are_computed(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (row, other, third, *_), own, linear = drafted(cache), classifier(), nn.functional.linear
    with torch.inference_mode():
        found = cache(input_ids=row, labels=torch.tensor([1]))
        assert cache.last[0].rung is None and found.loss == own(input_ids=row, labels=torch.tensor([1])).loss
        # A call of the trunk alone has no logits; a look-up within the model is not for it either.
        ready = cache.look_up({"input_ids": other}).served
        assert ready is not None
        states = cache.model.bert(**ready.inputs).last_hidden_state
        torch.testing.assert_close(states, own.bert(input_ids=other).last_hidden_state)
        assert cache.stats().errors == 0
        ready = cache.look_up({"input_ids": third}).served
        assert ready is not None
        assert torch.equal(cache(**ready.inputs).logits, student()(input_ids=third).logits)
        assert cache.last[0].rung == "draft"

        def refuse_nan(states: Tensor, *given: Tensor) -> Tensor:
            if states.isnan().any():
                raise ValueError("NaN")
            return linear(states, *given)

        rest = drafted(cache, seed=4)[:2]
        tuples = cache(input_ids=rest[0], return_dict=False)
        assert torch.equal(tuples[0], student()(input_ids=rest[0]).logits)
        assert not caplog.records
        monkeypatch.setattr(nn.functional, "linear", refuse_nan)
        assert torch.equal(cache(input_ids=rest[1]).logits, own(input_ids=rest[1]).logits)
    assert ["run the model's head on a draft" in one.message for one in caplog.records] == [True]
    assert cache.stats().errors == 1 and ask(cache, rest[0]) == [None]


def test_a_hook_on_the_draft_has_no_part_in_what_was_calibrated(cache: LLMCache, drafting: Any) -> None:
    rows = drafted(cache)
    forget(cache)
    hook = drafting.classifier.register_forward_hook(lambda module, args, output: -output)
    assert not any("draft" in ask(cache, row) for row in rows[:5])
    hook.remove()
    assert any("draft" in ask(cache, row) for row in rows[5:])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: make(num_labels=4), "it has 4 labels"),
        (lambda: make(id2label=dict(enumerate("abcde"))), "as labels"),
        (lambda: make(vocab_size=90), "it has 90 tokens"),
        (lambda: make(pad_token_id=1), "same tokenizer"),
        (lambda: make().train(), "training mode"),
        (lambda: make().to("meta"), "it is on meta"),
        (lambda: make().half().apply(lambda part: [one.data.fill_(torch.nan) for one in part.parameters()]), "NaN"),
        (nn.ReLU, "no weights"),
        (lambda: nn.Linear(4, 5).eval(), "does not answer"),
        (lambda: 3, "give 'int8', options or a model"),
        (lambda: {"engine": "model"}, "needs the model"),
        (lambda: {"engine": "onnxruntime", "precision": "int4"}, "should be 'int8'"),
        (lambda: {"engines": "onnxruntime"}, "did you mean 'engine'"),
        (lambda: {"engine": "onnxruntime", "model": make()}, "drafts by itself: leave engine='onnxruntime' out"),
    ],
)
def test_models_that_cannot_draft_are_refused_in_a_line(model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){says}") as raised:
        LLMCache.wrap(classifier(), draft=model())
    assert "\n" not in str(raised.value)


def test_the_model_itself_and_models_with_a_cache_do_not_draft() -> None:
    model = classifier()
    with pytest.raises(ConfigError, match="the model itself"):
        LLMCache.wrap(model, draft=model)
    with pytest.raises(ConfigError, match="answer_of"):
        LLMCache.wrap(model, draft=student(), answer_of=lambda output: output.logits)
    other = student()
    with LLMCache.wrap(other), pytest.raises(ConfigError, match="unwrap"):
        LLMCache.wrap(model, draft=other)
    cache = LLMCache.wrap(model.bert, draft=make(), payload="mean")
    with pytest.raises(ConfigError, match="vectors cannot take the place"):
        cache.calibrate(batched(requests(100)[0]))


def test_a_head_that_mixes_rows_has_no_other_model_as_draft() -> None:
    """Its logits of a computed row would depend on the placeholder states of a drafted row."""

    class Centred(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            made = super().forward(states)
            return made - 0.1 * made.mean(dim=0)

    model = classifier()
    model.classifier = Centred(32, 5)
    with pytest.raises(ConfigError, match="mixes the rows"):
        LLMCache.wrap(model.eval(), draft=student())


def test_hooks_that_would_see_placeholders_end_drafting(cache: LLMCache) -> None:
    rows = drafted(cache)
    seen: list[Tensor] = []
    handle = cache.model.dropout.register_forward_hook(lambda *given: seen.append(given[2]))
    assert "draft" not in [rung for row in rows for rung in ask(cache, row)]
    assert len(seen) == len(rows) and all(one.isfinite().all() for one in seen)
    handle.remove()
    assert drafted(cache, n=1, seed=4)


def test_another_draft_needs_a_calibration(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnfitBankError, match="needs the model"):
        LLMCache.load(classifier(), saved)
    other = student()
    with torch.no_grad():
        other.classifier.bias.add_(0.01)
    with LLMCache.load(classifier(), saved, draft=other) as cache:
        assert cache.calibration is None and set(ask(cache, requests(20, seed=1)[0])) == {None}
    assert "is left out" in caplog.text


def test_edits_of_the_draft_end_it_until_they_are_undone(cache: LLMCache, drafting: Any) -> None:
    rows = drafted(cache)[:4]
    with torch.no_grad():
        drafting.classifier.bias.add_(1.0)
    assert "draft" not in ask(cache, torch.cat(rows[:2]))
    with torch.no_grad():
        drafting.classifier.bias.copy_(student().classifier.bias)
    assert ask(cache, rows[2]) == ["draft"]
    drafting.train()
    forget(cache)
    assert ask(cache, rows[3]) == [None]
    drafting.eval()


def test_calls_unlike_the_calibrations_are_not_drafted(cache: LLMCache) -> None:
    rows, own = drafted(cache)[:6], classifier()
    shifted = torch.arange(1, 9)[None]
    left = batch([rows[0], rows[1][:, :4]], left=True)
    with torch.inference_mode():
        found = cache(**left).logits
        assert cache.last[1].rung != "draft"
        torch.testing.assert_close(found[1], own(**left).logits[1])
        found = cache(input_ids=rows[2], position_ids=shifted).logits
        assert cache.last[0].rung is None
        torch.testing.assert_close(found, own(input_ids=rows[2], position_ids=shifted).logits)
        with torch.autocast("cpu", torch.bfloat16):
            found = cache(input_ids=rows[3]).logits
            assert cache.last[0].rung is None
            torch.testing.assert_close(found, own(input_ids=rows[3]).logits)
        long = torch.cat([rows[4], *[rows[4][:, 1:-1]] * 5], dim=1)  # longer than the draft takes
        assert ask(cache, long) == [None]
    assert ask(cache, rows[5]) == ["draft"] and cache.stats().errors == 0


def test_a_draft_that_raises_is_counted_once(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = drafted(cache)[:5]
    forget(cache)
    monkeypatch.setattr(cache._core.forward.draft.drafter, "run", lambda inputs: 1 / 0)  # type: ignore[union-attr]
    found = cache(input_ids=torch.cat(rows)).logits
    assert {one.rung for one in cache.last} <= {None, "exact"}
    torch.testing.assert_close(found, classifier()(input_ids=torch.cat(rows)).logits)
    assert cache.stats().errors == 1
    assert sum("not used again" in one.message for one in caplog.records) == 1


def test_two_threads_and_a_fork_get_the_same_answers(cache: LLMCache) -> None:
    rows, plain, wrong = drafted(cache), student(), list[int]()

    def work() -> None:
        for number, row in enumerate([*rows, *requests(40, seed=21)[0].split(1)]):
            with torch.inference_mode():
                found = cache(input_ids=row).logits
                if cache.last[0].rung == "draft" and not torch.equal(found, plain(input_ids=row).logits):
                    wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong and cache.stats().errors == 0
    if hasattr(os, "fork"):
        forget(cache)
        logits, rung = in_child(lambda: (cache(input_ids=rows[0]).logits.tolist(), cache.last[0].rung))
        assert rung == "draft" and torch.equal(torch.tensor(logits), plain(input_ids=rows[0]).logits)


def test_a_slow_draft_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("llmcache.reuse.draft.perf_counter", lambda: 100.0 * next(ticks))
    with LLMCache.wrap(classifier(), draft=student(), **SETTINGS) as cache:
        made = cache.calibrate(batched(requests(400)[0]))
        assert set(made.shares) == {"semantic"} and "left out, since it is no faster: draft" in str(made)
        assert "draft" not in ask(cache, requests(40, seed=1)[0])


def test_a_draft_whose_answers_say_nothing_is_left_out() -> None:
    """It takes no token types, which calls may give all the same."""
    typed = [{**one, "token_type_ids": torch.zeros_like(one["input_ids"])} for one in batched(requests(400)[0])]
    with LLMCache.wrap(classifier(), draft=make(), **SETTINGS) as cache:
        made = cache.calibrate(typed)
        assert made.draft.startswith("DistilBertForSequenceClassification ") and set(made.shares) == {"semantic"}
        assert made.chosen is not None and "left out, since it is no faster: draft" in str(made)


def test_a_calibration_counts_no_draft_that_was_edited_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    other = student()
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)

    def log() -> Iterator[dict[str, Tensor]]:
        yield from batched(requests(400)[0])

    with LLMCache.wrap(classifier(), draft=other, learn=400, **SETTINGS) as cache:
        for number, inputs in enumerate(log()):
            cache(**inputs)
            if number == 3:
                with torch.no_grad():
                    other.classifier.bias.add_(1.0)
        cache.drain()
        made = cache.calibration
        assert made is not None and (made.draft, set(made.shares)) == ("", {"semantic"})


@pytest.mark.slow
def test_growing_sources_and_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "choose_shares", lambda *given: BOTH)
    audit = {"rate": 1.0, "in_background": False}
    settings = {**SETTINGS, "audit": audit, "recalibrate": 300}
    with LLMCache.wrap(classifier(), draft=student(), sources="growing", **settings) as cache:
        made = cache.calibrate(batched(requests(400)[0]))
        assert made.sources == "growing" and made.limits.keys() == BOTH.keys()
        rungs = ask(cache, requests(400, seed=5)[0])
        assert {"draft", None} <= set(rungs) and made.n_sources == 400
        n_sources = len(cache.calibrated.fitter.sources)  # type: ignore[union-attr]
        assert n_sources == 400 + rungs.count(None)  # drafts are no sources
        cache.drain()
        renewed = cache.calibration
        assert renewed is not None and renewed is not made and renewed.draft == made.draft
        assert renewed.limits.keys() == BOTH.keys() and cache.stats().errors == 0
        assert "draft" in ask(cache, requests(60, seed=6)[0])
