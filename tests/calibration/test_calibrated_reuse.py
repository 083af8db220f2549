"""Calibrated reuse in a cache: what turns it on, what ends it, and what is refused."""

import copy
import types
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from llmcache import LLMCache
from llmcache.errors import BankFileError, CalibrationError, ConfigError, UnsafeReuseError
from llmcache.reuse.audit.renewal import RenewalBuffer
from llmcache.reuse.calibration import calibrated_reuse
from llmcache.reuse.calibration.observer import flaw
from llmcache.reuse.calibration.risk_target import Metric
from tests import inside
from tests.contract.streams import calibrated, classifier
from tests.tiny_models import TOKEN_HEADS, build, tokenizer
from tests.topics import N_CALIBRATED, Inputs, ask, batched, edited, requests, rungs_of

N = N_CALIBRATED
SAMPLE, LABELS = requests(N)
BATCHES = batched(SAMPLE)
LOOSE = {"max_drop": 0.05}
LEAST = 120  # requests, about, that can show that bound
LEARNING = {"learn": N, **LOOSE}


@pytest.fixture
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def cache(model: nn.Module) -> Iterator[LLMCache]:
    with LLMCache.wrap(model) as cache:
        yield cache


@pytest.fixture
def ready(model: nn.Module) -> Iterator[LLMCache]:
    """A cache that was calibrated on the first N requests."""
    with calibrated(model) as cache:
        yield cache


def fresh(n: int, seed: int = 7) -> list[Inputs]:
    """Other requests, several in a call."""
    return batched(requests(n, seed=seed)[0])


def check_serves_within(cache: LLMCache, most: float) -> None:
    """Check that new requests are served from others, and that at most a share `most` of answers changes."""
    answers, rungs = ask(cache, fresh(400))
    with cache.disabled():
        own, _ = ask(cache, fresh(400))
    assert rungs.count("semantic") > 100
    assert sum(a != b for a, b in zip(answers, own, strict=True)) / 400 <= most


def test_calibrating_turns_reuse_on_within_the_bound(cache: LLMCache) -> None:
    found = cache.calibrate(BATCHES, **LOOSE)
    assert found is cache.calibration
    assert found.is_certified
    assert found.chosen.bound <= 0.05 and found.chosen.hit_rate > 0.2
    assert found.n_sources + found.n_tested == N
    assert [setting.limit for setting in found.curve] == sorted(setting.limit for setting in found.curve)
    assert found.model_ms > 0 and found.lookup_ms > 0
    assert 1 / found.speedup == pytest.approx(1 - found.chosen.hit_rate + found.lookup_ms / found.model_ms)
    check_serves_within(cache, most=0.1)


def test_learning_by_the_way_turns_it_on_as_well(model: nn.Module) -> None:
    with LLMCache.wrap(model, **LEARNING) as cache:
        assert set(rungs_of(cache, BATCHES)) <= {None, "exact"}
        ask(cache, fresh(50, seed=5))  # repeats were not learned from, so a few more may be needed
        cache.drain()  # it learns in the background
        assert cache.calibration.chosen is not None
        check_serves_within(cache, most=0.1)
        assert cache.stats().errors == 0


def test_it_is_computed_on_one_thread_of_numpys_blas(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def n_threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    fitter = cache._core.learn().calibrated.fitter
    fit, seen = fitter.fit, []
    monkeypatch.setattr(fitter, "fit", lambda *args: (seen.append(n_threads()), fit(*args))[1])
    with threadpool_limits(limits=2, user_api="blas"):
        cache.calibrate(BATCHES, **LOOSE)
        assert seen == [{1}] and n_threads() == {2}


@pytest.mark.slow
def test_frozen_sources_stay_and_are_joined_by_no_other(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=N) as cache:
        found = cache.calibrate(BATCHES, **LOOSE)
        bank, shelf = inside.bank(cache), inside.sources(cache)
        n_stored, n_standing = len(bank), len(shelf)
        ask(cache, fresh(600, seed=9))
        assert 0.9 * found.n_sources < len(shelf) == n_standing <= found.n_sources
        assert n_stored < len(bank) <= N  # misses are still stored, for exact repeats


def test_growing_sources_are_joined_by_others_and_leave_room_for_more(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=N + 10) as cache:
        found = cache.calibrate(BATCHES, sources="growing", **LOOSE)
        assert not found.is_certified
        shelf = inside.sources(cache)
        n_standing = len(shelf)
        ask(cache, fresh(200))
        assert len(shelf) > n_standing
        assert (cache.stats().n_stored, cache.stats().n_too_large) == (N + 10, 0)


@pytest.mark.parametrize("sources", ["frozen", "growing"])
def test_after_loading_a_purge_of_its_sources_ends_it_too(model: nn.Module, sources: str, tmp_path: Path) -> None:
    """Also for growing sources, which are not pinned: only the index tells their namespace."""
    with LLMCache.wrap(model) as cache:
        with cache.namespace("tenant"):
            cache.calibrate(BATCHES, sources=sources, **LOOSE)
        ask(cache, fresh(1, seed=9))  # stored in a namespace without sources
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert "tenant" in cache.calibrated.namespaces
        assert any(inside.bank(cache).is_pinned(one.key) for one in inside.sources(cache)) == (sources == "frozen")
        cache.purge(namespace="third")
        assert cache.calibration is not None
        cache.purge(namespace="tenant")
        assert cache.calibration is None


def test_clearing_ends_it(ready: LLMCache) -> None:
    ready.clear()
    assert ready.calibration is None
    nothing_is_reused(ready)


@pytest.mark.parametrize("name", ["bert.encoder.layer.0.output.dense.weight", "classifier.bias"])
def test_other_weights_end_it_and_load_nothing(ready: LLMCache, model: nn.Module, name: str, tmp_path: Path) -> None:
    ready.save(tmp_path)
    assert "semantic" in rungs_of(ready, fresh(80))
    with edited(model.get_parameter(name)):
        assert "semantic" not in rungs_of(ready, fresh(80, seed=8))
        ready.unwrap()
        with pytest.raises(BankFileError, match="other weights"):
            LLMCache.load(model, tmp_path)


def test_accuracy_counts_right_answers_that_become_wrong(cache: LLMCache) -> None:
    changed = cache.calibrate(BATCHES, **LOOSE)
    accuracy = cache.calibrate(BATCHES, labels=LABELS, metric="accuracy", **LOOSE)
    assert accuracy.metric == "accuracy"
    assert accuracy.chosen.limit >= changed.chosen.limit  # fewer changes count as losses
    assert changed.watch.most_changed == 0.05 != accuracy.watch.most_changed  # permitted changes ring no alarm
    assert 0.01 < accuracy.watch.most_changed <= 0.5
    names = [f"LABEL_{label}" for label in LABELS]  # names from the model's config
    assert cache.calibrate(BATCHES, labels=names, metric="accuracy", **LOOSE).curve == accuracy.curve


def test_a_metric_of_ones_own_is_bounded(cache: LLMCache) -> None:
    metric = Metric(lambda output, label: float(torch.tensor(output).softmax(0)[label]), name="confidence")
    found = cache.calibrate(BATCHES, labels=LABELS, metric=metric, max_drop=0.1)
    assert found.metric == "confidence"
    assert found.chosen.bound <= 0.1


# -- refusals ----------------------------------------------------------------------------------------------------------


def nothing_is_reused(cache: LLMCache) -> None:
    assert cache.calibration is None or cache.calibration.chosen is None
    assert "semantic" not in rungs_of(cache, fresh(60))


NO_REQUESTS: list[tuple[Any, str]] = [
    *[(wrong, "give a list of tokenised inputs or of texts") for wrong in (None, 5, "text", {"input_ids": 1})],
    ([1, 2], "request 0 is a int"),
    ([{"x": torch.ones(1)}], "request 0 has no input_ids"),
    (["a text"] * N, "texts need the tokenizer"),
    ([], "0 requests"),
]
WRONG_LABELS: list[tuple[dict[str, Any], str]] = [
    ({"metric": "accuracy"}, "needs a label"),
    ({"metric": "accuracy", "labels": [0] * 3}, f"3 labels for {N} requests"),
    ({"metric": "accuracy", "labels": [77] * N}, "does not know: 77"),
    ({"metric": "accuracy", "labels": ["nonsense"] * N}, "does not know: 'nonsense'"),
    ({"metric": "accuracy", "labels": [0] * 9 + [None] * (N - 9)}, f"{N - 9} of {N} have none"),
    ({"metric": "accuracy", "labels": [0] * 9 + [-1] * (N - 9)}, r"does not know: -1 \(the first is that of row 9"),
    ({"metric": Metric(lambda output, label: 1 / 0), "labels": [0] * N}, "request 0, label 0: it failed"),
    ({"metric": Metric(lambda output, label: 2.0), "labels": [0] * N}, "request 0, label 0: it gave 2.0, out of 0"),
]
#: In place of request 3.
WRONG_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.full((1, 500), 12)}, "request 3 has 500 tokens, and model or tokenizer take 64"),
    ({"input_ids": torch.full((1, 5), 10**6)}, "request 3: token id 1000000 is not in the model's vocabulary"),
    ({"input_ids": torch.full((1, 5), -4)}, "request 3: token id -4 is not in"),
    ({"input_ids": torch.full((5,), 12)}, r"request 3: input_ids must be .* \(got shape \(5,\)\)"),
    ({"input_ids": torch.full((1, 0), 12)}, r"request 3: input_ids must be .* \(got shape \(1, 0\)\)"),
    ({"inputs_embeds": torch.ones(1, 5, 32)}, "request 3 has no input_ids"),
    ({"input_ids": None, "inputs_embeds": torch.ones(1, 5, 32)}, "request 3 has no input_ids"),
    ({"input_ids": [[12, 13]]}, r"request 3: input_ids must be .* \(got a list\)"),
]


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        *((wrong, {}, message) for wrong, message in NO_REQUESTS),
        *((SAMPLE, more, message) for more, message in WRONG_LABELS),
        *(([*SAMPLE[:3], wrong, *SAMPLE[4:]], {}, message) for wrong, message in WRONG_REQUESTS),
    ],
)
def test_what_cannot_be_learned_from_is_refused_at_once(
    cache: LLMCache, given: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        cache.calibrate(given, **{"max_drop": 0.4, **more})
    assert cache.stats().n_requests <= 1  # a metric is tried on one request
    nothing_is_reused(cache)
    assert set(rungs_of(cache, fresh(60))) == {"exact"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"token_type_ids": torch.full((1, 2), 12)}, "request 3 could not be computed"),
        ({"attention_mask": torch.zeros(1, 8, dtype=torch.long)}, "request 3: 0 of its 1 rows"),
    ],
)
def test_a_request_that_fails_in_the_model_or_goes_by_the_cache_is_named(
    cache: LLMCache, more: Inputs, message: str
) -> None:
    with pytest.raises(CalibrationError, match=message):
        cache.calibrate([*SAMPLE[:3], SAMPLE[3] | more, *SAMPLE[4:]], **LOOSE)
    nothing_is_reused(cache)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", r"request 1 is a blank text \(' \\n'\)"),
        ("w1 " * 90, "request 1 has 92 tokens, and model or tokenizer take 32"),
    ],
)
def test_texts_are_neither_blank_nor_cut(model: nn.Module, text: str, message: str) -> None:
    with LLMCache.wrap(model, tokenizer=tokenizer()) as cache:
        with pytest.raises(CalibrationError, match=message):
            cache.calibrate(["w1 w2", text] * N, **LOOSE)
        nothing_is_reused(cache)


@pytest.mark.slow
def test_a_bound_that_nothing_keeps_turns_nothing_on(model: nn.Module) -> None:
    """Random answers: nearly all hits would be wrong, so nearly nothing is served, even with a large `max_drop`."""
    with LLMCache.wrap(model, answer_of=lambda output: torch.randn(len(output.logits), 5)) as cache:
        assert cache.calibrate(batched(requests(700)[0]), max_drop=0.01).chosen is None
        nothing_is_reused(cache)
        assert all(setting.limit <= 0.5 for setting in cache.calibrate(BATCHES, max_drop=0.9).curve)
        assert rungs_of(cache, fresh(60, seed=8)).count("semantic") <= 6


@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_heads_that_answer_by_token_are_refused(head: str) -> None:
    model, message = build(TOKEN_HEADS[head]), r"would return .*do without calibrate\(\) and learn"
    with LLMCache.wrap(model) as cache, pytest.raises(UnsafeReuseError, match=message) as refusal:
        cache.calibrate(BATCHES, **LOOSE)
    assert "tau" not in str(refusal.value)  # it was not given
    with pytest.raises(UnsafeReuseError, match=message):
        LLMCache.wrap(model, learn=N)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0.9, "learn": 100}, "tau"),
        ({"tau": 0.9, "fingerprint": "learned"}, "learned"),
        ({"learn": 100}, r"learn=100: 100 requests cannot show .* at least 1196"),
        ({"learn": 2000, "max_entries": 500}, "max_entries=500"),
        (LEARNING | {"gate": True}, "tokenizer"),
        (LEARNING | {"fingerprint": "mean"}, "fingerprint without tau"),
        (LEARNING | {"index": "hnsw"}, "index without tau"),
        (LEARNING | {"compression": "fp16"}, "compression"),
        (LEARNING | {"policy": {"name": "ttl", "ttl_s": 9}}, "ttl"),
        (LEARNING | {"policy": "divergence"}, "divergence"),
        (LEARNING | {"exact": False}, "exact"),
    ],
)
def test_settings_under_which_no_bound_holds_are_refused(
    model: nn.Module, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMCache.wrap(model, **settings)
    assert "forward" not in model.__dict__


def with_marks(inputs: list[dict[str, torch.Tensor]], *numbers: int) -> list[dict[str, torch.Tensor]]:
    """Copy requests, and put token 9 into some."""
    marked = [dict(one, input_ids=one["input_ids"].clone()) for one in inputs]
    for number in numbers:
        marked[number]["input_ids"][0, 3] = 9
    return marked


@pytest.mark.parametrize(("name", "value"), [("target", float("nan")), ("output", float("inf")), ("output", -3e38)])
def test_what_is_no_number_is_found(name: str, value: float) -> None:
    fields = {"target": np.ones(3, np.float32), "output": np.ones(2, np.float32)}
    assert flaw(types.SimpleNamespace(**fields)) == ""  # type: ignore[arg-type]
    fields[name][1] = value
    assert "not finite, or too large" in flaw(types.SimpleNamespace(**fields))  # type: ignore[arg-type]
    fresh = RenewalBuffer(1)
    fresh.add(types.SimpleNamespace(**fields))  # type: ignore[arg-type]
    assert fresh.cases == []  # nor is a calibration renewed with it


@pytest.mark.slow
def test_states_that_are_no_numbers_are_not_learned_from(model: nn.Module) -> None:
    broken, inputs = copy.deepcopy(model), with_marks(requests(N + 2)[0], 5, 200)
    with torch.no_grad():
        broken.bert.embeddings.word_embeddings.weight[9] = float("nan")
    with LLMCache.wrap(broken, **LEARNING) as cache:
        ask(cache, batched(inputs[:-1]))
        assert (cache.calibration, cache.stats().errors) == (None, 2)
        ask(cache, inputs[-1:])
        cache.drain()
        assert cache.calibration.chosen is not None
        asked = requests(20, seed=7)[0]
        assert "semantic" in rungs_of(cache, asked)
        logits = [cache(**one).logits for one in with_marks(asked, *range(20))]  # never served by another's answer
        assert torch.stack(logits).isnan().all()
        assert (cache.stats().errors, cache.stats().health.is_failing) == (2, False)
        with pytest.raises(CalibrationError, match="request 5: the model's states are not finite"):
            cache.calibrate(inputs, **LOOSE)


def test_a_calibration_survives_saving_and_loading(ready: LLMCache, model: nn.Module, tmp_path: Path) -> None:
    found = ready.calibration
    ready.save(tmp_path)
    before = ask(ready, fresh(200))
    ready.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert loaded.calibration == found
        assert ask(loaded, fresh(200)) == before
        assert len(inside.sources(loaded)) <= found.n_sources


def test_the_gate_keeps_apart_what_the_vote_would_serve(model: nn.Module) -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {f"word{i}" if i != 20 else "not": i for i in range(96)}

        all_special_ids = (0, 1, 2)

    asked = requests(300, seed=7)[0]
    with_not = batched([one for one in asked if (one["input_ids"] == 20).any()])
    with calibrated(model) as cache:
        n_voted = rungs_of(cache, with_not).count("semantic")
    with LLMCache.wrap(model, tokenizer=Words(), gate=True) as cache:
        cache.calibrate(BATCHES, **LOOSE)
        assert rungs_of(cache, with_not).count("semantic") < n_voted


# -- what could break the bound ----------------------------------------------------------------------------------------


def test_requests_answered_by_two_heads_are_refused(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=LEAST, **LOOSE) as cache:
        ask(cache, batched(SAMPLE[: LEAST - 10]))
        with edited(model.classifier.bias):
            ask(cache, fresh(10, seed=5))
            cache.drain()
            assert cache.calibration is None and cache.stats().errors == 1


def test_what_was_purged_is_not_learned_from(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=LEAST, **LOOSE) as cache:
        with cache.namespace("tenant"):
            ask(cache, batched(SAMPLE[: LEAST - 10]))
        cache.purge(namespace="tenant")
        ask(cache, fresh(LEAST // 2, seed=2))
        assert cache.calibration is None
        assert {case.scope.namespace for case in cache.calibrated._observed} == {"default"}


@pytest.mark.slow
@pytest.mark.parametrize("call", [lambda cache, one: cache(**one), lambda cache, one: cache.observe([one])])
def test_requests_that_call_the_model_while_they_are_made_are_counted_once(cache: LLMCache, call: Any) -> None:
    def made() -> Iterator[Inputs]:
        for one in SAMPLE[:LEAST]:
            call(cache, one)
            yield one

    found = cache.calibrate(made(), **LOOSE)
    assert found.n_sources + found.n_tested == LEAST


def test_sources_that_do_not_fit_are_told(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=100) as cache:
        with pytest.raises(CalibrationError, match="raise max_entries"):
            cache.calibrate(BATCHES, **LOOSE)
        nothing_is_reused(cache)


def test_accuracy_is_one_of_classes(model: nn.Module) -> None:
    with LLMCache.wrap(model, answer="labels") as cache, pytest.raises(CalibrationError, match="compares classes"):
        cache.calibrate(BATCHES, labels=LABELS, metric="accuracy", **LOOSE)


WRONG_CLAIMS: dict[str, list[Any]] = {
    "max_drop": [0.0, 1.5, float("nan"), "0.05"],
    "delta": [0.0, 1.0],
    "metric": ["f1", print],
    "sources": ["frozn"],
    "seed": [-1],
}


def test_a_wrong_claim_is_refused_and_leaves_the_one_before(ready: LLMCache) -> None:
    found = ready.calibration
    for name, value in ((name, value) for name, values in WRONG_CLAIMS.items() for value in values):
        with pytest.raises(ConfigError, match=name):
            ready.calibrate(SAMPLE, **LOOSE | {name: value})
        assert ready.calibration is found


def test_what_was_computed_before_a_purge_is_not_learned_from() -> None:
    """A purge while requests are computed to be learned from: it finds no entries, but excludes them."""
    n_calls = 0

    def answer_of(output: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == len(BATCHES) - 1:
            cache.purge(namespace="default")
        return output.logits

    cache = LLMCache.wrap(classifier(), answer_of=answer_of)
    with pytest.raises(CalibrationError, match=r"^\d+ requests cannot show"):
        cache.calibrate(BATCHES, **LOOSE)
    assert cache.calibration is None and cache.stats().n_stored == 0
    assert cache.calibrate(BATCHES, **LOOSE).is_certified


def test_a_purge_while_it_is_learned_leaves_nothing_to_serve(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge between the last request and the calibration leaves nothing to learn from."""
    with LLMCache.wrap(model, learn=LEAST, max_drop=0.1) as cache:
        honest = calibrated_reuse.compute_alone
        monkeypatch.setattr(calibrated_reuse, "compute_alone", lambda: (honest(), cache.purge(namespace="default")))
        ask(cache, batched(SAMPLE[:LEAST], 20))
        cache.drain()
        assert cache.calibration is None and cache.stats().n_stored == 0


def test_a_forgotten_source_goes_on_voting() -> None:
    """Forgetting a source, computing it again and forgetting it once more changes no other request's risk."""
    asked = requests(20, seed=7)[0]

    def risks(cache: LLMCache) -> list[float | None]:
        return [(cache(**one), cache.last[0].risk)[1] for one in asked]

    with calibrated(audit=0) as cache:
        sources = inside.sources(cache)
        source = next(one for one in SAMPLE if rungs_of(cache, [one]) == ["exact"])
        n_before, before = len(sources), risks(cache)
        for _ in range(2):
            cache.forget(**source)
            cache(**source)
        assert len(sources) == n_before
        again = [(one, other) for one, other in zip(before, risks(cache), strict=True) if None not in (one, other)]
        assert again and all(other in (one, inf) for one, other in again)  # infinite if it would have served


def test_a_request_that_comes_twice_in_a_batch_is_one_source(cache: LLMCache) -> None:
    """A calibration on repeats has one source per different request."""
    order = np.random.default_rng(0).permutation([*range(200), *range(50)])
    ask(cache, batched(SAMPLE[:100], 20))
    made = cache.calibrate(batched([SAMPLE[number] for number in order]), max_drop=0.1)
    assert made.n_sources == len(inside.sources(cache)) <= 200
