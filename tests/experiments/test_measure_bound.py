"""Measure `bound`: truth and claim are held against each other on requests that the calibration did not learn from."""

from collections.abc import Mapping
from typing import Any

import pytest

from experiments.measures import MEASURES, bound
from experiments.measures.base import Outcome
from experiments.report.tables import TABLES
from experiments.runs.grid import make_experiment
from experiments.runs.read import Run
from experiments.support.folders import Folders
from llmcache.errors import ConfigError

pytestmark = pytest.mark.slow

VALUES: dict[str, Any] = {
    "measure": "bound",
    "task": {"name": "held_out", "model": "untrained", "limit": 320, "data": {"path": "support_desk", "limit": 700}},
    "learn": 200,
    "max_drops": [0.05, 0.2],
    "parts": 2,
    "draws": 5,
    "cache": {"answer": "class"},
}


def run(**changes: Any) -> Outcome:
    experiment = make_experiment(VALUES | changes)
    done: Outcome = MEASURES["bound"].run(experiment, Folders())
    return done


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run()


def test_there_is_a_row_a_draw_and_claim(outcome: Outcome) -> None:
    named = [(row["part"], row["draw"], row["max_drop"]) for row in outcome.rows]
    assert named == [(part, draw, drop) for part in range(2) for draw in range(5) for drop in (0.05, 0.2)]
    metrics = outcome.metrics
    sizes = [claim["n_tested"] for claim in metrics["claims"]]
    assert all(size == pytest.approx(100, abs=10) for size in sizes)
    assert metrics["n_sources"] == 200 - max(sizes)
    assert metrics["n_population"] == 320 - metrics["n_sources"]


def test_rows_say_what_the_population_says(outcome: Outcome) -> None:
    for row in outcome.rows:
        n = outcome.metrics["n_population"]
        assert row["hit_rate"] * n == pytest.approx(round(row["hit_rate"] * n))
        assert row["is_violated"] == (row["changed_answers"] > row["max_drop"])
        assert row["bound"] is None or row["bound"] <= row["max_drop"]
        assert row["changed_answers"] <= row["hit_rate"]
    loose = [row for row in outcome.rows if row["max_drop"] == 0.2]
    assert any(row["limit"] is not None for row in loose)
    assert len({row["bound"] for row in loose}) > 3  # draws differ


def test_more_may_be_served_where_more_may_be_lost(outcome: Outcome) -> None:
    strict, loose = outcome.metrics["claims"]
    assert (strict["max_drop"], loose["max_drop"]) == (0.05, 0.2)
    assert strict["hit_rate_median"] <= loose["hit_rate_median"]
    assert strict["n_calibrations"] == loose["n_calibrations"] == 10


def test_a_seed_draws_the_same(outcome: Outcome) -> None:
    assert list(run(parts=1, draws=2).rows) == [row for row in outcome.rows if row["part"] == 0 and row["draw"] < 2]


def row(drop: float, changed: float, limit: float | None) -> Mapping[str, Any]:
    return {
        "max_drop": drop,
        "n_tested": 100,
        "hit_rate": 0.5,
        "changed_answers": changed,
        "limit": limit,
        "is_violated": int(changed > drop),
        "is_beyond_chance": int(changed > 1.5 * drop),
    }


def test_violations_are_counted() -> None:
    figures = bound._of_claim([row(0.1, 0.2, 0.3), row(0.1, 0.1, 0.3), row(0.1, 0.0, None)])
    assert (figures["n_violated"], figures["n_beyond_chance"], figures["n_calibrations"]) == (1, 1, 3)
    assert figures["turned_on"] == pytest.approx(2 / 3)
    assert figures["changed_answers_most"] == 0.2


def test_results_are_told(outcome: Outcome, tmp_path: Any) -> None:
    text = "\n".join(TABLES["bound"]([Run("trust_bound", tmp_path, {"measure": "bound"}, {}, outcome.metrics)]))
    assert text.count("| support_desk | drawn |") == 2 and "/ 320 |" in text


@pytest.mark.parametrize("kind", ["bursts", "repeats", "shuffled"])
def test_in_an_order_in_time_what_follows_is_the_truth(kind: str) -> None:
    done = run(arrival={"name": kind, "n": 260} if kind == "repeats" else {"name": kind})
    named = [(row["part"], row["draw"], row["max_drop"]) for row in done.rows]
    assert named == [(part, 0, drop) for part in range(2) for drop in (0.05, 0.2)]
    metrics = done.metrics
    assert (metrics["arrival"], metrics["n_population"]) == (kind, 60 if kind == "repeats" else 120)
    for row in done.rows:
        n_hits = row["hit_rate"] * metrics["n_population"]
        assert n_hits == pytest.approx(round(n_hits))
        assert row["is_violated"] == (row["changed_answers"] > row["max_drop"])
        assert row["is_beyond_chance"] <= row["is_violated"]
    assert [claim["n_calibrations"] for claim in metrics["claims"]] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"arrival": {"name": "repeats", "n": 200}}, "arrival.n=200: nothing would follow"),
        ({"arrival": {"name": "late"}}, "arrival.name"),
        ({"max_drops": [0.001]}, "learn=200: 200 requests cannot show a loss of at most 0.001"),
        ({"parts": 0}, "parts"),
        ({"draws": 0}, "draws"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        make_experiment(VALUES | changes)


def test_a_stream_is_observed_once_for_all_orders_in_which_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[int] = []
    rehearse = bound.Bound.rehearse
    bound._rehearsed.cache_clear()
    monkeypatch.setattr(
        bound.Bound, "rehearse", lambda self, folders: rehearsed.append(self.seed) or rehearse(self, folders)
    )
    for seed in (0, 1):
        for name in ("shuffled", "bursts"):
            run(parts=1, seed=seed, arrival={"name": name})
    assert rehearsed == [0, 1]
