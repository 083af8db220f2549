"""Measure `ray_replicas`: the cost of a killed replica, and how requests are counted."""

from pathlib import Path
from typing import Any

import pytest

from experiments.measures.over_http.client import Reply
from experiments.measures.over_http.killing import AFTER, BEFORE, MISSING, PHASES, UPDATE, Asked, Span
from experiments.measures.ray_replicas import point, row_of
from experiments.models.loading import load as load_model
from experiments.support.redis_server import check_installed
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured, told


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_what_it_had_in_its_hands(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="needs Ray: make setup", exc_type=ImportError)
    try:
        check_installed()
    except ConfigError as error:
        pytest.skip(str(error))
    made = load_model("untrained")
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    values = {"measure": "ray_replicas", "model": str(tmp_path), "kills": 1, "span_s": 2.0, "texts": 10}
    outcome = measured(values)
    by_phase = {found["phase"]: found for found in outcome.metrics["points"]}
    assert list(by_phase) == list(PHASES) and outcome.metrics["n_kills"] == 1
    for found in by_phase.values():
        assert found["n"] > 0 and (found["n_failed_others"], found["n_lost"], found["n_wrong"]) == (0, 0, 0)
    assert by_phase[MISSING]["hit_rate"] > 0
    assert "| a replica is missing |" in told(values, outcome)


def test_a_request_that_failed_was_in_the_hands_of_the_replica_or_was_not() -> None:
    ok, failed = Reply(200, b"[]", "exact"), Reply(500, b"")
    spans = [Span(10.0, 15.0, MISSING), Span(30.0, 36.0, MISSING), Span(50.0, 60.0, UPDATE)]

    def row(sent_s: float, *tries: tuple[float, Reply]) -> dict[str, Any]:
        return row_of(Asked("a", True, sent_s, list(tries)), spans, False)

    rows = [
        row(9.0, (9.1, ok)),
        row(9.9, (10.1, failed), (10.7, ok)),  # in flight on the killed replica
        row(10.1, (10.2, failed), (10.8, failed), (11.4, failed)),  # sent after the kill
        row(16.0, (16.1, Reply(200, b"[]", "none"))),
        row(29.9, (30.1, failed), (30.7, ok)),
        row(35.0, (35.1, ok)),
        row(49.9, (50.1, failed), (50.7, ok)),  # an update, no kill
        row(55.0, (55.1, ok)),
    ]
    assert [one["phase"] for one in rows] == [BEFORE, BEFORE, MISSING, AFTER, AFTER, MISSING, AFTER, UPDATE]
    before, missing, after, update = (point(rows, phase) for phase in PHASES)
    assert (before["n"], before["n_failed_in_hands"], before["n_failed_others"], before["hit_rate"]) == (2, 1, 0, 1)
    assert (missing["n"], missing["n_failed_in_hands"], missing["n_failed_others"], missing["n_lost"]) == (2, 0, 1, 1)
    assert (after["n_failed_in_hands"], after["n_failed_others"], after["n_repeats"]) == (1, 1, 3)
    assert after["hit_rate"] == pytest.approx(2 / 3) and (update["n"], update["n_failed_others"]) == (1, 0)
    assert point([], BEFORE)["hit_rate"] is None
