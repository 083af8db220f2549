"""Measure `trust`: a replay equals serving; limits chosen in advance are reported apart from hindsight."""

from typing import Any

import numpy as np
import pytest

from experiments.measures import trust
from experiments.measures.base import Outcome
from experiments.metrics.frontier import curves, of_curve
from experiments.replay.rehearsal import Frozen, Rehearsal, empty, grow
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache import ConfigError
from llmcache.lab import RiskTarget
from tests.experiments.measuring import LEARN, TASK, N, learning, measured

DROPS = (0.05, 0.2)
BASELINES = ("paper", "doccache", "exact_response", "semantic_response")
PARTS = ("student",)
VALUES = learning("trust", max_drops=[*DROPS], taus=[0.8, 0.95], n_limits=4, encoder="untrained")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return measured(VALUES)


def live(rehearsal: Rehearsal, sources: Any) -> tuple[float, list[Any], list[str]]:
    """Calibrate, then serve the later requests; return the limit, their answers and their rungs."""
    empty(rehearsal.cache, rehearsal.observed)
    found = rehearsal.calibrated.calibrate(rehearsal.observed[:LEARN], RiskTarget(0.2, 0.05, "changed", sources, 0))
    assert found.chosen is not None
    answers, served = [], []
    for number in range(LEARN, N):
        answers.append(rehearsal.workload.answer(rehearsal.cache(**rehearsal.workload.requests[number].inputs), number))
        served.append(rehearsal.cache.last[0].rung or "computed")
    assert {"semantic", "computed", "exact"} <= set(served)
    return found.chosen.limit, answers, served


def test_a_replay_of_growing_sources_equals_serving(rehearsal: Rehearsal) -> None:
    limit, answers, served = live(rehearsal, "growing")
    again, sources = grow(rehearsal.calibrated, rehearsal.observed[:LEARN], rehearsal.observed[LEARN:], limit)
    assert again.tolist() == served
    assert rehearsal.answers_from(LEARN, sources) == answers
    assert answers != rehearsal.answers[LEARN:]


def test_a_replay_of_frozen_sources_equals_serving(rehearsal: Rehearsal) -> None:
    limit, answers, served = live(rehearsal, "frozen")
    held = {source.key for source in rehearsal.calibrated.fitter.sources}
    sources = [case for case in rehearsal.observed[:LEARN] if case.row.key in held]
    rehearsal.calibrated.fitter.set_sources(sources)
    again, found = Frozen(rehearsal.calibrated, sources, rehearsal.observed[LEARN:]).serve(limit)
    assert again.tolist() == served
    assert rehearsal.answers_from(LEARN, found) == answers


def test_every_way_is_counted_on_the_later_requests(outcome: Outcome) -> None:
    metrics = outcome.metrics
    parts = [(name, "frozen") for name in PARTS]
    ways = [("llmcache", "growing"), ("llmcache", "frozen"), *parts, *((name, None) for name in BASELINES)]
    assert curves(metrics["points"]) == ways
    assert (metrics["learn"], metrics["n_counted"], metrics["n"]) == (LEARN, N - LEARN, N)
    for point in metrics["points"]:
        n_hits = point["hit_rate"] * metrics["n_counted"]
        assert n_hits == pytest.approx(round(n_hits))
        assert point["accuracy"] == pytest.approx(metrics["nocache"]["accuracy"] - point["accuracy_drop"])
    (exact,) = of_curve(metrics["points"], ("exact_response", None))
    assert 0 < exact["hit_rate"] < 1 and exact["changed_answers"] == 0
    assert all(point["hit_rate"] >= exact["hit_rate"] for point in of_curve(metrics["points"], ("paper", None)))
    frozen = [point["hit_rate"] for point in of_curve(metrics["points"], ("llmcache", "frozen"))]
    assert frozen == sorted(frozen) and frozen[0] < frozen[-1]


def test_what_is_chosen_in_advance_stands_apart(outcome: Outcome) -> None:
    rows = outcome.metrics["calibrated"]
    both = ("frozen", "growing")
    ways = [
        *(("llmcache", sources) for sources in both),
        *((name, "frozen") for name in PARTS),
        *((name, sources) for name in BASELINES if name != "exact_response" for sources in both),
    ]
    named = [(row["method"], row["sources"], row["max_drop"]) for row in rows]
    assert named == [(*way, drop) for way in ways for drop in DROPS]
    for row in rows:
        assert row["is_certified"] == (row["sources"] == "frozen" and row["limit"] is not None)
        assert row["bound"] is None or row["bound"] <= row["max_drop"]
    assert any(row["hits_by_rung"].get("semantic", 0) > 0 for row in rows)
    for shown in outcome.metrics["summary"]:
        assert shown["hindsight hits"] is None or shown["calibrated hits"] is None
    assert len({tuple(shown) for shown in outcome.metrics["summary"]}) == 1


def test_errors_are_told_by_intent_and_by_hit(outcome: Outcome) -> None:
    n_intents = 0
    for row in outcome.metrics["calibrated"]:
        by_intent, worst = row["by_intent"], row["by_intent"]["worst"]
        assert 0 <= by_intent["median"] <= worst["changed"] <= 1 and worst["changed"] >= row["changed_answers"]
        assert worst["changed"] == worst["n_changed"] / worst["n"] and worst["n_changed"] <= worst["n_hits"]
        assert worst["changed_ci"][0] <= worst["changed"] <= worst["changed_ci"][1]
        n_intents = max(n_intents, by_intent["n_intents"])
        if row["changed_per_hit"] is not None:
            assert row["changed_per_hit"] * row["hit_rate"] == pytest.approx(row["changed_answers"])
    assert n_intents > 5


def test_rates_of_an_intent_are_of_its_own_requests(rehearsal: Rehearsal) -> None:
    counted, base = rehearsal.workload, rehearsal.answers
    names = [request.reference for request in counted.requests]
    one = max(set(names), key=names.count)
    answers = [(answer + 1) % 5 if name == one else answer for answer, name in zip(base, names, strict=True)]
    served = np.where(np.array(names) == one, "semantic", "computed")
    found = trust.by_intent(counted, base, answers, served)
    assert found is not None
    changed = sum(a != b for a, b in zip(base, answers, strict=True))
    assert (found["worst"]["n"], found["worst"]["n_changed"]) == (names.count(one), changed)
    assert found["worst"]["intent"] == counted.show(one) and found["median"] == 0.0 and found["n_over"] == 1


def test_a_stream_that_ends_too_early_is_refused() -> None:
    with pytest.raises(ConfigError, match="the stream has 200 requests; learn from fewer"):
        measured(VALUES, task=TASK | {"limit": LEARN})


def test_requests_of_several_rows_are_refused() -> None:
    task = make_task({"name": "openbookqa", "model": "untrained", "data": "made", "limit": 5})
    with pytest.raises(ConfigError, match="row by row"):
        Rehearsal(build(task, Folders(), 0), {})
