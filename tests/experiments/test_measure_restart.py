"""The measures `restart` and `store_kill`: what a killed process left serves the next one, and nothing wrong."""

from pathlib import Path

from experiments.measures.store_kill import Known
from experiments.support.folders import Folders
from tests.experiments.measuring import measured, told
from tests.experiments.test_measure_latency import save_gpt2

RESTART = {
    "measure": "restart",
    "models": ["tiny"],
    "conversations": [32, 64],
    "question": 5,
    "rounds": 1,
    "store_least_tokens": 0,
}
KILLED = {"measure": "store_kill", "models": {"tiny": "token"}, "kills": 2, "tokens": 32, "batch": 4, "looks": 12}


def test_a_restarted_process_serves_what_the_killed_one_had(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "tiny")
    outcome = measured(RESTART, Folders(models=tmp_path))
    assert len(outcome.rows) == 3 * 2 * 2  # ways, kinds, lengths
    rungs = {(row["way"], row["kind"]): row["rung"] for row in outcome.rows}
    assert rungs == {
        ("cold", "repeated"): None,
        ("cold", "next_turn"): None,
        **{(way, "repeated"): "exact" for way in ("restarted", "rebooted")},
        **{(way, "next_turn"): "prefix" for way in ("restarted", "rebooted")},
    }
    assert all(row["is_same"] for row in outcome.rows)
    assert "| tiny | 64 | again |" in told(RESTART, outcome)


def test_a_process_that_is_killed_while_it_writes_leaves_what_it_said_was_written(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "tiny")
    outcome = measured(KILLED, Folders(models=tmp_path))
    (point,) = outcome.metrics["points"]
    assert point["n_kills"] == 2 == len(outcome.rows) - 1
    assert point["n_looked"] > 0 and point["n_hits"] > 0
    assert not any(point[name] for name in ("n_lost", "n_after_purge", "n_damaged", "n_errors", "n_wrong"))
    assert "| tiny | 2 |" in told(KILLED, outcome)


def test_what_processes_told_says_what_has_to_be_there() -> None:
    known = Known()
    known.hear("asked", range(4))
    assert (known.asked, known.written) == ({0, 1, 2, 3}, set())
    known.hear("written", ())
    known.hear("asked", range(4, 6))
    known.hear("purges", ())
    assert (known.asked, known.written, known.purged) == ({4}, {0, 2}, set())  # of the others nothing is known
    known.hear("purged", range(6))
    assert known.purged == {1, 3, 5}
    found = [(0, True, False), (1, True, False), (2, False, True), (3, False, False), (4, False, False)]
    assert known.compare(found) == {
        "n_looked": 5,
        "n_hits": 2,
        "n_lost": 1,
        "n_waiting": 1,
        "n_after_purge": 1,
        "n_wrong": 1,
    }
    assert (known.asked, known.written, known.purged) == ({2, 3, 4}, {0, 1}, {5})
