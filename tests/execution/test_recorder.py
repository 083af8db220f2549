"""Bypassed calls are recorded, and served when they come again: as stored, and never what another model computed."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import LLMCache
from llmcache.execution.cost import _SOONER, CostModel
from llmcache.execution.recorder import BypassRecorder
from tests import inside
from tests.execution.calls import Make, agree, ask, plain, request, run, rungs
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded
from tests.topics import calibrated, requests

PATIENCE = 8
COSTS = "llmcache.execution.length_costs.LengthCosts."
Soon = Callable[..., LLMCache]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Soon:
    """Makes caches that bypass themselves soon, whatever calls take on a machine at work."""
    for name, value in (("worthwhile_from", 0.5), ("is_cheap", False), ("saved_s", 1.0)):
        monkeypatch.setattr(COSTS + name, value)
    monkeypatch.setattr(COSTS + "serves", lambda self, share: share > 0.3)
    monkeypatch.setattr(COSTS + "count_bypassed", lambda self: setattr(self, "recordable", 2.0))

    def make(family: Make = CLASSIFIERS["bert"], **settings: Any) -> LLMCache:
        cache = LLMCache.wrap(build(family), **settings)
        cost = CostModel(4, _SOONER * PATIENCE)
        cost._fewest_times = 1
        inside.replace(cache, cost=cost)
        return cache

    return make


def n_noted(cache: LLMCache) -> int:
    return inside.recorder(cache).n_rows


@pytest.mark.parametrize("payload", ["auto", "sequence"])
def test_a_second_pass_is_served_although_the_first_went_by(soon: Soon, payload: str) -> None:
    cache, alone = soon(payload=payload), build(CLASSIFIERS["bert"])
    assert ask(cache, range(60)) == [None] * PATIENCE + ["not_worthwhile"] * 52
    assert (cache.stats().n_stored, n_noted(cache)) == (PATIENCE, 52)
    assert ask(cache, range(60)) == ["exact"] * 60
    assert (cache.stats().n_stored, n_noted(cache), inside.recorder(cache).nbytes) == (60, 0, 0)
    for number in (3, 20, 59):
        assert torch.equal(cache(input_ids=request(number)).logits, run(alone, input_ids=request(number)))


@pytest.mark.slow
def test_what_went_by_to_be_compared_is_served_when_it_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(COSTS + "is_cheap", True)  # never bypassed for what they cost
    inputs = requests(280, seed=7, noise=0.3)[0]

    def told(cache: LLMCache) -> list[str | None]:
        return [(cache(**one), cache.last[0].rung or cache.last[0].bypassed)[1] for one in inputs]

    with calibrated(audit=0, auto_bypass=True) as cache:
        assert [i for i, what in enumerate(told(cache)) if what == "compared"] == list(range(255, 271))
        assert cache.stats().bypassed == {"compared": 16} and "bypassed" not in caplog.text
        assert set(told(cache)) == {"exact", "semantic"}
        n_exact = 0
        for one in inputs[255:271]:
            found = cache(**one).logits
            if rungs(cache) == ["exact"]:
                assert torch.equal(found, plain(cache, **one))
                n_exact += 1
        assert n_exact > 0 and cache.stats().errors == 0


@pytest.mark.slow
@pytest.mark.parametrize("why", ["other weights", "drifted", "off"])
def test_nothing_is_compared_where_nothing_is_served_approximately(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(COSTS + "is_cheap", True)
    with calibrated(audit=0, auto_bypass=True) as cache:
        reuse, made = cache.calibrated, cache.calibration
        assert reuse is not None and made is not None
        if why == "other weights":
            with torch.no_grad():
                cache.model.bert.embeddings.word_embeddings.weight.add_(0.25)
        elif why == "drifted":
            reuse.drifted(made)
        else:
            reuse._serve(replace(made, chosen=None, watch=None))
        for one in requests(280, seed=7)[0]:
            cache(**one)
        audit = cache.stats().audit
        assert audit is not None and audit.status == why
        assert cache.stats().bypassed == {}


def test_what_went_by_in_batches_is_served_row_by_row(soon: Soon) -> None:
    cache, alone = soon(), build(CLASSIFIERS["bert"])
    ask(cache, range(PATIENCE))
    cache(**padded([3]))  # what calls with a mask put out is seen once
    batch = padded([5, 6])
    inside.components(cache).cost.judge(12, PATIENCE, ())  # the batch's length
    inside.components(cache).cost._buckets[4].is_bypassed = True
    agree(cache, alone, **batch)
    assert cache.last[0].bypassed == "not_worthwhile" and n_noted(cache) == 2
    for _ in range(2):
        agree(cache, alone, **{name: value[:1, :5] for name, value in batch.items()})
        assert rungs(cache) == ["exact"]


def test_callers_may_write_to_what_they_passed_and_got(soon: Soon) -> None:
    cache, ids = soon(), request(90)
    model = cache.model.bert
    with torch.no_grad():
        for number in range(PATIENCE):
            model(input_ids=request(number))
        model(input_ids=ids).last_hidden_state.zero_()
        ids.fill_(7)
        got = model(input_ids=request(90)).last_hidden_state
    assert rungs(cache) == ["exact"]
    assert torch.equal(got[:, 0], run(build(CLASSIFIERS["bert"]).bert, input_ids=request(90))[:, 0])


@pytest.mark.parametrize("restores", [False, True])
def test_what_other_weights_computed_is_not_served(soon: Soon, restores: bool) -> None:
    cache = soon()
    ask(cache, range(PATIENCE))
    weight = cache.model.bert.encoder.layer[0].output.dense.weight
    before = weight.detach().clone()
    ask(cache, range(20, 22))  # noted
    with torch.no_grad():
        weight.add_(1.0)
        if restores:
            ask(cache, range(30, 32))
            weight.copy_(before)
    alone = copy.deepcopy(cache.model)
    for number in (20, 21, 30, 31):
        agree(cache, alone, input_ids=request(number))
        assert rungs(cache) == ["exact" if restores and number < 22 else None]
    assert n_noted(cache) <= 4


def test_a_call_that_goes_by_under_other_settings_is_not_served_once_they_are_back(soon: Soon) -> None:
    cache, alone = soon(), build(CLASSIFIERS["bert"])
    ask(cache, range(PATIENCE + 3))
    attention = cache.model.bert.encoder.layer[1].attention.self
    before, attention.scaling = attention.scaling, 5.0
    ask(cache, range(30, 33))
    attention.scaling = before
    ask(cache, range(30, 33))
    for number in range(30, 33):
        agree(cache, alone, input_ids=request(number))


def test_namespaces_are_noted_apart_and_purge_and_clear_forget(soon: Soon) -> None:
    cache = soon()
    ask(cache, range(PATIENCE + 2))
    with cache.namespace("tenant"):
        assert ask(cache, range(PATIENCE, PATIENCE + 3)) == ["not_worthwhile"] * 3
    assert n_noted(cache) == 5
    cache.purge(namespace="tenant")
    assert n_noted(cache) == 2
    with cache.namespace("tenant"):
        assert ask(cache, [PATIENCE]) == ["not_worthwhile"]
    assert ask(cache, range(PATIENCE, PATIENCE + 2)) == ["exact"] * 2
    cache.clear()
    assert (n_noted(cache), inside.recorder(cache).nbytes) == (0, 0)
    assert ask(cache, range(3)) == [None] * 3


def test_a_call_under_way_during_a_purge_is_not_noted(soon: Soon, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = soon()
    ask(cache, range(PATIENCE))
    take = BypassRecorder.take

    def late(self: BypassRecorder, *args: Any) -> None:
        cache.purge(namespace="default")
        take(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(BypassRecorder, "take", late)
        assert ask(cache, [PATIENCE]) == ["not_worthwhile"]
    assert n_noted(cache) == 0
    assert ask(cache, [PATIENCE, PATIENCE]) == ["not_worthwhile", "exact"]  # of now


def test_what_another_process_purged_is_not_served_from_notes(soon: Soon, tmp_path: Path) -> None:
    store: dict[str, Any] = {"store": {"name": "disk", "folder": str(tmp_path)}, "store_least_tokens": 0}
    cache, other = soon(**store), soon(**store)
    ask(cache, range(PATIENCE + 1))
    assert n_noted(cache) == 1
    other.purge(namespace="default")
    assert ask(cache, [PATIENCE]) == [None]
    assert n_noted(cache) == 0
    for one in (cache, other):
        one.unwrap()


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"max_entries": PATIENCE + 4}, {"max_bytes": 40_000}])
def test_notes_stay_within_what_banks_have_left(soon: Soon, budget: dict[str, int]) -> None:
    cache = soon(payload="sequence", **budget)
    ask(cache, range(150))
    held = cache.stats().nbytes + inside.recorder(cache).nbytes
    n_held = cache.stats().n_stored + n_noted(cache)
    assert held <= budget.get("max_bytes", held)
    assert n_held <= budget.get("max_entries", n_held) + 16  # it looks at every sixteenth
    assert 0 < n_noted(cache) < 150 - PATIENCE


def test_of_a_decoder_that_keeps_kv_only_hashes_are_known(soon: Soon) -> None:
    cache = soon(GENERATORS["gpt2"])
    ask(cache, range(PATIENCE + 5))
    assert n_noted(cache) == 0


def test_where_noting_fails_calls_go_on(soon: Soon, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = soon()
    ask(cache, range(PATIENCE))
    monkeypatch.setattr(BypassRecorder, "take", lambda *_: 1 / 0)
    assert ask(cache, range(20, 22)) == ["not_worthwhile"] * 2
    assert cache.stats().errors == 2
