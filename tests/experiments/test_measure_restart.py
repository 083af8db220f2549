"""The measure `restart`: what a killed process left serves the next one, with the model's own tokens."""

from pathlib import Path

from experiments.support.folders import Folders
from tests.experiments.measuring import measured, told
from tests.experiments.test_measure_latency import save_gpt2

RESTART = {
    "measure": "restart",
    "models": ["tiny"],
    "lengths": [32, 64],
    "question": 5,
    "rounds": 1,
    "store_least_tokens": 0,
}


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
