"""Figures of metrics, worked out by hand."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.measures.bound import _of_claim
from experiments.measures.harness import Pass
from experiments.measures.layers import choose_taus
from experiments.measures.parity import difference
from experiments.measures.service import figures, share_of_bound
from experiments.measures.trust import by_intent
from experiments.metrics.metrics import Trace, hit_rates, interval, latencies, percentiles, quality, speed
from experiments.runs.grid import make_experiment
from tests.experiments.helpers import learning


def words(numbers: Sequence[int], clusters: Sequence[int] | None = None) -> Any:
    """Return a workload without a model, in which even answers are right."""
    names = clusters or range(len(numbers))
    return SimpleNamespace(
        requests=[
            SimpleNamespace(id=str(name), cluster=None, reference=number)
            for name, number in zip(names, numbers, strict=True)
        ],
        is_changed=lambda one, other: one != other,
        scores=lambda answers: np.array([float(answer % 2 == 0) for answer in answers]),
        extras=lambda answers: {"largest": float(max(answers))},
        show=str,
    )


def trace_of(ms: Any, served: Any, evicting: Any = None) -> Trace:
    times = np.array(ms, dtype=np.float64)
    evicted = np.zeros(times.shape, dtype=bool) if evicting is None else np.array(evicting)
    return Trace(times, np.array(served), evicted, (), ())


def test_quality() -> None:
    base, answers = [0, 1, 2, 4, 4, 0, 1, 2, 4, 4], [0, 1, 9, 8, 4, 0, 1, 9, 8, 4]
    hits = np.array([False, True, True, True, True] * 2)
    found = quality(words([0] * 10), base, answers, hits)
    assert (found["accuracy"], found["accuracy_nocache"]) == (0.6, 0.8) and found["extras"] == {"largest": 9.0}
    assert found["accuracy_drop"] == pytest.approx(0.2)
    assert (found["changed_answers"], found["changed_per_hit"]) == (0.4, 0.5)
    assert all(found[f"{name}_ci"][0] < found[name] < found[f"{name}_ci"][1] for name in ("accuracy", "accuracy_drop"))
    assert quality(words([0] * 10), base, base, ~hits & False)["changed_per_hit"] is None


def test_an_interval_has_the_width_of_the_means_deviation() -> None:
    values, alone = np.repeat([1.0, 0.0], [300, 700]), np.arange(1000)
    width = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert interval(values, alone) == pytest.approx([0.3 - width, 0.3 + width], abs=0.003)
    assert interval(values, alone) == interval(values, alone, seed=0) != interval(values, alone, seed=1)


@pytest.mark.parametrize(("by", "rate", "bounds"), [("computed", 0.0, [0, 0.3085]), ("exact", 1.0, [0.6915, 1])])
def test_clusters_that_agree_are_as_many_witnesses(by: str, rate: float, bounds: list[float]) -> None:
    """Clopper-Pearson bounds for 0 and 10 of 10 clusters, though each cluster has five requests."""
    found = hit_rates(np.array([by] * 50), np.arange(50) % 10)
    assert found["hit_rate"] == rate and found["hit_rate_ci"] == pytest.approx(bounds, abs=1e-4)


def test_one_text_that_is_asked_often_is_one_witness() -> None:
    """100 of 200 requests are one text whose answer always changed."""
    asked, hits = [0] * 100 + list(range(1, 101)), np.ones(200, dtype=bool)
    found = quality(words(asked, asked), asked, [-1] * 100 + asked[100:], hits)
    low, high = found["changed_answers_ci"]
    assert found["changed_answers"] == 0.5 and low == 0.0 and high > 0.65  # a resample may hold the text several times
    others = list(range(200))
    alone = quality(words(others), others, [-1] * 100 + others[100:], hits)
    assert alone["changed_answers_ci"] == pytest.approx([0.429, 0.571], abs=0.001)


def test_hit_rates() -> None:
    found = hit_rates(np.array(["computed", "bypassed", "exact", "semantic", "semantic"]), np.arange(5))
    assert (found["hit_rate"], found["hits_by_rung"]) == (0.6, {"exact": 0.2, "semantic": 0.4})
    none = hit_rates(np.array(["computed", "bypassed"]), np.arange(2))
    assert none == {"hit_rate": 0.0, "hit_rate_ci": pytest.approx([0.0, 1 - 0.025**0.5]), "hits_by_rung": {}}


def test_speed_is_the_median_ratio_of_sums() -> None:
    """10/5, 10/8, 10/10."""
    base = trace_of([[4, 6], [5, 5], [2, 8]], [["computed"] * 2] * 3)
    trace = trace_of([[4, 1], [6, 2], [8, 2]], [["computed", "exact"], ["computed", "semantic"], ["computed", "exact"]])
    found = speed(base, trace)
    assert (found["speedup"], found["speedup_min"], found["speedup_max"]) == (1.25, 1.0, 2.0)
    assert (found["miss_overhead"], found["hit_cost"]) == pytest.approx((18 / 11 - 1, 5 / 19))
    assert speed(base, base)["hit_cost"] is None


def test_latencies_are_told_by_outcome_and_percentiles_need_enough_values() -> None:
    base = trace_of([[9, 9, 9, 9, 9]], [["computed"] * 5])
    served = [["computed", "computed", "exact", "semantic", "bypassed"]]
    found = latencies(base, trace_of([[1, 2, 3, 4, 5]], served, [[False, True, False, False, False]]))
    names = ["nocache_ms", "cache_ms", "hit_ms", "exact_hit_ms", "miss_ms", "filling_miss_ms"]
    assert {name: times and times["median"] for name, times in found.items()} == dict(
        zip(names, [9, 3, 4, 3, 2, 1], strict=True)
    )
    assert latencies(base, base)["hit_ms"] is None
    assert percentiles(np.arange(201.0)) == {"median": 100, "p90": 180, "p99": 198, "n": 201}
    assert percentiles(np.arange(101.0)) == {"median": 50, "p90": None, "p99": None, "n": 101}
    assert percentiles(np.array([])) is None


def test_the_ratio_of_a_round_is_of_whole_passes() -> None:
    """Model alone, cache, model alone: 2, 1, 4; then cache, model alone, cache: 1, 3, 2."""
    taken = [("nocache", 0, 2.0), ("llmcache", 0, 1.0), ("nocache", 0, 4.0)]
    taken += [("llmcache", 1, 1.0), ("nocache", 1, 3.0), ("llmcache", 1, 2.0)]
    by = {"nocache": "computed", "llmcache": "semantic"}
    passes = [Pass(who, i, s, 0.0, np.array([1.0]), np.array([by[who]]), [0]) for who, i, s in taken]
    found = figures(make_experiment(learning("service")), words([0]), passes)
    assert (found["speedup_min"], found["speedup_max"]) == (2.0, 3.0)
    assert found["miss_ms"] is None and found["hit_rate"] == 1.0 and found["share_of_bound"] is None
    assert share_of_bound(4.0, 0.8) == pytest.approx(0.8)


def test_rates_of_an_intent_are_of_its_own_requests() -> None:
    intents = [0] * 3 + [1] * 10
    served = np.array(["computed", "semantic", "semantic", "semantic"] + ["computed"] * 9)
    found = by_intent(words(intents), [7] * 13, [7, 8, 7, *[7] * 10], served)
    assert found is not None and (found["n_intents"], found["n_over"], found["median"]) == (2, 1, pytest.approx(1 / 6))
    names = ("intent", "n", "n_hits", "n_changed", "changed_per_hit")
    assert [found["worst"][name] for name in names] == ["0", 3, 2, 1, 0.5]


def test_violations_of_a_bound_are_counted() -> None:
    common = {"max_drop": 0.1, "n_tested": 100, "rungs": "draft", "hit_rate": 0.5}
    found = _of_claim(
        [
            common
            | {"changed_answers": rate, "limit": limit, "is_violated": rate > 0.1, "is_beyond_chance": rate > 0.15}
            for rate, limit in ((0.2, 0.3), (0.12, 0.3), (0.0, None))
        ]
    )
    assert (found["n_violated"], found["n_beyond_chance"], found["n_calibrations"]) == (2, 1, 3)
    assert (found["turned_on"], found["changed_answers_most"], found["rungs"]) == (2 / 3, 0.2, {"draft": 3})


def test_the_lowest_threshold_that_is_pure_enough() -> None:
    similarity = np.array([[-1, 0.9, 0.8, 0.7, 0.6, 0.5, *[0.1] * 6]], dtype=np.float32)
    likeness = np.array([[0, 1, 1, 0, 0, 1, *[0] * 6]], dtype=np.float32)
    assert choose_taus(similarity, likeness, 0.95, 1.0) == {0: pytest.approx(0.8)}
    assert choose_taus(similarity, likeness * 0, 0.95, 1.0) == {0: 1.0}


@pytest.mark.parametrize(
    ("tokens", "dtype", "expected"),
    [
        ([1, 0, 1], torch.float32, None),
        ([1, 1, 2], torch.bfloat16, (1, 0.25, True)),  # 8 and 7.75 are a near tie where 4 roundings of 8 are 0.25
        ([1, 1, 2], torch.float32, (1, 0.25, False)),
        ([1, 0, 0], torch.bfloat16, (2, 1.0, False)),
    ],
)
def test_a_near_tie_is_told_from_a_wrong_token(tokens: list[int], dtype: torch.dtype, expected: Any) -> None:
    scores = [torch.tensor([[0.0, 4.0, 1.0]]), torch.tensor([[8.0, 7.75, -torch.inf]]), torch.tensor([[1.0, 2.0, 0.0]])]
    reference = torch.tensor([[9, 9, 1, 0, 1]])
    found = difference(reference, torch.tensor([[9, 9, *tokens]]), scores, 4, dtype)
    assert (found and (found.step, found.gap, found.is_near_tie)) == expected
