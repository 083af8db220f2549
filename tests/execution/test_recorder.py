"""Bypassed calls are recorded, and served when they come again: as stored, and never what another model computed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from llmcache.execution.cost import _SOONER, CostModel
from llmcache.execution.recorder import BypassRecorder
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded
from tests.topics import classifier, requests

LENGTH, PATIENCE = 6, 8


def request(number: int) -> Tensor:
    """One of 8,100 requests that all differ."""
    return torch.tensor([[5 + number // 90, 5 + number % 90, *range(10, 10 + LENGTH - 2)]])


def wrapped(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLMCache:
    """A cache that bypasses itself soon, whatever calls take on a machine at work."""
    cache = LLMCache.wrap(model, **settings)
    cost = cache._components.cost = CostModel(4, _SOONER * PATIENCE)
    cost._fewest_times = 1
    for name, value in (("worthwhile_from", 0.5), ("is_cheap", False), ("saved_s", 1.0)):
        monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts." + name, value)
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.serves", lambda self, share: share > 0.3)
    monkeypatch.setattr(
        "llmcache.execution.length_costs.LengthCosts.count_bypassed", lambda self: setattr(self, "recordable", 2.0)
    )
    return cache


def ask(cache: LLMCache, numbers: range) -> list[str | None]:
    """What became of requests: the rung, or why they were bypassed."""
    told = []
    for number in numbers:
        cache(input_ids=request(number))
        told.append(cache.last[0].rung or cache.last[0].bypassed)
    return told


def recorder(cache: LLMCache) -> BypassRecorder:
    known = cache._components.recorder
    assert known is not None
    return known


@pytest.mark.parametrize("payload", ["auto", "sequence"])
def test_a_second_pass_is_served_although_the_first_went_by(monkeypatch: pytest.MonkeyPatch, payload: str) -> None:
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache = wrapped(model, monkeypatch, payload=payload)
    assert ask(cache, range(60)) == [None] * PATIENCE + ["not_worthwhile"] * 52
    assert (cache.stats().n_stored, recorder(cache).n_rows) == (PATIENCE, 52)
    assert ask(cache, range(60)) == ["exact"] * 60
    assert (cache.stats().n_stored, recorder(cache).n_rows, recorder(cache).nbytes) == (60, 0, 0)
    with torch.inference_mode():
        assert all(
            torch.equal(model(input_ids=request(n)).logits, plain(input_ids=request(n)).logits) for n in (3, 20, 59)
        )


def calibrated(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LLMCache:
    """A cache that never bypasses itself, but has calls bypassed to be compared."""
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.is_cheap", True)
    cache = LLMCache.wrap(classifier(), max_drop=0.05, audit=0, **settings)
    cache.calibrate(requests(700)[0])
    return cache


def told_of(cache: LLMCache, inputs: list[dict[str, Tensor]]) -> list[str | None]:
    told = []
    for one in inputs:
        cache(**one)
        told.append(cache.last[0].rung or cache.last[0].bypassed)
    return told


def test_what_went_by_to_be_compared_is_served_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = calibrated(monkeypatch)
    inputs = requests(300, seed=7, noise=0.3)[0]
    first = told_of(cache, inputs)
    assert first.count("compared") == 16 and first[255:271] == ["compared"] * 16
    assert cache.stats().bypassed == {"compared": 16} and "bypassed" not in caplog.text
    assert set(told_of(cache, inputs)) == {"exact", "semantic"}
    with cache.disabled():
        own = [cache(**one).logits for one in inputs[255:271]]
    again = [cache(**one).logits for one in inputs[255:271]]
    rungs = told_of(cache, inputs[255:271])
    assert all(torch.equal(a, b) for a, b, rung in zip(own, again, rungs, strict=True) if rung == "exact")
    assert "exact" in rungs and cache.stats().errors == 0


@pytest.mark.parametrize("why", ["other weights", "drifted", "off"])
def test_nothing_is_compared_where_nothing_is_served_approximately(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    cache = calibrated(monkeypatch)
    reuse, made = cache.calibrated, cache.calibration
    assert reuse is not None and made is not None
    if why == "other weights":
        with torch.no_grad():
            cache.model.bert.embeddings.word_embeddings.weight.add_(0.25)
    elif why == "drifted":
        reuse.drifted(made)
    else:
        reuse._serve(replace(made, chosen=None, watch=None))
    told_of(cache, requests(300, seed=7)[0])
    audit = cache.stats().audit
    assert audit is not None and audit.status == why
    assert cache.stats().bypassed == {}


def test_what_went_by_in_batches_is_served_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache = wrapped(model, monkeypatch)
    ask(cache, range(PATIENCE))
    batch = padded([5, LENGTH])
    cache._components.cost.judge(12, PATIENCE, ())  # the batch's length
    cache._components.cost._buckets[4].is_bypassed = True
    own = cache(**batch).logits
    assert cache.last[0].bypassed == "not_worthwhile" and recorder(cache).n_rows == 2
    short = {name: value[:1, :5] for name, value in batch.items()}
    cache(**short)
    with torch.inference_mode():
        expected = plain(**short).logits
    assert cache.last[0].rung == "exact"
    assert torch.allclose(cache(**short).logits, expected, atol=1e-5) and torch.allclose(own[:1], expected, atol=1e-5)


def test_callers_may_write_to_what_they_passed_and_got(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache, ids = wrapped(model, monkeypatch), request(90)
    with torch.no_grad():
        for number in range(PATIENCE):
            model.bert(input_ids=request(number))
        model.bert(input_ids=ids).last_hidden_state.zero_()
        ids.fill_(7)
        got, want = (which(input_ids=request(90)).last_hidden_state[:, 0] for which in (model.bert, plain.bert))
    assert cache.last[0].rung == "exact" and torch.equal(got, want)


@pytest.mark.parametrize("restores", [False, True])
def test_what_other_weights_computed_is_not_served(monkeypatch: pytest.MonkeyPatch, restores: bool) -> None:
    model = build(CLASSIFIERS["bert"])
    cache = wrapped(model, monkeypatch)
    ask(cache, range(PATIENCE))
    weight = model.bert.encoder.layer[0].output.dense.weight
    before = weight.detach().clone()
    ask(cache, range(20, 22))  # noted
    with torch.no_grad():
        weight.add_(1.0)
        ask(cache, range(30, 32)) if restores else None
        if restores:
            weight.copy_(before)
    plain = copy.deepcopy(model)
    plain_cache = LLMCache.wrap(plain, auto_bypass=False)
    for number in (*range(20, 22), *range(30, 32)):
        got = cache(input_ids=request(number)).logits
        assert cache.last[0].rung == ("exact" if restores and number < 22 else None)
        assert torch.equal(got, plain_cache(input_ids=request(number)).logits)
    assert recorder(cache).n_rows <= 4


def test_a_call_that_goes_by_under_other_settings_is_not_served_once_they_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(CLASSIFIERS["bert"])
    plain = copy.deepcopy(model)
    cache = wrapped(model, monkeypatch)
    ask(cache, range(PATIENCE + 3))
    attention = model.bert.encoder.layer[1].attention.self
    before, attention.scaling = attention.scaling, 5.0
    ask(cache, range(30, 33))
    attention.scaling = before
    ask(cache, range(30, 33))
    with torch.inference_mode():
        for number in range(30, 33):
            want = plain(input_ids=request(number)).logits
            torch.testing.assert_close(cache(input_ids=request(number)).logits, want)


def test_purge_and_clear_forget_what_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(build(CLASSIFIERS["bert"]), monkeypatch)
    ask(cache, range(PATIENCE + 2))
    with cache.namespace("tenant"):
        ask(cache, range(PATIENCE + 2, PATIENCE + 5))
    assert recorder(cache).n_rows == 5
    cache.purge(namespace="tenant")
    assert recorder(cache).n_rows == 2
    with cache.namespace("tenant"):
        assert ask(cache, range(PATIENCE + 2, PATIENCE + 3)) == ["not_worthwhile"]
    cache.clear()
    assert (recorder(cache).n_rows, recorder(cache).nbytes) == (0, 0)
    assert ask(cache, range(3)) == [None] * 3


def test_a_namespace_is_not_served_what_another_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(build(CLASSIFIERS["bert"]), monkeypatch)
    ask(cache, range(PATIENCE + 2))
    with cache.namespace("tenant"):
        assert ask(cache, range(PATIENCE, PATIENCE + 2)) == ["not_worthwhile"] * 2
    assert ask(cache, range(PATIENCE, PATIENCE + 2)) == ["exact"] * 2


@pytest.mark.parametrize("budget", [{"max_entries": PATIENCE + 4}, {"max_bytes": 40_000}])
def test_notes_stay_within_what_banks_have_left(monkeypatch: pytest.MonkeyPatch, budget: dict[str, int]) -> None:
    cache = wrapped(build(CLASSIFIERS["bert"]), monkeypatch, payload="sequence", **budget)
    ask(cache, range(500))
    held = cache.stats().nbytes + recorder(cache).nbytes
    n_held = cache.stats().n_stored + recorder(cache).n_rows
    assert held <= budget.get("max_bytes", held)
    assert n_held <= budget.get("max_entries", n_held) + 16  # it looks at every sixteenth
    assert 0 < recorder(cache).n_rows < 492


def test_of_a_decoder_that_keeps_kv_only_hashes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(build(GENERATORS["gpt2"]), monkeypatch)
    ask(cache, range(PATIENCE + 5))
    assert recorder(cache).n_rows == 0


def test_where_noting_fails_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(build(CLASSIFIERS["bert"]), monkeypatch)
    ask(cache, range(PATIENCE))
    monkeypatch.setattr(BypassRecorder, "take", lambda *_: 1 / 0)
    assert ask(cache, range(20, 22)) == ["not_worthwhile"] * 2
    assert cache.stats().errors == 2
