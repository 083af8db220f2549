"""Measures `adversaries` and `drift`: what they report is what a cache does with such requests."""

from typing import Any

import numpy as np
import pytest

from experiments.measures import drift
from experiments.measures.adversaries import _edit, name_of
from experiments.measures.base import Outcome
from experiments.replay.rehearsal import Rehearsal
from experiments.replay.serving import ask, asking
from experiments.runs.grid import make_experiment
from experiments.support.folders import Folders
from experiments.tasks import build, make_task
from llmcache.calibration.drift import DriftDetector
from llmcache.calibration.risk_target import RiskTarget
from llmcache.errors import ConfigError
from tests.experiments.measuring import LEARN, TASK, N, learning, measured, told

EDITED = learning("adversaries", gates=[False, True], n_edits=30)
WINDOWED: dict[str, Any] = {"learn": 140, "window": 50, "n_unchanged": 3, "length": 500}
DRIFTED = learning("drift", audits=[0.0, 1.0], sources=["frozen"], **WINDOWED)


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
    asked, requests = asking(rehearsal.workload, texts, 128), rehearsal.workload.requests
    ids = {case.row.key: request.id for case, request in zip(rehearsal.observed, requests, strict=True)}
    n_hits = 0
    for i, (row, _) in enumerate(zip(rows, texts, strict=True)):
        reply = ask(cache, asked, i)
        if reply.served == "semantic":
            assert ids[str(reply.source)] == row["source"]
            n_hits += 1
        elif reply.served == "computed":
            assert not row["is_hit"]
    assert n_hits


def test_gates_are_named_by_their_options() -> None:
    assert [name_of(gate) for gate in (False, True, {}, {"max_idf": 6.0})] == ["off", "on", "on", "max_idf=6.0"]


def test_half_of_the_intents_come_after_the_change(rehearsal: Rehearsal) -> None:
    asked = rehearsal.workload.requests
    workload, change = drift.drifting(rehearsal.workload, "any", 3)
    early, late = ({r.reference for r in part} for part in (workload.requests[:change], workload.requests[change:]))
    all_of_them = {request.reference for request in asked}
    assert early | late == all_of_them and len(early) <= len(all_of_them) // 2 <= len(late - early)
    assert sorted(request.id for request in workload.requests) == sorted(request.id for request in asked)
    assert drift.drifting(rehearsal.workload, "any", 3)[0].requests == workload.requests
    assert drift.drifting(rehearsal.workload, "any", 4)[0].requests != workload.requests
    # Or of each two that are alike one comes late.
    weights = np.array([[1, 0], [0, 1], [1, 0.1], [0.2, 1], [-1, -1]], np.float32)
    assert drift._pairs(range(5), weights) == [(0, 2), (1, 3)]
    workload, change = drift.drifting(rehearsal.workload, "alike", 0)
    early = {request.reference for request in workload.requests[:change]}
    pairs = drift._pairs(sorted(all_of_them), workload.module.linear.weight.detach().numpy())
    assert early <= {intent for pair in pairs for intent in pair}
    assert all(len(early & set(pair)) <= 1 for pair in pairs)


@pytest.fixture(scope="module")
def drifted() -> Outcome:
    return measured(DRIFTED)


def test_what_changes_is_told_by_window(drifted: Outcome) -> None:
    change = drifted.metrics["change"]
    for figures in drifted.metrics["runs"]:
        windows = [row for row in drifted.rows if row["audit"] == figures["audit"]]
        assert windows[0]["first"] == 140 and any(row["first"] == change for row in windows)
        assert sum(row["n"] for row in windows) == N - 140
        late = [row for row in windows if row["after_change"]]
        n_late = sum(row["n"] for row in late)
        assert n_late == figures["n_after"] == N - change
        changed = sum(row["n"] * row["changed_answers"] for row in late) / n_late
        assert figures["changed_after"] == pytest.approx(changed)
    unchanged = drifted.metrics["unchanged"]
    assert [one["repeats"] for one in unchanged] == ["alike", "zipf"]
    for one in unchanged:
        assert (one["n_streams"], one["length"], one["n_suspended"]) == (3, 500, 0)
        assert (N - 140) * 0.9 < one["n_different"] <= N - 140  # some are the same
    n_rows = len(drifted.metrics["summary"]) + len(unchanged)
    assert told(DRIFTED, drifted).count("| support_desk | 0 |") == n_rows


def test_alarms_and_status_are_those_of_the_audit(drifted: Outcome) -> None:
    without, watched = drifted.metrics["runs"]
    assert without["requests_to_alarm"] is without["requests_expected"] is None
    assert without["status"]["first"] == without["status"]["at_change"] == "unwatched"
    assert watched["status"]["first"] == "certified"
    for figures, quiet in ((without, "unwatched"), (watched, "certified")):
        is_told = figures["requests_to_notice"] is not None or figures["noticed_too_early"]
        rang = figures["requests_to_alarm"] is not None or figures["false_alarms"]
        assert (figures["status"]["last"] == quiet) == (not rang and not is_told)
        assert 0 <= figures["n_changed_until_notice"] <= round(figures["changed_after"] * figures["n_after"])


def test_a_stream_that_changes_too_early_is_refused() -> None:
    with pytest.raises(ConfigError, match="learn=200: the intents change after"):
        measured(learning("drift"))
