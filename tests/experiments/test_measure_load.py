"""Measure `load`: requests arrive when they do, and wait for those before them; no clock but one that is handed in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data.azure import FILE, read_arrivals
from experiments.data.streams.arrivals import azure, poisson
from experiments.measures.load import Queue, Turn, point, serve_at
from experiments.report.pages import reuse
from experiments.report.pages.files import MISSING
from experiments.report.plots import draw_all
from experiments.runs.folder import write_figures
from experiments.runs.grid import make_experiment
from experiments.support.folders import Folders
from llmcache.errors import ConfigError
from tests.experiments.measuring import LEARN, TASK, learning, measured, told

VALUES = learning("load", task=TASK | {"limit": LEARN + 200, "data": {"path": "support_desk", "limit": 900}}, threads=1)
SMALL = {"n": 200, "loads": [0.8, 3.0], "arrivals": ["poisson"], "rounds": 1}


class Clock:
    """Time that passes where something is waited for or answered, alone."""

    def __init__(self, taken_ms: list[float]) -> None:
        self.now, self.waited, self._taken_ms = 100.0, [], taken_ms

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds

    def answer(self, i: int) -> None:
        self.now += self._taken_ms[i] / 1e3


def served(arrived: list[float], taken_ms: list[float]) -> tuple[Queue, Clock]:
    clock = Clock(taken_ms)
    return serve_at(np.array(arrived), clock.answer, clock, clock.wait), clock


def test_a_request_waits_for_those_before_it_and_none_begins_before_it_arrived() -> None:
    queue, clock = served([0.0, 10.0, 15.0, 100.0], [30.0, 20.0, 5.0, 1.0])
    assert queue.begun == pytest.approx([0, 30, 50, 100]) and queue.latency_ms == pytest.approx([30, 40, 40, 1])
    assert clock.waited == pytest.approx([0.045]) and queue.busy == pytest.approx(56 / 101)


def test_times_of_arrival_do_not_depend_on_answers() -> None:
    """Lindley's recursion gives the waits of any queue of one server."""
    rng = np.random.default_rng(0)
    arrived, taken = poisson(300, None, rng) * 5.0, rng.exponential(4.0, 300)
    wait, waits = 0.0, []
    for gap, last in zip(np.diff(arrived), taken, strict=False):
        waits.append(wait)
        wait = max(0.0, wait + last - gap)
    queue, _ = served(arrived.tolist(), taken.tolist())
    assert queue.latency_ms == pytest.approx(np.array([*waits, wait]) + taken)


def test_a_cheaper_answer_gains_more_where_requests_wait() -> None:
    arrived = np.arange(200) * 10.0
    quick = np.where(np.arange(200) % 2, "computed", "exact")

    def turns(load: float) -> list[Turn]:
        plain, _ = served((arrived / load).tolist(), [10.0] * 200)
        cached, _ = served((arrived / load).tolist(), [10.0 if by == "computed" else 1.0 for by in quick])
        return [Turn("nocache", 0, plain, np.array(["computed"] * 200)), Turn("llmcache", 0, cached, quick)]

    calm, crowded = point(turns(0.5)), point(turns(1.2))
    assert calm["plain"]["p99"] == pytest.approx(10) and calm["gain_p99"] == pytest.approx(1)
    assert crowded["plain"]["p99"] > 300 and crowded["cache"]["p99"] < 15 and crowded["hit_rate"] == 0.5
    assert (calm["plain_busy"], crowded["plain_busy"]) == pytest.approx((0.5, 1.0), abs=0.01)


def write_trace(folder: Path, *lines: str) -> Path:
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return folder


def test_arrivals_have_a_mean_distance_of_one_and_those_of_the_trace_its_bursts(tmp_path: Path) -> None:
    seconds = [0, 1, 3, 4, 50, 51]
    write_trace(tmp_path, *(f"2023-11-16 18:15:{second:02}.1234567,1,2" for second in reversed(seconds)))
    assert read_arrivals(tmp_path) == seconds
    assert azure(6, tmp_path, np.random.default_rng(0)) == pytest.approx(np.array(seconds) * 5 / 51)
    for times in (azure(4, tmp_path, np.random.default_rng(1)), poisson(1000, None, np.random.default_rng(1))):
        assert times[0] == 0 and np.diff(times).mean() == pytest.approx(1) and (np.diff(times) >= 0).all()
    gaps = np.diff(poisson(5000, None, np.random.default_rng(2)))
    assert gaps.std() == pytest.approx(1, abs=0.05)
    again = [poisson(50, None, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    assert (again[0] == again[1]).all() and not (again[0] == again[2]).all()


@pytest.mark.parametrize(
    ("lines", "error"),
    [(["soon,1,2"], "line 2: not a record"), ([], "holds no records"), (["2023-11-16 18:15:46,1,2"], "has 1 arrivals")],
)
def test_a_trace_that_cannot_be_used_is_told(lines: list[str], error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        azure(2, write_trace(tmp_path, *lines), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loads": [0.0]}, "loads.0: .*greater than 0"),
        ({"arrivals": ["late"]}, "arrivals.0: .*'poisson' or 'azure'"),
        ({"n": 100}, "n: .*200"),
        ({"arrivals": ["azure"]}, "the trace is not on the hub; give a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_computed(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        measured(VALUES, **changes)


def test_both_get_the_same_requests_at_every_load(tmp_path: Path) -> None:
    values = VALUES | SMALL
    outcome = measured(values, Folders())
    assert [(row["load"], row["who"]) for row in outcome.rows] == [
        (load, who) for load in (0.8, 3.0) for who in ("nocache", "llmcache")
    ]
    for found in outcome.metrics["points"]:
        assert found["plain"]["n"] == found["cache"]["n"] == 200 and 0 < found["hit_rate"] < 1
        assert found["plain"]["p50"] <= found["plain"]["p95"] <= found["plain"]["p99"]
    shown = told(values, outcome)
    assert "| poisson | 0.8 |" in shown and "None" not in shown
    folder = tmp_path / "service_load" / "run"
    assert MISSING in reuse.load(tmp_path)
    write_figures(folder, make_experiment(values).to_dict(), {}, json.loads(json.dumps(outcome.metrics)))
    assert [path.name for path in draw_all([folder])] == ["loads.png"]
    assert len(reuse.load(tmp_path).splitlines()) == 2 + 2
    with pytest.raises(ConfigError, match="n=201: 200 requests follow those learned from"):
        measured(values, n=201)
