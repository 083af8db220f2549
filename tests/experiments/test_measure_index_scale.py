"""Measure `index_scale`: every index is filled, searched and changed, and told of in a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data.vectors import Vectors
from experiments.report.pages.scale import index_scale
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured, told

VALUES: dict[str, Any] = {
    "measure": "index_scale",
    "n": 300,
    "dim": 16,
    "indexes": ["auto", "flat", "hnsw"],
    "most": {"hnsw": 299},
    "searches": 20,
    "changes": 5,
}


def kept(folder: Path, values: dict[str, Any]) -> None:
    """A finished run of the measure."""
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(measured(values).metrics, allow_nan=False))
    (folder / "env.json").write_text(json.dumps({"load_average": 9.0, "n_cpus": 2}))
    (folder / "config.yaml").write_text(json.dumps({**values, "seed": 0}))


def test_indexes_are_measured_and_those_left_out_are_not() -> None:
    outcome = measured(VALUES)
    assert [row["index"] for row in outcome.rows] == ["auto", "flat"]
    for row in outcome.rows:
        assert row["recall"] == 1  # both are exact so far
        assert row["bytes_per_entry"] == 4 * 16 + 8
        assert 0 < row["search_p50_ms"] <= row["search_p99_ms"]
        assert row["inserts_per_s"] > 0 and row["removes_per_s"] > 0
    assert "recall" in told(VALUES, outcome)


def test_a_page_has_every_index(tmp_path: Path) -> None:
    assert "not measured" in index_scale(tmp_path)
    for n in (300, 200):
        kept(tmp_path / "index_scale" / f"n={n}", {**VALUES, "n": n})
    lines = index_scale(tmp_path).splitlines()[2:]
    assert [line.split(" | ")[2:4] for line in lines] == [
        [str(n), index]
        for n, indexes in ((200, ("auto", "flat", "hnsw")), (300, ("auto", "flat")))
        for index in indexes
    ]
    assert all("100.0 %" in line and "|  |" in line for line in lines)  # the machine was busy: no times


@pytest.mark.parametrize("drawn", ["paraphrases", "uniform"])
def test_vectors_come_again_and_lie_as_told(drawn: Any) -> None:
    vectors = Vectors(drawn, 1000, 64, seed=0)
    (stored,), asked = vectors.stored(), vectors.asked(50)
    assert np.array_equal(stored, next(vectors.stored())) and np.array_equal(asked, vectors.asked(50))
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-6)
    similarity = asked @ stored.T
    median, nearest = np.median(similarity), np.median(similarity.max(axis=1))
    expected = (0.5, 0.9) if drawn == "paraphrases" else (0.0, 0.4)
    assert (median, nearest) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexes": ["tree"]}, "tree"),
        ({"n": 0}, "n"),
        ({"most": {"auto": 1, "flat": 1, "hnsw": 1}}, "no index is left"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(VALUES, **changes)
