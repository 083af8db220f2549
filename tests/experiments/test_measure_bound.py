"""Measure `bound`: compares claimed bounds with the truth on requests that the calibration did not learn from."""

from collections.abc import Mapping
from typing import Any

import pytest

from experiments.measures import bound
from experiments.measures.base import Outcome
from tests.experiments.measuring import LEARN, N, learning, measured, told

VALUES = learning("bound", max_drops=[0.05, 0.2], parts=2, draws=3)


def check_rows(outcome: Outcome) -> None:
    """Assert that the figures of each row are consistent."""
    for row in outcome.rows:
        n_hits = row["hit_rate"] * outcome.metrics["n_population"]
        assert n_hits == pytest.approx(round(n_hits))
        assert row["is_violated"] == (row["changed_answers"] > row["max_drop"])
        assert row["is_beyond_chance"] <= row["is_violated"]
        assert row["bound"] is None or row["bound"] <= row["max_drop"]
        assert row["changed_answers"] <= row["hit_rate"]


def test_there_is_a_row_a_draw_and_claim() -> None:
    outcome = measured(VALUES)
    check_rows(outcome)
    named = [(row["part"], row["draw"], row["max_drop"]) for row in outcome.rows]
    assert named == [(part, draw, drop) for part in range(2) for draw in range(3) for drop in (0.05, 0.2)]
    metrics = outcome.metrics
    sizes = [claim["n_tested"] for claim in metrics["claims"]]
    assert all(size == pytest.approx(100, abs=10) for size in sizes)
    assert metrics["n_sources"] == LEARN - max(sizes)
    assert metrics["n_population"] == N - metrics["n_sources"]
    loose = [row for row in outcome.rows if row["max_drop"] == 0.2]
    assert any(row["limit"] is not None for row in loose)
    assert len({row["bound"] for row in loose}) > 3  # draws differ
    strict, loose = metrics["claims"]
    assert (strict["max_drop"], loose["max_drop"]) == (0.05, 0.2)
    assert strict["hit_rate_median"] <= loose["hit_rate_median"]
    assert strict["n_calibrations"] == loose["n_calibrations"] == 6
    assert told(VALUES, outcome).count("| support_desk | 0 |") == 2
    again = measured(VALUES, parts=1, draws=2)  # the same seed, the same draws
    assert list(again.rows) == [row for row in outcome.rows if row["part"] == 0 and row["draw"] < 2]


def test_violations_are_counted() -> None:
    def row(changed: float, limit: float | None) -> Mapping[str, Any]:
        over = {"is_violated": int(changed > 0.1), "is_beyond_chance": int(changed > 0.15)}
        figures = {"max_drop": 0.1, "n_tested": 100, "rungs": "draft", "hit_rate": 0.5, "limit": limit}
        return figures | {"changed_answers": changed} | over

    figures = bound._of_claim([row(0.2, 0.3), row(0.1, 0.3), row(0.0, None)])
    assert (figures["n_violated"], figures["n_beyond_chance"], figures["n_calibrations"]) == (1, 1, 3)
    assert figures["turned_on"] == pytest.approx(2 / 3)
    assert figures["changed_answers_most"] == 0.2


@pytest.mark.parametrize(
    ("kind", "more", "n"), [("bursts", {}, 120), ("repeats", {"n": 260}, 60), ("shuffled", {}, 120)]
)
def test_in_an_order_in_time_what_follows_is_the_truth(kind: str, more: dict[str, int], n: int) -> None:
    done = measured(VALUES, arrival={"name": kind, **more})
    check_rows(done)
    named = [(row["part"], row["draw"], row["max_drop"]) for row in done.rows]
    assert named == [(part, 0, drop) for part in range(2) for drop in (0.05, 0.2)]
    assert (done.metrics["arrival"], done.metrics["n_population"]) == (kind, n)
    assert [claim["n_calibrations"] for claim in done.metrics["claims"]] == [2, 2]
