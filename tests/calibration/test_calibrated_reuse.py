"""Calibrated reuse in a cache: what turns it on, what ends it, and what is refused."""

import copy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from llmcache import LLMCache
from llmcache.errors import CalibrationError, ConfigError, UnsafeReuseError, WrapError
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


def fresh(n: int, seed: int = 7) -> list[Inputs]:
    """Other requests, several in a call."""
    return batched(requests(n, seed=seed)[0])


def test_calibrating_turns_reuse_on_within_the_bound(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def n_threads() -> set[int]:
        return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}

    fitter = cache._core.learn().reuse.calibrated.fitter
    fit, seen = fitter.fit, []
    monkeypatch.setattr(fitter, "fit", lambda *args: (seen.append(n_threads()), fit(*args))[1])
    with threadpool_limits(limits=2, user_api="blas"):
        found = cache.calibrate(BATCHES, **LOOSE)
        assert seen == [{1}] and n_threads() == {2}  # of NumPy's BLAS
    assert found is cache.calibration and found.is_certified
    assert found.chosen.bound <= 0.05 and found.chosen.hit_rate > 0.2
    assert found.n_sources + found.n_tested == N
    assert not fitter._forecasts  # those of its requests are not kept
    assert found.model_ms > 0 and found.lookup_ms > 0
    assert 1 / found.speedup == pytest.approx(1 - found.chosen.hit_rate + found.lookup_ms / found.model_ms)
    answers, rungs = ask(cache, fresh(200))
    with cache.disabled():
        own, _ = ask(cache, fresh(200))
    assert rungs.count("semantic") > 50
    assert sum(a != b for a, b in zip(answers, own, strict=True)) / 200 <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("sources", ["frozen", "growing"])
def test_only_growing_sources_grow_and_a_purge_ends_either(model: nn.Module, sources: str, tmp_path: Path) -> None:
    """Also after loading. Growing sources are not pinned: only the index tells their namespace."""
    with LLMCache.wrap(model, max_entries=N + 10) as cache:
        with cache.namespace("tenant"):
            assert cache.calibrate(BATCHES, sources=sources, **LOOSE).is_certified == (sources == "frozen")
            shelf = inside.sources(cache)
            n_before = len(shelf)
            ask(cache, fresh(200))
        assert len(shelf) == n_before if sources == "frozen" else len(shelf) > n_before
        ask(cache, fresh(1, seed=9))  # stored in a namespace without sources
        least = n_before + 1 if sources == "frozen" else N + 10  # misses are stored in any case
        assert cache.stats().n_stored >= least and cache.stats().n_too_large == 0
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert any(inside.bank(cache).is_pinned(one.key) for one in inside.sources(cache)) == (sources == "frozen")
        cache.purge(namespace="third")
        assert cache.calibration is not None
        cache.purge(namespace="tenant")
        assert cache.calibration is None


@pytest.mark.slow
def test_accuracy_and_other_metrics_are_bounded(cache: LLMCache) -> None:
    changed = cache.calibrate(BATCHES, **LOOSE)
    accuracy = cache.calibrate(BATCHES, labels=LABELS, metric="accuracy", **LOOSE)
    assert accuracy.metric == "accuracy"
    assert accuracy.chosen.limit >= changed.chosen.limit  # fewer changes count as losses
    assert changed.watch.most_changed == 0.05 != accuracy.watch.most_changed  # permitted changes ring no alarm
    assert 0.01 < accuracy.watch.most_changed <= 0.5
    names = [f"LABEL_{label}" for label in LABELS]  # names from the model's config
    assert cache.calibrate(BATCHES, labels=names, metric="accuracy", **LOOSE).curve == accuracy.curve
    metric = Metric(lambda output, label: float(torch.tensor(output).softmax(0)[label]), name="confidence")
    confident = cache.calibrate(BATCHES, labels=LABELS, metric=metric, max_drop=0.1)
    assert confident.metric == "confidence" and confident.chosen.bound <= 0.1


# -- refusals ----------------------------------------------------------------------------------------------------------


def nothing_is_reused(cache: LLMCache) -> None:
    assert cache.calibration is None or cache.calibration.chosen is None
    assert "semantic" not in rungs_of(cache, fresh(60))


NO_REQUESTS: list[tuple[Any, str]] = [
    *[(wrong, "give a list of tokenised inputs or of texts") for wrong in (None, 5, "text", {"input_ids": 1})],
    ([1, 2], "request 0 is a int"),
    ([{"x": torch.ones(1)}], "request 0 has no input_ids"),
    ([], "0 requests"),
    (["w1 w2", " \n"] * N, r"request 1 is a blank text \(' \\n'\)"),
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
#: More arguments of request 3, which then fails in the model or bypasses the cache.
FAILING: list[tuple[dict[str, Any], str]] = [
    ({"token_type_ids": torch.full((1, 2), 12)}, "request 3 could not be computed"),
    ({"attention_mask": torch.zeros(1, 8, dtype=torch.long)}, "request 3: 0 of its 1 rows"),
]


@pytest.fixture(scope="module")
def unlearned() -> Iterator[LLMCache]:
    """A cache that every calibration leaves as it was."""
    with LLMCache.wrap(classifier(), tokenizer=tokenizer()) as cache:
        yield cache
        nothing_is_reused(cache)


@pytest.mark.parametrize(
    ("given", "more", "message", "n_computed"),
    [
        *((wrong, {}, message, 0) for wrong, message in NO_REQUESTS),
        *((SAMPLE, more, message, 1) for more, message in WRONG_LABELS),  # a metric is tried on one request
        *(([*SAMPLE[:3], wrong, *SAMPLE[4:]], {}, message, 0) for wrong, message in WRONG_REQUESTS),
        *(([*SAMPLE[:3], SAMPLE[3] | wrong, *SAMPLE[4:]], {}, message, 4) for wrong, message in FAILING),
    ],
)
def test_what_cannot_be_learned_from_is_refused_at_once(
    unlearned: LLMCache, given: Any, more: dict[str, Any], message: str, n_computed: int
) -> None:
    before = unlearned.stats().n_requests
    with pytest.raises(CalibrationError, match=message):
        unlearned.calibrate(given, **{"max_drop": 0.4, **more})
    assert unlearned.stats().n_requests <= before + n_computed
    assert unlearned.calibration is None


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
        ({"share_calibration": True}, "share_calibration"),  # without a store
    ],
)
def test_settings_without_a_bound_are_refused(model: nn.Module, settings: dict[str, Any], message: str) -> None:
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


@pytest.mark.slow
def test_requests_that_call_the_model_while_they_are_made_are_counted_once(cache: LLMCache) -> None:
    def made() -> Iterator[Inputs]:
        for number, one in enumerate(SAMPLE[:LEAST]):
            cache.observe([one]) if number % 2 else cache(**one)
            yield one

    found = cache.calibrate(made(), **LOOSE)
    assert found.n_sources + found.n_tested == LEAST


def test_what_the_settings_do_not_suit_is_told(model: nn.Module) -> None:
    with LLMCache.wrap(model, max_entries=100, answer="labels") as cache:
        with pytest.raises(CalibrationError, match="2 labels for 1 requests"):
            cache.observe(SAMPLE[:1], labels=[0, 1])
        for given, more, message in (
            (BATCHES, {}, "raise max_entries"),
            (BATCHES, {"labels": LABELS, "metric": "accuracy"}, "compares classes"),
            (["a text"] * N, {}, "texts need the tokenizer"),
        ):
            with pytest.raises(CalibrationError, match=message):
                cache.calibrate(given, **LOOSE, **more)
        nothing_is_reused(cache)
    with pytest.raises(WrapError, match="was unwrapped"):
        cache.observe(SAMPLE[:1])


WRONG_CLAIMS: dict[str, list[Any]] = {
    "max_drop": [0.0, 1.5, float("nan"), "0.05"],
    "delta": [0.0, 1.0],
    "metric": ["f1", print],
    "sources": ["frozn"],
    "seed": [-1],
}


def test_a_wrong_claim_is_refused_and_leaves_the_one_before() -> None:
    with calibrated() as cache:
        found = cache.calibration
        for name, value in ((name, value) for name, values in WRONG_CLAIMS.items() for value in values):
            with pytest.raises(ConfigError, match=name):
                cache.calibrate(SAMPLE, **LOOSE | {name: value})
            assert cache.calibration is found


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
    """Nor does a purge before it, or between the last request and the calibration."""
    with LLMCache.wrap(model, learn=LEAST, max_drop=0.1) as cache:
        with cache.namespace("tenant"):
            ask(cache, batched(SAMPLE[:LEAST], 20)[:-1])
        cache.purge(namespace="tenant")
        assert cache.calibrated._observed == []
        honest = calibrated_reuse.compute_alone
        monkeypatch.setattr(calibrated_reuse, "compute_alone", lambda: (honest(), cache.purge(namespace="default")))
        ask(cache, batched(SAMPLE[:LEAST], 20))
        cache.drain()
        assert cache.calibration is None and cache.stats().n_stored == 0


def test_a_request_that_comes_twice_in_a_batch_is_one_source(cache: LLMCache) -> None:
    """A calibration on repeats has one source per different request."""
    order = np.random.default_rng(0).permutation([*range(200), *range(50)])
    ask(cache, batched(SAMPLE[:100], 20))
    made = cache.calibrate(batched([SAMPLE[number] for number in order]), max_drop=0.1)
    assert made.n_sources == len(inside.sources(cache)) <= 200
    observed, fitter = cache.observe(SAMPLE[200:210]), cache.calibrated.fitter
    keys = [case.row.key for case in observed[:5]]
    found = fitter.look_up(observed, set(keys))
    assert [one.risk == -np.inf for one in found] == [True] * 5 + [False] * 5
    assert [one.key for one in found[:5]] == keys


# -- texts -------------------------------------------------------------------------------------------------------------


class Decimals:
    """A tokenizer for texts of decimal token ids."""

    model_max_length = 16
    all_special_ids = (1, 2)

    def __call__(self, text: str, return_tensors: str, **cut: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}


def texts(n: int) -> list[str]:
    """Requests of five to eight tokens, as texts."""
    ids = (one["input_ids"][0].tolist() for one in requests(n)[0])
    return [" ".join(map(str, one[: 5 + i % 4])) for i, one in enumerate(ids)]


def test_texts_are_computed_together_and_observed_in_order(model: nn.Module) -> None:
    """Up to 32 texts of one length are one call of the model; each is observed as if alone."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with LLMCache.wrap(model, tokenizer=Decimals()) as cache:
        observed = cache.observe(texts(200))
        together = list(sizes)
        alone = [cache.observe([one])[0] for one in texts(200)[:40]]
    assert max(together) == 32 and len(together) <= 8
    assert [case.number for case in observed] == list(range(200))
    for one, other in zip(observed, alone, strict=False):
        assert one.row.key == other.row.key
        assert torch.allclose(torch.from_numpy(one.output), torch.from_numpy(other.output), atol=1e-3)


def test_the_text_that_cannot_be_computed_is_named(model: nn.Module) -> None:
    """The error names the number of a text that the model refuses, even within a batch."""

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["input_ids"][:, 1] == 69).any():
            raise ValueError("no")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    given = [one.replace(" 69 ", " 68 ") for one in texts(60)]
    words = given[40].split()
    given[40] = " ".join([words[0], "69", *words[2:]])
    with LLMCache.wrap(model, tokenizer=Decimals()) as cache, pytest.raises(CalibrationError, match="request 40"):
        cache.observe(given)
