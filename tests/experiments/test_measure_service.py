"""Measure `service`: whole passes, each from the learned state only, and their figures."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.measures.service import Pass, figures, order_of_passes, share_of_bound
from experiments.measures.set_rates import with_repeats
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from experiments.tasks import build
from tests.experiments.measuring import LEARN, TASK, learning, measured, told

N = 250
VALUES = learning("service", task=TASK | {"limit": N}, max_drops=[0.3], threads=1, rounds=2)


def test_passes_alternate_and_figures_are_of_what_was_served_alone() -> None:
    before = torch.get_num_threads()
    outcome = measured(VALUES)
    assert torch.get_num_threads() == before
    rows = [(row["threads"], row["round"], row["who"]) for row in outcome.rows]
    assert rows == [(1, number, who) for number in (0, 1) for who in order_of_passes(number)]
    assert [who for _, _, who in rows[:6]] == ["nocache", "llmcache"] * 3
    assert all(row["seconds"] > row["drained_s"] >= 0 for row in outcome.rows)
    assert all(row["drained_s"] < 1e-3 and row["computed"] == 1.0 for row in outcome.rows if row["who"] == "nocache")
    # If a pass had the entries of the one before, all would be exact hits.
    computed = {row["computed"] for row in outcome.rows if row["who"] == "llmcache"}
    assert len(computed) == 1 and 0 < computed.pop() < 1
    metrics = json.loads(json.dumps(outcome.metrics, allow_nan=False))
    assert (metrics["n_counted"], len(metrics["ways"]), len(metrics["summary"])) == (N - LEARN, 1, 1)
    (way,) = metrics["ways"]
    assert 0 < way["hit_rate"] < 1 and way["bypassed"] == 0
    assert way["hit_ms"]["n"] + way["miss_ms"]["n"] == way["plain_ms"]["n"] == 3 * (N - LEARN)
    assert way["bypassed_ms"] is None
    assert 0 <= way["changed_answers"] <= 1 and way["audit"]["n_waiting"] == 0


def test_without_a_claim_each_pass_begins_empty_and_serves_repeats_alone() -> None:
    done = measured(VALUES, learn=0, cache={"auto_bypass": False}, rounds=1)
    (way,) = done.metrics["ways"]
    assert (way["max_drop"], way["changed_answers"], way["limit"], way["audit"]) == (None, 0.0, None, None)
    texts = [request.text for request in build(make_experiment(VALUES).task, Folders(), 0).requests]
    assert way["hit_rate"] == pytest.approx(1 - len(set(texts)) / N) and done.metrics["n_counted"] == N


def test_the_ratio_of_a_round_is_of_whole_passes() -> None:
    def one(who: str, number: int, seconds: float) -> Pass:
        served = "computed" if who == "nocache" else "semantic"
        return Pass(who, number, seconds, 0.0, np.array([1.0]), np.array([served]), [0])

    workload = SimpleNamespace(
        requests=[SimpleNamespace(cluster=None, id="0")],
        is_changed=lambda one, other: one != other,
        scores=lambda answers: np.ones(len(answers)),
        extras=lambda answers: {},
    )
    passes = [
        one(who, number, seconds)
        for number, taken in enumerate([(2.0, 1.0, 4.0), (1.0, 3.0, 2.0)])
        for who, seconds in zip(order_of_passes(number), taken, strict=True)
    ]
    got = figures(make_experiment(VALUES), workload, passes)
    assert (got["speedup_min"], got["speedup_max"]) == (2.0, 3.0)
    assert got["miss_ms"] is None and got["hit_rate"] == 1.0 and got["share_of_bound"] is None
    assert share_of_bound(4.0, 0.8) == pytest.approx(0.8)


RATES = VALUES | {"measure": "set_rates", "hit_rates": [0.5, 0.8], "n": 200, "rounds": 1}


def test_a_stream_repeats_as_often_as_it_is_told_to() -> None:
    repeats = with_repeats(100, 0.8, 200, random.Random(0))
    assert sorted(set(repeats)) == list(range(40)) and len(repeats) == 200
    assert all(
        number <= max([-1, *repeats[:i]]) + 1 for i, number in enumerate(repeats)
    )  # no repeat before its first time
    assert with_repeats(100, 0.8, 200, random.Random(0)) == repeats != with_repeats(100, 0.8, 200, random.Random(1))


@pytest.mark.parametrize("learn", [LEARN, 0])
def test_a_set_rate_is_measured_in_whole_passes(learn: int) -> None:
    options = {"answer": "class"} if learn else {"auto_bypass": False}
    task = TASK | {"limit": LEARN + 200, "data": {"path": "support_desk", "limit": 900}}
    values = RATES | {"task": task, "learn": learn, "cache": options, "max_drops": [0.1, 0.3]}
    outcome = measured(values)
    assert outcome.metrics["n_counted"] == 200 and len(outcome.rows) == 6
    for way, row, rate in zip(outcome.metrics["ways"], outcome.metrics["summary"], (0.5, 0.8), strict=True):
        assert row["hit_rate_set"] == rate and 0 < way["hit_rate"] < 1
        assert learn or way["hit_rate"] == pytest.approx(rate, abs=0.01)
        assert row["share_of_bound"] == way["share_of_bound"] == way["speedup"] * (1 - way["hit_rate"])
    assert "share_of_bound" in told(values, outcome)
