"""How calls are timed: orders, rounds, blocks, the clock, and calls that are not what they are counted as."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.measures import decode, harness
from experiments.measures.bench import latency
from experiments.measures.serve import measure, order_of, rows
from experiments.methods.base import COMPUTED, Served
from experiments.models import architectures
from experiments.support import clock as clocks
from experiments.support.clock import EVENTS, Clock, Spent
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache import CacheConfig, LLMCache
from tests.experiments.helpers import TASK, measured
from tests.experiments.test_metrics import words


@given(n=st.integers(1, 6), request=st.integers(0, 40), number=st.integers(0, 5))
def test_the_order_is_fair(n: int, request: int, number: int) -> None:
    names = [str(i) for i in range(n)]
    order = order_of(names, request, number)
    assert sorted(order) == names and order == order_of(names, request, number)
    assert order_of(names, request, 2 * number + 1) == order_of(names, request, 2 * number)[::-1]
    followers = Counter(pair for i in range(2 * n) for pair in itertools.pairwise(harness.rotated(names, i)))
    assert all(followers[pair] == followers[pair[::-1]] for pair in followers)


class Remembers:
    """A method that serves repeats within a round, and records all calls."""

    nbytes = n_entries = 7

    def __init__(self, numbers: Sequence[int], name: str, calls: list[tuple[str, Any]]) -> None:
        self.numbers, self.name, self.calls = numbers, name, calls
        self.seen: dict[int, int] = {}

    def begin(self) -> None:
        self.calls.append((self.name, "begin"))
        self.seen.clear()

    def ask(self, number: int) -> int:
        self.calls.append((self.name, number))
        source = self.seen.setdefault(self.numbers[number], number)
        self.note = Served("exact", source, 1.0) if source != number else Served(COMPUTED, is_evicting=number == 1)
        return self.numbers[number]

    def last(self) -> Served:
        return self.note

    def end(self) -> None:
        self.calls.append((self.name, "end"))


def test_methods_take_turns_rounds_begin_cold_and_rows_say_what_happened() -> None:
    calls: list[tuple[str, Any]] = []
    numbers = [5, 6, 5]
    methods: Any = {name: Remembers(numbers, name, calls) for name in ("nocache", "b")}
    traces = measure(words(numbers), methods, rounds=2, warmup=9)  # the stream ends first
    preparation = [(name, what) for name in methods for what in ("begin", 0, 1, 2, "begin")]
    first, second = ([(name, i) for i in range(3) for name in order_of([*methods], i, number)] for number in (0, 1))
    assert calls == [*preparation, *first, *preparation, *second, ("nocache", "end"), ("b", "end")]
    for trace in traces.values():
        assert trace.ms.shape == (2, 3) and (trace.ms >= 0).all()
        assert trace.served.tolist() == [[COMPUTED, COMPUTED, "exact"]] * 2  # a counted warm-up would have more hits
        assert trace.evicting.tolist() == [[False, True, False]] * 2
        assert (trace.answers, trace.nbytes, trace.n_entries) == (numbers, 7, 7)
    row = rows(words(numbers), traces)[-1]
    assert row.pop("ms") == round(traces["b"].ms[0, 2], 4)
    told = {"served": "exact", "source": "0", "similarity": 1.0, "answer": "5", "is_changed": 0, "score": 0.0}
    assert row == {"id": "2", "method": "b", **told}


def test_calls_of_several_requests_are_padded_and_answered_by_row() -> None:
    workload = build(make_task(TASK | {"name": "stream", "limit": 20}), Folders(), 0)
    calls = harness.calls_of(workload, 7)
    assert [(call.first, call.n_rows) for call in calls] == [(0, 7), (7, 7), (14, 6)]
    longest = max(request.inputs["input_ids"].shape[1] for request in workload.requests[:7])
    assert calls[0].inputs["attention_mask"].shape == (7, longest)
    done = harness.Way("all", harness.asking(workload, workload.module)).go(calls, 0, "")
    assert done.answers == workload.answer_all("") and done.served.tolist() == [COMPUTED] * 20 and len(done.ms) == 3


def test_a_round_of_blocks_alternates_and_compares_blocks_of_one_round() -> None:
    """The plain model gets the requests of the misses."""
    asked, numbers = [], itertools.count()
    taken = {"exact_hit": 1.0, "hit": 2.0, "miss": 12.0, "nocache": 10.0, "floor": 0.5}

    def ask(kind: str, calls: Sequence[int]) -> list[float]:
        asked.append((kind, list(calls)))
        return [taken[kind] * (2 if calls[0] else 1)] * len(calls)

    blocks = harness.blocks(ask, lambda: next(numbers), range(2), 3)
    kinds = [*harness.WITH, *harness.WITHOUT]
    assert asked == [*((kind, [0, 1, 2]) for kind in kinds), *((kind, [3, 4, 5]) for kind in kinds[::-1])]
    found = harness.figures_of_blocks(blocks)
    assert found is not None and found["ratios"]["miss/nocache"] == {"median": 1.2, "min": 1.2, "max": 1.2}
    assert (found["hit_ms"]["min"], found["hit_ms"]["max"], found["hit_ms"]["n"]) == (2.0, 4.0, 6)
    assert harness.figures_of_blocks(dict.fromkeys(kinds, ())) is None


class Machine:
    """A fake host and GPU. To launch work takes the host 1 ms; the work takes the GPU `ms`, an event no time."""

    def __init__(self) -> None:
        self.host_ms = self.done_ms = 0.0
        self.current_stream = lambda device: "the stream"

    def work(self, ms: float) -> str:
        self.host_ms += 1.0
        self.done_ms = max(self.done_ms, self.host_ms) + ms
        return "made"

    def synchronize(self, device: Any) -> None:
        self.host_ms = max(self.host_ms, self.done_ms)

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(synchronize=lambda: self.synchronize(None))
        event.record = lambda stream: setattr(event, "at", max(self.done_ms, self.host_ms))
        event.elapsed_time = lambda other: other.at - event.at
        return event


def test_a_call_takes_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(clocks, "perf_counter", lambda: machine.host_ms / 1e3)
    clock = Clock("cuda", machine)
    machine.work(100.0)  # of another call: not counted
    spent, made = clock.time(lambda: machine.work(30.0))
    assert clock.name == EVENTS and made == "made" and spent == pytest.approx((31.0, 31.0))
    spent, _ = clock.time(lambda: setattr(machine, "host_ms", machine.host_ms + 5.0))
    assert spent == pytest.approx((5.0, 5.0))  # work of the host alone counts, too
    figures = harness.figures_of_rounds({"call": [Spent(7.0, 9.0)]}, "call", clock)
    assert (figures["call_ms"]["median"], figures["host"]["call_ms"]["median"]) == (7.0, 9.0)


def test_calls_that_are_not_what_they_are_counted_as_stop_the_benchmark(
    models: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of another kind, a hit that runs layers, and a generation with other tokens."""
    devices, wrap = [], LLMCache.wrap
    monkeypatch.setattr(LLMCache, "wrap", lambda *args, **more: devices.append(more["device"]) or wrap(*args, **more))
    settings = latency.Settings(f"{models.models}/small", seq_len=16, entries=64, payload="last", banks="device")
    bench = latency.Bench(settings, architectures.build(settings.model, 0, "cpu"))
    bench.fill()
    with torch.inference_mode():
        fresh = [bench.fresh() for _ in range(10)]
        assert len(bench.block("miss", fresh)) == 10
        stats = bench.cache.stats()
        assert (stats.n_stored, stats.n_evicted_total) == (64, 10)  # banks are full, so each miss evicts
        with pytest.raises(RuntimeError, match="10 of 10 calls in a block were not the miss"):
            bench.block("miss", fresh)  # stored by now
        honest = bench.cache.stats
        monkeypatch.setattr(bench.cache, "stats", lambda: replace(honest(), n_layers_skipped=0))
        with pytest.raises(RuntimeError, match=r"hits \{'paper': 1, 'layers run': 3\}"):
            bench.run()
    generate = decode._Ways.generate
    monkeypatch.setattr(
        decode._Ways, "generate", lambda ways, kind, *more: generate(ways, kind, *more) + (kind == "exact_hit")
    )
    with pytest.raises(RuntimeError, match="exact_hit had 1 hits, or other tokens"):
        decode.measure(settings.model, prompt_tokens=4, new_tokens=2, rounds=1, banks="host")
    assert devices == ["model", "cpu"]  # banks are where they are asked to be


def test_a_miss_that_no_graph_ran_stops_the_benchmark(models: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"measure": "compiled", "models": ["bert"], "batch_sizes": [2], "seq_lens": [12], "buckets": [16]}
    monkeypatch.setattr(LLMCache, "compile", lambda *args, **settings: None)
    monkeypatch.setattr(torch, "compile", lambda model, **settings: model)
    with pytest.raises(RuntimeError, match="a miss_compiled call had 0 hits and 0 rows run by a graph"):
        measured(values | {"backend": "eager", "rounds": 10}, models)
    monkeypatch.setattr(LLMCache, "compile", lambda *args, **settings: CacheConfig.make({"tau": "no"}))
    (row,) = measured(values | {"rounds": 10}, models).rows  # what cannot be compiled is left empty and told
    assert row["not_run"].startswith("tau") and row["nocache_ms"] is row["miss_compiled_ratio"] is row["bucket"] is None
