"""Calibrated reuse in a cache: what is turned on, what it rests on, and what turns nothing on."""

import copy
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llmcache import LLMCache
from llmcache.audit.renewal import RenewalBuffer
from llmcache.calibration.inputs import longest_input, tokenised
from llmcache.calibration.observer import flaw
from llmcache.calibration.risk_target import Metric
from llmcache.errors import BankFileError, CalibrationError, ConfigError, UnsafeReuseError, WrapError
from llmcache.models.adapters import locate
from tests import inside
from tests.tiny_models import CLASSIFIERS, TOKEN_HEADS, build, tokenizer
from tests.topics import N_CALIBRATED, batched, calibrated, classifier, requests

N = N_CALIBRATED
LOOSE = {"max_drop": 0.05}


@pytest.fixture
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def cache(model: nn.Module) -> Iterator[LLMCache]:
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        yield cache


@pytest.fixture
def ready(model: nn.Module) -> Iterator[LLMCache]:
    """A cache that was calibrated on the first N requests."""
    with calibrated(model) as cache:
        yield cache


def ask(cache: LLMCache, inputs: list[dict[str, torch.Tensor]]) -> tuple[list[int], list[str | None]]:
    """Answers, and which rung gave each."""
    answers, rungs = [], []
    for one in inputs:
        answers.append(int(cache(**one).logits.argmax()))
        rungs.append(cache.last[0].rung)
    return answers, rungs


def alone(cache: LLMCache, inputs: list[dict[str, torch.Tensor]]) -> list[int]:
    with cache.disabled():
        return [int(answer) for one in batched(inputs) for answer in cache(**one).logits.argmax(dim=-1)]


def check_serves_within(cache: LLMCache, most: float) -> None:
    """New requests are served from others, and few are answered otherwise."""
    fresh = requests(400, seed=7)[0]
    answers, rungs = ask(cache, fresh)
    own = alone(cache, fresh)
    assert rungs.count("semantic") > 100
    assert sum(a != b for a, b in zip(answers, own, strict=True)) / len(fresh) <= most


@pytest.mark.slow
def test_calibrating_turns_reuse_on_within_the_bound(cache: LLMCache) -> None:
    found = cache.calibrate(batched(requests(N)[0]), **LOOSE)
    assert found is cache.calibration
    assert found.chosen is not None and found.is_certified
    assert found.chosen.bound <= 0.05 and found.chosen.hit_rate > 0.2
    assert found.n_sources + found.n_tested == N
    assert [setting.limit for setting in found.curve] == sorted(setting.limit for setting in found.curve)
    assert found.model_ms > 0 and found.lookup_ms > 0 and found.speedup is not None
    assert 1 / found.speedup == pytest.approx(1 - found.chosen.hit_rate + found.lookup_ms / found.model_ms)
    check_serves_within(cache, most=0.1)


@pytest.mark.slow
def test_learning_by_the_way_turns_it_on_as_well(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=N, **LOOSE) as cache:
        first = requests(N + 1)[0]
        _, rungs = ask(cache, first[:-1])
        assert set(rungs) <= {None, "exact"}
        ask(cache, requests(50, seed=5)[0])  # repeats were not learned from, so a few more may be needed
        assert cache.calibration is not None and cache.calibration.chosen is not None
        check_serves_within(cache, most=0.1)
        assert cache.stats().errors == 0


@pytest.mark.slow
def test_frozen_sources_are_joined_by_no_other(ready: LLMCache) -> None:
    banks, shelf = inside.banks(ready), inside.partition(ready)
    held = len(shelf)
    ask(ready, requests(200, seed=8)[0])
    assert len(shelf) == held <= ready.calibration.n_sources
    assert len(banks) > held  # misses are stored all the same, for exact repeats


@pytest.mark.slow
def test_growing_sources_are(cache: LLMCache) -> None:
    found = cache.calibrate(batched(requests(N)[0]), sources="growing", **LOOSE)
    assert not found.is_certified
    shelf = inside.partition(cache)
    held = len(shelf)
    ask(cache, requests(200, seed=8)[0])
    assert len(shelf) > held


@pytest.mark.slow
def test_frozen_sources_stay_whatever_comes(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=N, auto_bypass=False) as cache:
        found = cache.calibrate(batched(requests(N)[0]), **LOOSE)
        ask(cache, requests(600, seed=9)[0])
        shelf = inside.partition(cache)
        assert len(shelf) > 0.9 * found.n_sources
        assert len(inside.banks(cache)) <= N


@pytest.mark.slow
def test_a_purge_of_a_namespace_that_growing_sources_are_of_ends_a_loaded_calibration(
    model: nn.Module, tmp_path: Path
) -> None:
    """None of them is kept from leaving, so where they are found tells whose they are."""
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        with cache.namespace("tenant"):
            cache.calibrate(batched(requests(N)[0]), sources="growing", **LOOSE)
        cache(**requests(1, seed=9)[0][0])  # stored in another namespace, where nobody serves
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        calibrated = cache.calibrated
        assert calibrated is not None and calibrated.serves_in("tenant")
        assert not any(record.is_pinned for record in inside.records(cache))
        cache.purge(namespace="third")
        assert cache.calibration is not None
        cache.purge(namespace="tenant")
        assert cache.calibration is None


@pytest.mark.slow
def test_calibrating_again_replaces_what_was_found(ready: LLMCache) -> None:
    first = ready.calibration
    again = ready.calibrate(batched(requests(N, seed=3)[0]), max_drop=0.1, seed=1)
    assert again is ready.calibration is not first
    assert again.max_drop == 0.1
    check_serves_within(ready, most=0.15)


@pytest.mark.slow
def test_the_same_seed_finds_the_same(ready: LLMCache) -> None:
    before = ready.calibration
    assert before is not None and before.curve == ready.calibrate(batched(requests(N)[0]), **LOOSE).curve


@pytest.mark.slow
def test_a_tightened_caller_gets_fewer_hits_and_never_more(ready: LLMCache) -> None:
    found = ready.calibration
    assert found is not None and found.chosen is not None
    fresh = requests(300, seed=7)[0]
    with ready.tightened(0.0):
        none = ask(ready, fresh[:150])[1].count("semantic")
    with ready.tightened(1.0):
        loosened = [ready.calibrated.allowed(scope) for scope in [_scope(ready)]]
    assert none == 0
    assert list(loosened[0].values()) == [found.chosen.limit]
    assert ask(ready, fresh[150:])[1].count("semantic") > 30


def _scope(cache: LLMCache) -> Any:
    return next(iter(inside.banks(cache)._requests.values())).scope


def test_other_weights_end_it(ready: LLMCache, model: nn.Module) -> None:
    weight = model.bert.encoder.layer[0].output.dense.weight
    with torch.no_grad():
        weight.add_(0.01)
    try:
        assert "semantic" not in ask(ready, requests(60, seed=7)[0])[1]
    finally:
        with torch.no_grad():
            weight.sub_(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"decide": "consensus"}, {"decide": "threshold"}, {"fingerprint": "mean"}])
def test_other_decisions_and_fingerprints_are_calibrated_alike(model: nn.Module, settings: dict[str, str]) -> None:
    with LLMCache.wrap(model, **settings) as cache:
        found = cache.calibrate(batched(requests(N)[0]), max_drop=0.2)
        assert found.chosen is not None
        own, (answers, rungs) = alone(cache, fresh := requests(200, seed=7)[0]), ask(cache, fresh)
        assert "semantic" in rungs
        assert sum(a != b for a, b in zip(answers, own, strict=True)) <= 60


@pytest.mark.slow
def test_accuracy_counts_right_answers_that_become_wrong(cache: LLMCache) -> None:
    inputs, labels = requests(N)
    changed = cache.calibrate(batched(inputs), **LOOSE)
    accuracy = cache.calibrate(batched(inputs), labels=labels, metric="accuracy", **LOOSE)
    assert accuracy.metric == "accuracy" and accuracy.chosen is not None and changed.chosen is not None
    assert accuracy.chosen.limit >= changed.chosen.limit  # less is counted


@pytest.mark.slow
def test_names_of_labels_are_those_of_the_models_config(cache: LLMCache) -> None:
    inputs, labels = requests(N)
    named = cache.calibrate(batched(inputs), labels=[f"LABEL_{label}" for label in labels], metric="accuracy", **LOOSE)
    assert named.curve == cache.calibrate(batched(inputs), labels=labels, metric="accuracy", **LOOSE).curve


@pytest.mark.slow
def test_a_metric_of_ones_own_is_bounded(cache: LLMCache) -> None:
    inputs, labels = requests(1200)
    metric = Metric(lambda output, label: float(torch.tensor(output).softmax(0)[label]), name="confidence")
    found = cache.calibrate(batched(inputs), labels=labels, metric=metric, max_drop=0.1)
    assert found.metric == "confidence"
    assert found.chosen is not None and found.chosen.bound <= 0.1


# -- what turns nothing on ---------------------------------------------------------------------------------------------


def nothing_is_reused(cache: LLMCache) -> None:
    assert cache.calibration is None or cache.calibration.chosen is None
    assert "semantic" not in ask(cache, requests(60, seed=7)[0])[1]


def test_too_few_requests_are_refused_with_the_number_needed(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="at least 1196 are needed"):
        cache.calibrate(requests(300)[0])
    nothing_is_reused(cache)


@pytest.mark.slow
def test_requests_that_are_all_the_same_are_refused(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="different requests"):
        cache.calibrate(requests(1)[0] * N, **LOOSE)
    nothing_is_reused(cache)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"metric": "accuracy"}, "needs a label"),
        ({"metric": "accuracy", "labels": [0] * 3}, f"3 labels for {N} requests"),
        ({"metric": "accuracy", "labels": [77] * N}, "does not know: 77"),
        ({"metric": "accuracy", "labels": ["nonsense"] * N}, "does not know: 'nonsense'"),
        ({"metric": "accuracy", "labels": [0] * 9 + [None] * (N - 9)}, f"{N - 9} of {N} have none"),
        ({"metric": "accuracy", "labels": [0] * 9 + [-1] * (N - 9)}, r"does not know: -1 \(the first is that of row 9"),
        ({"metric": Metric(lambda output, label: 1 / 0), "labels": [0] * N}, "request 0, label 0: it failed"),
        ({"metric": Metric(lambda output, label: 2.0), "labels": [0] * N}, "request 0, label 0: it gave 2.0, out of 0"),
    ],
)
def test_wrong_labels_and_metrics_are_refused_at_once(cache: LLMCache, more: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        cache.calibrate(requests(N)[0], max_drop=0.4, **more)
    assert cache.stats().n_requests <= 1
    nothing_is_reused(cache)


@pytest.mark.slow
def test_a_metric_that_fails_later_names_the_request(cache: LLMCache) -> None:
    def score(output: Any, label: int) -> float:
        if label == 1 and len(scored) > 40:
            raise ValueError("no")
        scored.append(label)
        return 1.0

    scored: list[int] = []
    labels = [number % 2 for number in range(N)]
    with pytest.raises(CalibrationError, match=r"request \d*[13579], label 1: it failed: ValueError"):
        cache.calibrate(requests(N)[0], labels=labels, metric=Metric(score), max_drop=0.4)
    nothing_is_reused(cache)


@pytest.mark.slow
def test_a_failed_calibration_ends_the_one_before(ready: LLMCache) -> None:
    with pytest.raises(CalibrationError):
        ready.calibrate(requests(30)[0], **LOOSE)
    nothing_is_reused(ready)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_ids": torch.full((1, 500), 12)}, "request 3 has 500 tokens, and model or tokenizer take 64"),
        ({"input_ids": torch.full((1, 5), 10**6)}, "request 3: token id 1000000 is not in the model's vocabulary"),
        ({"input_ids": torch.full((1, 5), -4)}, "request 3: token id -4 is not in"),
        ({"input_ids": torch.full((5,), 12)}, r"request 3: input_ids must be .* \(got shape \(5,\)\)"),
        ({"input_ids": torch.full((1, 0), 12)}, r"request 3: input_ids must be .* \(got shape \(1, 0\)\)"),
        ({"inputs_embeds": torch.ones(1, 5, 32)}, "request 3 has no input_ids"),
        ({"input_ids": None, "inputs_embeds": torch.ones(1, 5, 32)}, "request 3 has no input_ids"),
        ({"input_ids": [[12, 13]]}, r"request 3: input_ids must be .* \(got a list\)"),
    ],
)
def test_a_request_that_the_model_cannot_take_is_named_at_once(cache: LLMCache, wrong: Any, message: str) -> None:
    inputs = requests(N)[0]
    inputs[3] = wrong
    with pytest.raises(CalibrationError, match=message):
        cache.calibrate(inputs, **LOOSE)
    assert cache.stats().n_requests == 0
    nothing_is_reused(cache)


def test_computed_positions_have_no_end(model: nn.Module) -> None:
    long = [{"input_ids": torch.full((1, 500), 12)}]
    assert len(list(tokenised(long, None, locate(build(CLASSIFIERS["llama"]))))) == 1
    with pytest.raises(CalibrationError, match="500 tokens"):
        list(tokenised(long, None, locate(model)))


def test_a_request_that_fails_in_the_model_is_named(cache: LLMCache) -> None:
    inputs = requests(N)[0]
    inputs[3] = {**inputs[3], "token_type_ids": torch.full((1, 2), 12)}
    with pytest.raises(CalibrationError, match="request 3 could not be computed"):
        cache.calibrate(inputs, **LOOSE)
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


def test_a_request_that_goes_by_the_cache_is_named(cache: LLMCache) -> None:
    inputs = requests(N)[0]
    inputs[5] = {"input_ids": torch.full((1, 4), 0), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(CalibrationError, match="request 5: 0 of its 1 rows"):
        cache.calibrate(inputs, **LOOSE)


def test_texts_need_the_tokenizer(cache: LLMCache) -> None:
    with pytest.raises(CalibrationError, match="tokenizer"):
        cache.calibrate(["a text"] * N, **LOOSE)


def test_a_bound_that_nothing_keeps_turns_nothing_on(model: nn.Module) -> None:
    """Answers that have nothing to do with the request."""
    with LLMCache.wrap(model, answer_of=lambda output: torch.randn(len(output.logits), 5)) as cache:
        found = cache.calibrate(batched(requests(700)[0]), max_drop=0.01)
        assert found.chosen is None
        nothing_is_reused(cache)


@pytest.mark.slow
def test_what_more_likely_changes_than_not_is_not_served(model: nn.Module) -> None:
    """However much may be lost: hits that are nearly all wrong are no use."""
    with LLMCache.wrap(model, answer_of=lambda output: torch.randn(len(output.logits), 5)) as cache:
        found = cache.calibrate(batched(requests(N)[0]), max_drop=0.9)
        assert all(setting.limit <= 0.5 for setting in found.curve)
        assert ask(cache, requests(60, seed=7)[0])[1].count("semantic") <= 6


def test_ones_own_threshold_is_not_calibrated(model: nn.Module) -> None:
    with LLMCache.wrap(model, tau=0.9) as cache, pytest.raises(ConfigError, match="your own choice"):
        cache.calibrate(batched(requests(N)[0]), **LOOSE)


def test_heads_that_answer_by_token_are_refused() -> None:
    model = build(next(iter(TOKEN_HEADS.values())))
    with LLMCache.wrap(model) as cache, pytest.raises(UnsafeReuseError):
        cache.calibrate(batched(requests(N)[0]), **LOOSE)
    with pytest.raises(UnsafeReuseError):
        LLMCache.wrap(model, learn=N)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "growing"},
        {"tau": 0.9, "learn": 100},
        {"tau": 0.9, "decide": "risk"},
        {"tau": 0.9, "fingerprint": "learned"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(model: nn.Module, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LLMCache.wrap(model, **settings)


def test_too_few_requests_to_learn_from_are_refused_at_once(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"learn=100: 100 requests cannot show .* at least 1196"):
        LLMCache.wrap(model, learn=100)
    with pytest.raises(ConfigError, match="max_entries=500"):
        LLMCache.wrap(model, learn=2000, max_entries=500)


@contextmanager
def spoiled(model: nn.Module, value: float) -> Iterator[None]:
    """Within: one logit of each request with token 9 is this."""
    ids: dict[str, torch.Tensor] = {}

    def spoil(_: nn.Module, __: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[(ids["input_ids"] == 9).any(dim=-1), 2] = value
        return logits

    hooks = [
        model.register_forward_pre_hook(lambda _, __, inputs: ids.update(inputs), with_kwargs=True),
        model.classifier.register_forward_hook(spoil),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def with_marks(inputs: list[dict[str, torch.Tensor]], *numbers: int) -> list[dict[str, torch.Tensor]]:
    """The same requests, of which some have token 9."""
    marked = [dict(one, input_ids=one["input_ids"].clone()) for one in inputs]
    for number in numbers:
        marked[number]["input_ids"][0, 3] = 9
    return marked


@pytest.mark.parametrize("name", ["target", "output"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3e38])
def test_what_is_no_number_is_found(name: str, value: float) -> None:
    fields = {"target": np.ones(3, np.float32), "output": np.ones(2, np.float32)}
    assert flaw(types.SimpleNamespace(**fields)) == ""  # type: ignore[arg-type]
    fields[name][1] = value
    assert "not finite, or too large" in flaw(types.SimpleNamespace(**fields))  # type: ignore[arg-type]
    fresh = RenewalBuffer(1)
    fresh.add(types.SimpleNamespace(**fields))  # type: ignore[arg-type]
    assert fresh.cases == []  # nor is a calibration renewed with it


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), -3e38])
def test_a_request_with_logits_that_are_no_numbers_is_named(cache: LLMCache, model: nn.Module, value: float) -> None:
    inputs = with_marks(requests(N)[0], 37, 60)
    with spoiled(model, value):
        for learn in (lambda: cache.calibrate(inputs, **LOOSE), lambda: cache.observe(inputs)):
            with pytest.raises(CalibrationError, match=r"^request 37: the model's outputs are not finite.*wider dtype"):
                learn()
    nothing_is_reused(cache)
    assert cache.calibrate(with_marks(inputs), **LOOSE).chosen is not None


@pytest.mark.slow
def test_logits_that_are_no_numbers_are_not_learned_from_by_the_way(model: nn.Module) -> None:
    inputs = requests(N + 2)[0]
    with spoiled(model, float("nan")), LLMCache.wrap(model, learn=N, **LOOSE) as cache:
        ask(cache, with_marks(inputs, 5, 400)[:-1])
        assert (cache.calibration, cache.stats().errors) == (None, 2)
        ask(cache, inputs[-1:])
        assert cache.calibration is not None and cache.calibration.chosen is not None
        assert ask(cache, with_marks(inputs, 5)[5:6])[1] == ["exact"]  # stored it is, for its own repeats


@pytest.mark.slow
def test_states_that_are_no_numbers_are_not_learned_from(model: nn.Module) -> None:
    broken, inputs = copy.deepcopy(model), requests(N + 2)[0]
    with torch.no_grad():
        broken.bert.embeddings.word_embeddings.weight[9] = float("nan")
    with LLMCache.wrap(broken, learn=N, **LOOSE) as cache:
        ask(cache, with_marks(inputs, 5, 400)[:-1])
        assert (cache.calibration, cache.stats().errors) == (None, 2)
        ask(cache, inputs[-1:])
        assert cache.calibration is not None and cache.calibration.chosen is not None
        fresh = requests(20, seed=7)[0]
        assert "semantic" in ask(cache, fresh)[1]
        logits = [cache(**one).logits for one in with_marks(fresh, *range(20))]  # never served by another's answer
        assert torch.stack(logits).isnan().all()
        assert (cache.stats().errors, cache.stats().bypassed) == (2, {"not_finite": 20})
        with pytest.raises(CalibrationError, match="request 37: the model's states are not finite"):
            cache.calibrate(with_marks(inputs, 37), **LOOSE)


def test_an_answer_is_not_read_from_logits_that_are_no_numbers(model: nn.Module) -> None:
    inputs = with_marks(requests(2)[0], 0)
    with spoiled(model, float("nan")), LLMCache.wrap(model, tau=0.99, decide="consensus") as cache:
        ask(cache, inputs)
        answers = [record.answer for record in inside.records(cache)]
    assert [None if answer is None else bool(np.isnan(answer).any()) for answer in answers] == [True, False]


@pytest.mark.slow
def test_answers_that_cannot_be_read_leave_the_lossless_rungs(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=N, answer_of=lambda output: output.nothing, **LOOSE) as cache:
        ask(cache, requests(N)[0])
        nothing_is_reused(cache)
        assert cache.stats().errors > 0
        assert ask(cache, requests(N)[0][:3])[1] == ["exact"] * 3


@pytest.mark.slow
def test_a_calibration_survives_saving_and_loading(cache: LLMCache, model: nn.Module, tmp_path: Path) -> None:
    found = cache.calibrate(batched(requests(N)[0]), **LOOSE)
    cache.save(tmp_path)
    fresh = requests(200, seed=7)[0]
    before = ask(cache, fresh)
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert loaded.calibration == found
        assert ask(loaded, fresh) == before
        shelf = inside.partition(loaded)
        assert len(shelf) <= found.n_sources


def test_a_calibration_for_other_weights_is_refused(ready: LLMCache, tmp_path: Path) -> None:
    ready.save(tmp_path)
    other = classifier()
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense.weight.add_(0.01)
    with pytest.raises(BankFileError, match="other weights"):
        LLMCache.load(other, tmp_path)


@pytest.mark.slow
def test_unwrapping_leaves_the_model_as_it_was(model: nn.Module) -> None:
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    cache = LLMCache.wrap(model)
    cache.calibrate(batched(requests(N)[0]), **LOOSE)
    cache.unwrap()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.slow
def test_consensus_at_ones_own_threshold_serves_less_and_better(model: nn.Module) -> None:
    first, fresh = requests(500)[0], requests(200, seed=7)[0]
    served, changed = {}, {}
    for decide in ("threshold", "consensus"):
        with LLMCache.wrap(model, tau=0.5, decide=decide) as cache:
            ask(cache, first)
            answers, rungs = ask(cache, fresh)
            own = alone(cache, fresh)
            served[decide] = rungs.count("semantic")
            changed[decide] = sum(a != b for a, b in zip(answers, own, strict=True)) / max(served[decide], 1)
            assert cache.stats().errors == 0
    assert 0 < served["consensus"] < served["threshold"]
    assert changed["consensus"] < changed["threshold"]


@pytest.mark.slow
def test_the_gate_keeps_apart_what_the_vote_would_serve(model: nn.Module) -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {f"word{i}" if i != 20 else "not": i for i in range(96)}

        all_special_ids = (0, 1, 2)

    fresh = requests(300, seed=7)[0]
    has_not = [bool((one["input_ids"] == 20).any()) for one in fresh]
    rates = {}
    for gate in (False, True):
        with LLMCache.wrap(model, tokenizer=Words(), gate=gate, auto_bypass=False) as cache:
            cache.calibrate(batched(requests(N)[0]), **LOOSE)
            rungs = ask(cache, fresh)[1]
            rates[gate] = [rung == "semantic" for rung, has in zip(rungs, has_not, strict=True) if has]
    assert sum(rates[True]) < sum(rates[False])
    with pytest.raises(ConfigError, match="tokenizer"), LLMCache.wrap(model, gate=True, learn=N, **LOOSE):
        pass


# -- what could make the bound a lie -----------------------------------------------------------------------------------


def test_another_head_ends_it(ready: LLMCache, model: nn.Module, tmp_path: Path) -> None:
    ready.save(tmp_path)
    fresh = requests(80, seed=7)[0]
    assert "semantic" in ask(ready, fresh)[1]
    with torch.no_grad():
        model.classifier.bias.add_(1.0)
    try:
        assert "semantic" not in ask(ready, requests(80, seed=8)[0])[1]
        ready.unwrap()
        with pytest.raises(BankFileError, match="other weights"):
            LLMCache.load(model, tmp_path)
    finally:
        with torch.no_grad():
            model.classifier.bias.sub_(1.0)


@pytest.mark.slow
def test_requests_answered_by_two_heads_are_refused(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=N, **LOOSE) as cache:
        ask(cache, requests(N - 10)[0])
        with torch.no_grad():
            model.classifier.bias.add_(1.0)
        try:
            ask(cache, requests(10, seed=5)[0])
            assert cache.calibration is None and cache.stats().errors == 1
        finally:
            with torch.no_grad():
                model.classifier.bias.sub_(1.0)


@pytest.mark.slow
def test_after_loading_a_purge_of_its_sources_ends_it_too(cache: LLMCache, model: nn.Module, tmp_path: Path) -> None:
    inputs = requests(N)[0]
    with cache.namespace("tenant"):
        cache.calibrate(batched(inputs), **LOOSE)
    cache.save(tmp_path)
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        loaded.purge(namespace="somebody else")
        assert loaded.calibration is not None
        loaded.purge(namespace="tenant")
        assert loaded.calibration is None


@pytest.mark.slow
def test_requests_may_be_made_by_observing_others(cache: LLMCache) -> None:
    def made() -> Iterator[dict[str, torch.Tensor]]:
        for one in requests(N)[0]:
            if cache.calibrated is None or len(cache.observe([one])) == 1:
                yield one

    assert cache.calibrate(made(), **LOOSE).n_tested > 0


@pytest.mark.parametrize("limit", [float("nan"), "0.1", None, -0.1, 2])
def test_what_is_no_limit_is_refused(ready: LLMCache, limit: Any) -> None:
    with pytest.raises(ConfigError, match="give a number"), ready.tightened(limit):
        pass


@pytest.mark.slow
def test_requests_that_call_the_model_while_they_are_made_are_counted_once(cache: LLMCache) -> None:
    def made() -> Iterator[dict[str, torch.Tensor]]:
        for one in requests(N)[0]:
            cache(**one)
            yield one

    found = cache.calibrate(made(), **LOOSE)
    assert found.n_sources + found.n_tested <= N


@pytest.mark.slow
def test_calibrating_in_two_threads_leaves_one_of_them(cache: LLMCache) -> None:
    inputs = requests(N)[0]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.calibrate(batched(inputs), **LOOSE))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0].curve == found[1].curve
    assert [rung.name for rung in inside.rungs(cache)] == ["exact", "semantic"]
    check_serves_within(cache, most=0.1)


def test_an_unwrapped_cache_is_not_calibrated(model: nn.Module) -> None:
    cache = LLMCache.wrap(model)
    cache.unwrap()
    with pytest.raises(WrapError, match="unwrapped"):
        cache.calibrate(batched(requests(N)[0]), **LOOSE)
    assert "forward" not in model.__dict__


@pytest.mark.slow
def test_the_attention_fingerprint_is_calibrated_without_learn(model: nn.Module) -> None:
    with LLMCache.wrap(model, fingerprint="attention") as cache:
        cache.calibrate(batched(requests(N)[0]), max_drop=0.2)
        assert "semantic" in ask(cache, requests(60, seed=7)[0])[1]
        assert cache.stats().errors == 0


@pytest.mark.slow
def test_a_row_without_content_costs_the_others_nothing(model: nn.Module) -> None:
    with LLMCache.wrap(model, tokenizer=types.SimpleNamespace(all_special_ids=[0, 1, 2])) as cache:
        cache.calibrate(batched(requests(N)[0]), **LOOSE)
        one = requests(1, seed=70)[0][0]["input_ids"]
        cache(input_ids=one)
        mask = torch.tensor([[1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]])
        cache(input_ids=torch.cat([one, torch.tensor([[1, 2, 0, 0, 0, 0, 0, 0]])]), attention_mask=mask)
        assert cache.last[0].rung is not None
        assert cache.last[1].bypassed == "no_content"
        assert cache.stats().errors == 0


@pytest.mark.slow
def test_calibrating_again_and_again_lets_earlier_sources_leave(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=N, auto_bypass=False) as cache:
        for seed in range(3):
            found = cache.calibrate(batched(requests(N, seed=seed)[0]), **LOOSE)
            shelf = inside.partition(cache)
            assert found.chosen is not None and len(shelf) == found.n_sources
        again = requests(3, seed=50)[0]
        ask(cache, again)
        assert ask(cache, again)[1].count("exact") + ask(cache, again)[1].count("semantic") >= 3


@pytest.mark.slow
def test_sources_that_do_not_fit_are_told(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=100) as cache:
        with pytest.raises(CalibrationError, match="raise max_entries"):
            cache.calibrate(batched(requests(N)[0]), **LOOSE)
        nothing_is_reused(cache)


@pytest.mark.slow
@pytest.mark.parametrize("forget", [lambda cache: cache.clear(), lambda cache: cache.purge(namespace="default")])
def test_forgetting_the_sources_ends_it(cache: LLMCache, forget: Any) -> None:
    cache.calibrate(batched(requests(N)[0]), **LOOSE)
    assert cache.purge(namespace="another") == 0 and cache.calibration is not None
    forget(cache)
    assert cache.calibration is None
    nothing_is_reused(cache)


@pytest.mark.slow
def test_what_was_purged_is_not_learned_from(model: nn.Module) -> None:
    with LLMCache.wrap(model, learn=N, **LOOSE) as cache:
        with cache.namespace("tenant"):
            ask(cache, requests(N - 10, seed=1)[0])
        cache.purge(namespace="tenant")
        ask(cache, requests(200, seed=2)[0])
        assert cache.calibration is None
        assert all(case.scope.namespace == "default" for case in cache.calibrated._observed)


@pytest.mark.parametrize(
    "settings",
    [{"compression": "fp16"}, {"policy": {"name": "ttl", "ttl_s": 9}}, {"policy": "divergence"}, {"exact": False}],
)
def test_settings_under_which_no_bound_holds_are_refused(model: nn.Module, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LLMCache.wrap(model, learn=N, **LOOSE, **settings)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("answer", ["labels", "score", "embedding"])
def test_accuracy_is_one_of_classes(model: nn.Module, answer: str) -> None:
    inputs, labels = requests(N)
    with LLMCache.wrap(model, answer=answer) as cache, pytest.raises(CalibrationError, match="one of classes"):
        cache.calibrate(batched(inputs), labels=labels, metric="accuracy", **LOOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_drop": 0.0},
        {"max_drop": 1.5},
        {"max_drop": float("nan")},
        {"max_drop": "0.05"},
        {"delta": 0.0},
        {"delta": 1.0},
        {"metric": "f1"},
        {"metric": print},
        {"sources": "frozn"},
        {"seed": -1},
    ],
)
def test_a_wrong_claim_is_refused_and_leaves_the_one_before(ready: LLMCache, wrong: dict[str, Any]) -> None:
    found = ready.calibration
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ready.calibrate(requests(N)[0], **{**LOOSE, **wrong})
    assert ready.calibration is found


@pytest.mark.parametrize("wrong", [None, 5, "text", {"input_ids": 1}, [1, 2], [{"x": torch.ones(1)}], []])
def test_what_is_no_request_is_refused(cache: LLMCache, wrong: Any) -> None:
    with pytest.raises(CalibrationError):
        cache.calibrate(wrong, **LOOSE)
    nothing_is_reused(cache)
    again = requests(2, seed=60)[0]
    ask(cache, again)
    assert ask(cache, again)[1] == ["exact", "exact"]


def test_a_metric_needs_more_requests_than_a_share(cache: LLMCache) -> None:
    inputs, labels = requests(1300)
    with pytest.raises(CalibrationError, match="at least 23"):
        cache.calibrate(inputs, labels=labels, metric=Metric(lambda output, label: 1.0))


@pytest.mark.slow
def test_tokens_met_under_other_weights_are_not_kept(cache: LLMCache, model: nn.Module) -> None:
    cache.calibrate(batched(requests(N)[0]), **LOOSE)
    assert cache.calibrated is not None
    unmet = {"input_ids": torch.tensor([[1, 90, 91, 92, 2]])}
    fingerprint = inside.fingerprint(cache)
    assert fingerprint is not None
    weight = model.bert.embeddings.word_embeddings.weight
    own = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-3)
        cache(**unmet)
        weight.copy_(own)
    cache(**unmet)
    features = np.float32([[-1, 90, 91, 92, -1]])
    kept = fingerprint.project(features)
    cache.calibrate(batched(requests(N)[0]), **LOOSE)  # by which no token was met any more
    np.testing.assert_allclose(kept, fingerprint.project(features), rtol=1e-5)


@pytest.mark.slow
def test_growing_sources_leave_room_for_more(model: nn.Module) -> None:
    inputs = requests(N)[0]
    with LLMCache.wrap(model, max_entries=N, auto_bypass=False) as cache:
        cache.calibrate(batched(inputs), sources="growing", **LOOSE)
        ask(cache, requests(200, seed=7)[0])
        assert cache.stats().n_too_large == 0
        assert cache.stats().n_stored == N


def test_what_a_model_with_shifted_positions_takes() -> None:
    class Trunk:
        config = type("Config", (), {"max_position_embeddings": 66})
        module = type("Module", (), {"embeddings": type("Embeddings", (), {"padding_idx": 1})})

    unlimited = type("Tokenizer", (), {"model_max_length": 10**30})
    assert longest_input(Trunk, unlimited) == 64  # type: ignore[arg-type]
    assert longest_input(Trunk, type("Tokenizer", (), {"model_max_length": 32})) == 32  # type: ignore[arg-type]
