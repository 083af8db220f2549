"""Heads, interleaving, figures, and the replay that must tell what a live run does."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.measure import Trace, is_hit, measure, order_of, twin

from experiments.data.labelled import Labelled
from experiments.heads import PooledClassifier, _fit_linear, fit_logistic, pooled_states, ready
from experiments.metrics import hit_rates, latencies, percentiles, quality, speed
from experiments.models import Inputs, Loaded, encode, load
from experiments.replay import record, replay
from experiments.streams.support_desk import support_desk
from llmcache import CacheConfig, LLMCache, Stats
from llmcache.errors import ConfigError
from tests.unit.test_experiments_models import save_tiny


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return load(str(save_tiny(tmp_path / "tiny")))


def requests_of(n: int) -> list[Labelled]:
    chosen = ("order_status", "cancel_order", "keep_order")
    return [Labelled(i, r.text, r.label) for i, r in enumerate(support_desk(n, intents=chosen))]


def encoded(loaded: Loaded, stream: Sequence[Labelled]) -> list[Inputs]:
    return [encode(loaded.tokenizer, request.text, 48) for request in stream]


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_batches_and_padding_do_not_change_the_pooled_state(pool: str, loaded: Loaded) -> None:
    texts = [request.text for request in requests_of(40)]
    alone = PooledClassifier(loaded.model, pool)
    with torch.inference_mode():
        expected = np.stack([alone(**encode(loaded.tokenizer, text, 48))[0].numpy() for text in texts])
    np.testing.assert_allclose(pooled_states(loaded, pool, texts, 48), expected, atol=1e-5)


@pytest.mark.parametrize("n_labels", [2, 3])
def test_the_linear_layer_is_the_regression(n_labels: int) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.integers(n_labels, size=300)
    features = (rng.normal(size=(300, 5)) * [1, 10, 0.1, 1, 0] + 3 + 5 * numbers[:, None]).astype(np.float32)
    linear = _fit_linear(features, numbers)
    answers = linear(torch.from_numpy(features)).argmax(dim=1).numpy()
    assert linear.weight.shape == (n_labels, 5)
    assert (answers == numbers).mean() > 0.95


def test_labels_that_cannot_be_learned(loaded: Loaded) -> None:
    def request(label: str) -> Labelled:
        return Labelled(0, "where is my order", label)

    with pytest.raises(ConfigError, match=r"'c', 'd' occurs in the stream but not among the 2 requests"):
        fit_logistic(loaded, "mean", [request("a"), request("b")], [request("d"), request("c"), request("a")], 48)
    with pytest.raises(ConfigError, match=r"only one label \('a'\)"):
        fit_logistic(loaded, "mean", [request("a")] * 3, [request("a")], 48)


def test_a_ready_model_knows_its_labels(tmp_path: Path) -> None:
    loaded = load(str(save_tiny(tmp_path / "ready", labels=("x", "y", "z"))), "class")
    classifier = ready(loaded, [Labelled(0, "hello", "z")])
    assert classifier.labels == ("x", "y", "z")
    assert classifier.module(**encode(loaded.tokenizer, "hello", 48)).shape == (1, 3)
    with pytest.raises(ConfigError, match=r"does not know 'w'; it answers with 'x', 'y', 'z'"):
        ready(loaded, [Labelled(0, "hello", "w")])


def test_a_twin_shares_weights_and_nothing_else(loaded: Loaded) -> None:
    other = twin(loaded.model)
    parameters = dict(loaded.model.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in other.named_parameters())
    with LLMCache.wrap(other):
        assert "forward" not in vars(next(m for n, m in loaded.model.named_modules() if n == "encoder.layer.0"))


def test_the_order_alternates() -> None:
    assert [order_of("ab", i, 0) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert [order_of("ab", i, 1) for i in range(3)] == [["b", "a"], ["a", "b"], ["b", "a"]]
    firsts = [order_of("abc", i, 0)[0] for i in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]


def test_arms_see_every_request_and_rounds_begin_cold(loaded: Loaded) -> None:
    data = requests_of(100)
    stream = data[60:] + data[60:70]
    classifier = fit_logistic(loaded, "mean", data[:60], stream, 48)
    arms = {"alone": None, "exact": CacheConfig(payload="mean")}
    traces = measure(classifier, arms, encoded(loaded, stream), rounds=3, warmup=5)
    alone, exact = traces["alone"], traces["exact"]
    assert alone.ms.shape == exact.ms.shape == (3, 50)
    assert not is_hit(alone.served).any()
    texts = [tuple(inputs["input_ids"][0].tolist()) for inputs in encoded(loaded, stream)]
    expected = ["exact" if text in texts[:i] else "computed" for i, text in enumerate(texts)]
    assert exact.served.tolist() == [expected] * 3  # a warm round, or a counted warm-up, would have more hits
    assert (exact.answers == alone.answers).all()
    assert alone.stats is None
    assert exact.stats is not None and exact.stats.n_stored == len(set(texts))


def test_a_budget_stops_after_the_first_round(loaded: Loaded) -> None:
    data = requests_of(40)
    classifier = fit_logistic(loaded, "mean", data, data, 48)
    traces = measure(classifier, {"alone": None}, encoded(loaded, data[:5]), rounds=4, warmup=0, budget_s=0.0)
    assert traces["alone"].ms.shape == (1, 5)


def test_bypasses_and_evictions_are_told_apart(loaded: Loaded) -> None:
    data = requests_of(60)
    classifier = fit_logistic(loaded, "mean", data, data, 48)
    stream = [encode(loaded.tokenizer, text, 48) for text in ("", "where is my order", "", "cancel it", "keep it")]
    trace = measure(classifier, {"x": CacheConfig(payload="mean", max_entries=2)}, stream, 1, 0)["x"]
    assert trace.served[0].tolist() == ["bypassed", "computed", "bypassed", "computed", "computed"]
    assert trace.evicting[0].tolist() == [False, False, False, False, True]


def test_replay_equals_a_live_run(loaded: Loaded) -> None:
    """Same hits, same rungs, same answers, for each threshold, requests without content included."""
    data = requests_of(400)
    fit, stream = data[:150], data[150:]
    classifier = fit_logistic(loaded, "mean", fit, stream, 48)
    nothing = encode(loaded.tokenizer, "", 48)
    requests = [nothing, *encoded(loaded, stream), nothing]
    taus = [math.inf, 0.95, 0.8, 0.6, 0.3]
    arms = {str(tau): CacheConfig(payload="mean", tau=None if tau > 1 else tau) for tau in taus}
    live = measure(classifier, arms, requests, rounds=1, warmup=3)
    recording = record(classifier, requests)
    replays = replay(recording, taus)
    for tau, again in zip(taus, replays, strict=True):
        trace = live[str(tau)]
        assert again.served.tolist() == trace.served[0].tolist()
        assert recording.answers[again.source].tolist() == trace.answers[0].tolist()
    rates = [is_hit(again.served).mean() for again in replays]
    assert rates == sorted(rates) and rates[0] < rates[1] < rates[-1]  # the thresholds do differ here
    assert (recording.answers[replays[-1].source] != recording.answers).any()  # and answers do change
    assert replays[2].similarity[is_hit(replays[2].served)].min() >= 0.8


def test_recording_leaves_the_model_as_it_was(loaded: Loaded) -> None:
    data = requests_of(40)
    classifier = fit_logistic(loaded, "mean", data, data, 48)
    record(classifier, encoded(loaded, data[:3]))
    assert not any(module._forward_pre_hooks for module in classifier.module.modules())


def trace_of(ms: Any, served: Any, evicting: Any = None) -> Trace:
    times, rungs = np.array(ms, dtype=np.float64), np.array(served)
    evicted = np.zeros(times.shape, dtype=bool) if evicting is None else np.array(evicting)
    return Trace(times, np.zeros(times.shape, dtype=np.int64), rungs, evicted, Stats())


def test_quality_by_hand() -> None:
    base, answers = np.array([0, 1, 2, 3, 4]), np.array([0, 1, 9, 8, 4])
    labels, hits = np.array([0, 1, 2, 8, 5]), np.array([False, True, True, True, True])
    assert quality(base, answers, labels, hits) == {
        "accuracy": 0.6,
        "accuracy_nocache": 0.6,
        "accuracy_drop": 0.0,
        "changed_answers": 0.4,
        "changed_per_hit": 0.5,
    }
    assert quality(base, base, labels, ~hits & False)["changed_per_hit"] is None


def test_hit_rates_by_hand() -> None:
    served = np.array(["computed", "bypassed", "exact", "semantic", "semantic"])
    assert hit_rates(served) == {"hit_rate": 0.6, "hits_by_rung": {"exact": 0.2, "semantic": 0.4}}


def test_speed_by_hand() -> None:
    """Sums over each round, then the median of the ratios: 10/5, 10/8, 10/10."""
    base = trace_of([[4, 6], [5, 5], [2, 8]], [["computed"] * 2] * 3)
    trace = trace_of([[4, 1], [6, 2], [8, 2]], [["computed", "exact"], ["computed", "semantic"], ["computed", "exact"]])
    figures = speed(base, trace)
    assert (figures["speedup"], figures["speedup_min"], figures["speedup_max"]) == (1.25, 1.0, 2.0)
    assert figures["miss_overhead"] == pytest.approx(18 / 11 - 1)
    assert figures["hit_cost"] == pytest.approx(5 / 19)
    assert speed(base, base)["hit_cost"] is None


def test_latencies_by_hand() -> None:
    base = trace_of([[9, 9, 9, 9, 9]], [["computed"] * 5])
    served = [["computed", "computed", "exact", "semantic", "bypassed"]]
    trace = trace_of([[1, 2, 3, 4, 5]], served, [[False, True, False, False, False]])
    found = {name: figures and figures["median"] for name, figures in latencies(base, trace).items()}
    assert found == {
        "nocache_ms": 9,
        "cache_ms": 3,
        "hit_ms": 4,
        "exact_hit_ms": 3,
        "miss_ms": 2,
        "filling_miss_ms": 1,
    }
    assert latencies(base, base)["hit_ms"] is None


def test_percentiles_by_hand() -> None:
    assert percentiles(np.arange(101.0)) == {"median": 50, "p90": 90, "p99": 99, "n": 101}
    assert percentiles(np.array([])) is None
