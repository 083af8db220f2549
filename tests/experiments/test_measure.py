"""The measure `serve`: heads, the interleaved loop, rows, and metrics checked by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.data.labelled import Labelled
from experiments.measures.serve import measure, order_of, rows, run
from experiments.methods import NOCACHE
from experiments.methods.base import COMPUTED, Method, Served
from experiments.methods.cached import Cached
from experiments.metrics.metrics import Trace, hit_rates, interval, latencies, percentiles, quality, speed, summary
from experiments.models.heads import PooledClassifier, fit_logistic, pooled_states, ready
from experiments.models.loading import Loaded, encode, load
from experiments.runs.folder import _csv
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from experiments.tasks.stream import Stream
from experiments.tasks.workload import Request
from llmcache.errors import ConfigError
from tests.experiments.measuring import desk
from tests.experiments.test_models import save_tiny


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return load(str(save_tiny(tmp_path / "tiny")))


def requests_of(n: int) -> list[Labelled]:
    asked = desk(n, "order_status", "cancel_order", "keep_order")
    return [Labelled(i, request.text, request.label) for i, request in enumerate(asked)]


def labelled(labels: str) -> list[Labelled]:
    """Return requests with one text; each letter is a label."""
    return [Labelled(0, "where is my order", label) for label in labels]


def workload_of(loaded: Loaded, fit: Sequence[Labelled], stream: Sequence[Labelled]) -> Stream:
    return Stream(fit_logistic(loaded, "mean", fit, stream, 48), stream, 48, payload="mean")


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_batches_and_padding_do_not_change_the_pooled_state(pool: str, loaded: Loaded) -> None:
    texts = [request.text for request in requests_of(40)]
    alone = PooledClassifier(loaded.model, pool)
    with torch.inference_mode():
        expected = np.stack([alone(**encode(loaded.tokenizer, text, 48))[0].numpy() for text in texts])
    np.testing.assert_allclose(pooled_states(loaded, pool, texts, 48), expected, atol=1e-5)


def test_labels_that_cannot_be_learned(loaded: Loaded) -> None:
    error = r"'c', 'd' occurs in the stream \(2 of 3 requests\) but not among the 2 that"
    with pytest.raises(ConfigError, match=error):
        fit_logistic(loaded, "mean", labelled("ab"), labelled("dca"), 48)
    with pytest.raises(ConfigError, match=r"only one label \('a'\)"):
        fit_logistic(loaded, "mean", labelled("aaa"), labelled("a"), 48)


class Words:
    """A workload without a model: each number is its own answer, and even answers are right."""

    module, tokenizer, payload, metric = nn.Identity(), None, None, "accuracy"

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        tensors = [torch.tensor([[number]]) for number in numbers]
        self.requests = [Request(f"r{i}", {"input_ids": ids}, "text", 0) for i, ids in enumerate(tensors)]
        self.facts: dict[str, Any] = {}

    def answer(self, output: Any, number: int) -> int:
        return int(output)

    def is_changed(self, one: int, other: int) -> bool:
        return one != other

    def scores(self, answers: Sequence[int]) -> Any:
        return np.array([float(answer % 2 == 0) for answer in answers])

    def extras(self, answers: Sequence[int]) -> dict[str, float | None]:
        return {"largest": float(max(answers))}

    def show(self, answer: int) -> str:
        return f"<{answer}>"


class Remembers:
    """A method that serves repeats within a round, and records all calls."""

    nbytes = n_entries = 7

    def __init__(self, workload: Words, name: str, calls: list[tuple[str, Any]]) -> None:
        self.workload, self.name, self.calls = workload, name, calls
        self.seen: dict[int, int] = {}
        self.note = Served()

    def begin(self) -> None:
        self.calls.append((self.name, "begin"))
        self.seen.clear()

    def ask(self, number: int) -> int:
        self.calls.append((self.name, number))
        asked = self.workload.numbers[number]
        source = self.seen.setdefault(asked, number)
        self.note = Served("exact", source, 1.0) if source != number else Served(COMPUTED, is_evicting=number == 2)
        return asked

    def last(self) -> Served:
        return self.note

    def end(self) -> None:
        self.calls.append((self.name, "end"))


def test_methods_take_turns_and_rounds_begin_cold() -> None:
    calls: list[tuple[str, Any]] = []
    workload = Words([5, 6, 5])
    methods: dict[str, Method] = {name: Remembers(workload, name, calls) for name in ("a", "b")}
    traces = measure(workload, methods, rounds=2, warmup=2)
    preparation = [(name, what) for name in "ab" for what in ("begin", 0, 1, "begin")]
    first, second = ([(name, i) for i in range(3) for name in order_of(["a", "b"], i, number)] for number in range(2))
    assert calls == [*preparation, *first, *preparation, *second, ("a", "end"), ("b", "end")]
    for trace in traces.values():
        assert trace.ms.shape == (2, 3) and (trace.ms >= 0).all()
        assert trace.served.tolist() == [[COMPUTED, COMPUTED, "exact"]] * 2  # a counted warm-up would have more hits
        assert trace.evicting.tolist() == [[False, False, False]] * 2
        assert (trace.answers, trace.nbytes, trace.n_entries) == ([5, 6, 5], 7, 7)
        assert [note.source for note in trace.notes] == [None, None, 0]
    calls.clear()
    measure(workload, {"a": methods["a"]}, rounds=1, warmup=9)  # the stream ends first
    assert [what for _, what in calls] == ["begin", 0, 1, 2, "begin", 0, 1, 2, "end"]


@given(n=st.integers(1, 6), request=st.integers(0, 40), number=st.integers(0, 5))
def test_the_order_is_fair(n: int, request: int, number: int) -> None:
    names = [str(i) for i in range(n)]
    order = order_of(names, request, number)
    assert sorted(order) == names
    assert order_of(names, request, number) == order
    assert order_of(names, request, 2 * number + 1) == order_of(names, request, 2 * number)[::-1]


def test_rows_say_what_happened() -> None:
    workload = Words([4, 5, 4])
    alone = trace_of([[1, 1, 1]], [[COMPUTED] * 3], answers=[4, 5, 4], notes=[Served()] * 3)
    notes = [Served(), Served(COMPUTED, None, 0.25), Served("semantic", 1, 0.123456)]
    other = trace_of([[1, 2, 3.00004]], [[COMPUTED, COMPUTED, "semantic"]], answers=[4, 5, 5], notes=notes)
    header, *lines = _csv(rows(workload, {NOCACHE: alone, "other": other})).splitlines()
    assert header == "id,method,served,source,similarity,answer,is_changed,score,ms"
    assert [line.split(",")[1] for line in lines[:3]] == [NOCACHE] * 3
    assert lines[3:] == [
        "r0,other,computed,,,<4>,0,1.0,1.0",  # missing values are empty
        "r1,other,computed,,0.25,<5>,0,0.0,2.0",
        "r2,other,semantic,r1,0.12346,<5>,1,0.0,3.0",
    ]


def test_serve_states_what_was_measured(tmp_path: Path) -> None:
    task = {"name": "stream", "model": str(save_tiny(tmp_path / "tiny")), "limit": 20}
    methods = [{"method": "llmcache", "tau": 0.8}, {"method": "doccache", "label": "documents"}]
    values = {"measure": "serve", "task": task | {"data": {"path": "support_desk", "limit": 300}}, "methods": methods}
    outcome = run(make_experiment({**values, "rounds": 2, "keeps_rows": False}), Folders())
    assert outcome.rows == []
    assert outcome.metrics["n"] == outcome.metrics["limit"] == 20
    assert (outcome.metrics["rounds"], outcome.metrics["metric"]) == (2, "accuracy")
    found = outcome.metrics["methods"]
    assert list(found) == [NOCACHE, "llmcache-tau=0.8", "documents"]
    assert [figures["method"] for figures in found.values()] == [NOCACHE, "llmcache", "doccache"]
    assert [figures["options"] for figures in found.values()] == [{}, {"tau": 0.8}, {}]
    assert found[NOCACHE]["speedup"] == 1.0 and found[NOCACHE]["bytes"] is None
    assert found["documents"]["nocache_ms"]["n"] == found["documents"]["cache_ms"]["n"] == 40


def test_of_a_ready_classifier_an_entry_keeps_what_the_head_reads(tmp_path: Path) -> None:
    """Requests of other lengths then hit, as the recorded hit rates assume."""
    requests = [Labelled(i, text, "a") for i, text in enumerate(("where is my order", "where is my order?"))]
    model = load(str(save_tiny(tmp_path / "tiny", ("a", "b"))), "class")
    workload = Stream(ready(model, requests), requests, 48, payload=None)
    method = Cached(workload, {"tau": -1.0, "layers": "last"})
    method.begin()
    assert method.payload == "cls"
    with torch.inference_mode():
        assert method.ask(0) == method.ask(1)
    assert method.last().by == "paper" and method.n_entries == 1
    method.end()


def test_bypasses_and_evictions_are_told_apart(loaded: Loaded) -> None:
    data = requests_of(60)
    texts = ("", "where is my order", "", "cancel it", "keep it")
    workload = workload_of(loaded, data, [Labelled(i, text, "keep_order") for i, text in enumerate(texts)])
    trace = measure(workload, {"x": Cached(workload, {"max_entries": 2})}, 1, 0)["x"]
    assert trace.served[0].tolist() == ["bypassed", "computed", "bypassed", "computed", "computed"]
    assert trace.evicting[0].tolist() == [False, False, False, False, True]
    figures = summary(workload, trace, trace)
    assert (figures["bypassed"], figures["hit_rate"], figures["entries"]) == (2, 0.0, 2)


def trace_of(ms: Any, served: Any, evicting: Any = None, answers: Any = (), notes: Any = ()) -> Trace:
    times, rungs = np.array(ms, dtype=np.float64), np.array(served)
    evicted = np.zeros(times.shape, dtype=bool) if evicting is None else np.array(evicting)
    return Trace(times, rungs, evicted, answers, notes)


def test_quality_by_hand() -> None:
    base, answers = [0, 1, 2, 4, 4, 0, 1, 2, 4, 4], [0, 1, 9, 8, 4, 0, 1, 9, 8, 4]
    hits = np.array([False, True, True, True, True] * 2)
    figures = quality(Words([0] * 10), base, answers, hits)
    assert (figures["accuracy"], figures["accuracy_nocache"]) == (0.6, 0.8)
    assert figures["accuracy_drop"] == pytest.approx(0.2)
    assert (figures["changed_answers"], figures["changed_per_hit"]) == (0.4, 0.5)
    assert figures["extras"] == {"largest": 9.0}
    for name in ("accuracy", "accuracy_drop", "changed_answers"):
        low, high = figures[f"{name}_ci"]
        assert low < figures[name] < high
    assert quality(Words([0] * 10), base, base, ~hits & False)["changed_per_hit"] is None


def test_an_interval_by_hand() -> None:
    """With n requests and a share p right, the bootstrap mean has standard deviation sqrt(p (1 - p) / n)."""
    values = np.repeat([1.0, 0.0], [300, 700])
    low, high = interval(values, np.arange(len(values)))
    deviation = math.sqrt(0.3 * 0.7 / 1000)
    assert [low, high] == pytest.approx([0.3 - 1.96 * deviation, 0.3 + 1.96 * deviation], abs=0.003)
    alone = np.arange(len(values))
    assert interval(values, alone) == interval(values, alone, seed=0) != interval(values, alone, seed=1)


@pytest.mark.parametrize(("by", "rate", "bounds"), [("computed", 0.0, [0, 0.3085]), ("exact", 1.0, [0.6915, 1])])
def test_clusters_that_agree_are_as_many_witnesses(by: str, rate: float, bounds: list[float]) -> None:
    """Clopper-Pearson bounds for 0 and 10 of 10 clusters, though each cluster has five requests."""
    figures = hit_rates(np.array([by] * 50), np.arange(50) % 10)
    assert figures["hit_rate"] == rate
    assert figures["hit_rate_ci"] == pytest.approx(bounds, abs=1e-4)


def test_one_text_that_is_asked_often_is_one_witness() -> None:
    """100 of 200 requests are one text whose answer always changed: it counts as one cluster."""
    asked = [0] * 100 + list(range(1, 101))
    before, after = asked, [-1] * 100 + asked[100:]
    workload = Words(asked)
    workload.requests = [replace(request, cluster=str(n)) for request, n in zip(workload.requests, asked, strict=True)]
    figures = quality(workload, before, after, np.ones(200, dtype=bool))
    assert figures["changed_answers"] == 0.5
    low, high = figures["changed_answers_ci"]
    assert low == 0.0 and high > 0.65  # each resample holds the text never, once or several times
    others = list(range(200))
    alone = quality(Words(others), others, [-1] * 100 + others[100:], np.ones(200, dtype=bool))
    assert alone["changed_answers_ci"] == pytest.approx([0.429, 0.571], abs=0.001)


def test_hit_rates_by_hand() -> None:
    served = np.array(["computed", "bypassed", "exact", "semantic", "semantic"])
    figures = hit_rates(served, np.arange(5))
    low, high = figures.pop("hit_rate_ci")
    assert figures == {"hit_rate": 0.6, "hits_by_rung": {"exact": 0.2, "semantic": 0.4}}
    assert 0 <= low < 0.6 < high <= 1
    assert hit_rates(np.array(["computed", "bypassed"]), np.arange(2)) == {
        "hit_rate": 0.0,
        "hit_rate_ci": pytest.approx([0.0, 1 - 0.025**0.5]),
        "hits_by_rung": {},
    }


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
    found = latencies(base, trace)
    assert list(found) == ["nocache_ms", "cache_ms", "hit_ms", "exact_hit_ms", "miss_ms", "filling_miss_ms"]
    assert [figures and figures["median"] for figures in found.values()] == [9, 3, 4, 3, 2, 1]
    assert latencies(base, base)["hit_ms"] is None
    # Percentiles need enough values.
    assert percentiles(np.arange(201.0)) == {"median": 100, "p90": 180, "p99": 198, "n": 201}
    assert percentiles(np.arange(101.0)) == {"median": 50, "p90": None, "p99": None, "n": 101}
    assert percentiles(np.array([])) is None
