"""Measure `adversaries`: what it reports is what a cache does with such requests."""

import pytest

from experiments.measures.adversaries import _edit, name_of
from experiments.measures.base import Outcome
from experiments.models.loading import encode
from experiments.replay.rehearsal import Rehearsal
from experiments.runs.grid import make_experiment
from experiments.support.folders import Folders
from experiments.tasks import build, make_task
from llmcache.calibration.drift import DriftDetector
from llmcache.lab import RiskTarget
from tests.experiments.measuring import LEARN, TASK, learning, measured, told

EDITED = learning("adversaries", gates=[False, True], n_edits=30)


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    return Rehearsal(build(make_task(TASK), Folders(), 0), {"answer": "class"})


@pytest.fixture(scope="module")
def edited() -> Outcome:
    return measured(EDITED)


def test_edits_are_counted_by_kind_and_setting(edited: Outcome) -> None:
    settings = edited.metrics["settings"]
    assert [setting["gate"] for setting in settings] == ["off", "on"]
    for setting in settings:
        counts, rows = setting["edits"], [row for row in edited.rows if row["gate"] == setting["gate"]]
        assert counts["all"]["n"] == len(rows) == sum(counts[kind]["n"] for kind in counts if kind != "all")
        assert counts["all"]["hit_rate"] == pytest.approx(sum(row["is_hit"] for row in rows) / len(rows))
        assert counts["all"]["false_reuse"] == pytest.approx(sum(row["is_false"] for row in rows) / len(rows))
        for row in rows:
            assert row["is_hit"] == (row["source"] is not None) >= max(row["by_origin"], row["is_false"])
            assert not row["by_origin"] or row["is_false"] == row["is_another"]
    assert sum(row["is_false"] for row in edited.rows) > 0
    off, on = (setting["edits"]["negation"] for setting in settings)
    assert on["hit_rate"] < off["hit_rate"]
    assert told(EDITED, edited).count("| support_desk | 0 |") == len(edited.metrics["summary"])


def test_edited_requests_are_served_as_a_cache_serves_them(
    edited: Outcome, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DriftDetector, "see", lambda *_: False)  # nothing but edits is unlike what it was calibrated on
    cache, calibrated = rehearsal.beside({"answer": "class", "gate": True, "audit": 0.0})
    calibrated.calibrate(rehearsal.observed[:LEARN], RiskTarget(0.2, 0.05, "changed", "frozen", 0))
    rows = [row for row in edited.rows if row["gate"] == "on"]
    texts = [one.text for one in _edit(make_experiment(EDITED), rehearsal)]  # which results leave out
    workload = rehearsal.workload
    ids = {case.row.key: one.id for case, one in zip(rehearsal.observed, workload.requests, strict=True)}
    n_hits = 0
    for row, text in zip(rows, texts, strict=True):
        cache(**encode(workload.tokenizer, text, 128))
        (outcome,) = cache.last
        if outcome.rung == "semantic":
            assert ids[str(outcome.source)] == row["source"]
            n_hits += 1
        elif outcome.rung is None:
            assert not row["is_hit"]
    assert n_hits


def test_gates_are_named_by_their_options() -> None:
    assert [name_of(gate) for gate in (False, True, {}, {"max_idf": 6.0})] == ["off", "on", "on", "max_idf=6.0"]
