"""Sentence embeddings: the task `retrieval`, the measure `embeddings`, and `pairs` on PAWS."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data.paws import Pair, apart, read_paws
from experiments.measures import embeddings
from experiments.measures.base import Outcome
from experiments.models.loading import load
from experiments.replay.recording import Recording
from experiments.support.folders import Folders
from experiments.tasks import build, make_task
from experiments.tasks.embedding import DEPTH, Retrieval
from llmcache.errors import ConfigError
from tests.experiments.measuring import LEARN, TASK, N, learning, measured, told

CACHE = {"answer": "embedding"}
RETRIEVAL = TASK | {"name": "retrieval"}
EMBEDDINGS = learning("embeddings", task=RETRIEVAL, max_drops=[0.05, 0.3], n_limits=3, cache=CACHE)
PAIRS: dict[str, Any] = {
    "measure": "pairs",
    "model": "untrained",
    "learn": LEARN,
    "max_drops": [0.3],
    "gates": [False],
    "taus": [0.8, 0.9999],
    "thresholds": [0.8],
    "cache": CACHE,
}


@pytest.fixture(scope="module")
def retrieval() -> Retrieval:
    """Three queries before a corpus of two directions."""
    corpus = np.array([[2, 0], [0, 1], [0, 3]], np.float32)
    labels = ["a", "b", "b"]
    return Retrieval(load("untrained"), ["x", "y", "z"], ["a", "b", "c"], corpus, labels, 16)


def test_a_search_finds_what_has_the_label(retrieval: Retrieval) -> None:
    east, north = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    assert retrieval.scores([east, north, north]).tolist() == [1, 1, 0]  # nothing in the corpus is a "c"
    assert retrieval.extras([east, north, north]) == {"recall_at_1": 2 / 3, "recall_at_5": 2 / 3}
    # Of three texts the only "a" comes last: its gain is 1 / log2(4). Both "b" come second and third.
    second, third = 1 / np.log2(3), 1 / np.log2(4)
    assert retrieval.scores([north, east, north]) == pytest.approx([third, (second + third) / (1 + second), 0])
    assert retrieval.extras([north, east, north]) == {"recall_at_1": 0, "recall_at_5": 2 / 3}


def test_embeddings_change_under_a_cosine_of_098(retrieval: Retrieval) -> None:
    one = np.array([1, 0], np.float32)
    for degrees, is_changed in ((0, False), (11, False), (12, True)):
        other = np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], np.float32)
        assert retrieval.is_changed(one, other) == is_changed  # cos 11.48 degrees is 0.98


def test_what_is_searched_is_not_asked() -> None:
    workload = build(make_task(RETRIEVAL), Folders(), 0)
    assert workload.facts["n_corpus"] == 350 and len(workload.requests) == N
    assert workload.metric == "ndcg_at_10" and DEPTH == 10


@pytest.fixture(scope="module")
def curve() -> Outcome:
    return measured(EMBEDDINGS)


def test_more_is_served_and_less_is_kept_at_looser_limits(curve: Outcome) -> None:
    hindsight = [point for point in curve.metrics["points"] if point["max_drop"] is None]
    assert len(hindsight) == 3
    for name, is_rising in (("limit", True), ("hit_rate", True), ("changed_answers", True), ("cosine_mean", False)):
        values = [point[name] for point in hindsight]
        assert values == sorted(values, reverse=not is_rising) and values[0] != values[-1], name
    assert hindsight[-1]["hit_rate"] == 1
    for point in hindsight:
        assert point["cosine_p5"] <= point["cosine_mean"] < 1
        assert point["accuracy"] == pytest.approx(curve.metrics["nocache"]["accuracy"] - point["accuracy_drop"])


def test_calibrated_limits_stand_beside_them(curve: Outcome) -> None:
    calibrated = [point for point in curve.metrics["points"] if point["max_drop"] is not None]
    assert [point["max_drop"] for point in calibrated] == [0.05, 0.3]
    assert all(point["bound"] is None or point["bound"] <= point["max_drop"] for point in calibrated)
    assert told(EMBEDDINGS, curve).count("| 0 |") >= len(curve.metrics["summary"])
    # A point without hits has the same columns.
    point = curve.metrics["points"][0]
    no_hits = point | {"accuracy_drop_ci": None, "changed_per_hit": None, "cosine_mean": None}
    some_hits = point | {"accuracy_drop_ci": [0.1, 0.2]}
    assert list(embeddings._flat(no_hits)) == list(embeddings._flat(some_hits)) == list(curve.rows[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of which every other one says the same, in the same words but one."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "paws").mkdir()
    places = [f"{a}{b}" for a in "abcdefghijklmno" for b in "klmnopqrstu"]
    first, second = "The {0} line leaves {0} at noon .", "The {0} line leaves {0} at night ."
    lines = [f"{i},{first.format(p)},{second.format(p)},{i % 2}\n" for i, p in enumerate(places)]
    (folder / "paws" / "paws_wiki_val.csv").write_text("id,sentence1,sentence2,label\n" + "".join(lines))
    return folder


def test_pairs_share_no_sentence() -> None:
    pairs = [Pair("a", "b", True), Pair("b", "c", True), Pair("d", "d", True), Pair("e", "f", False)]
    assert apart(pairs) == [pairs[0], pairs[3]]


def test_a_broken_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "paws").mkdir()
    (tmp_path / "paws" / "paws_wiki_val.csv").write_text("id,sentence1,sentence2,label\n1,a,b,maybe\n")
    with pytest.raises(ConfigError, match="line 2: not a record of this data set"):
        read_paws(tmp_path)


def test_each_way_is_counted_by_label(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "texts", partialmethod(Recording.texts, "untrained"))
    paws = measured(PAIRS, Folders(data=folder))
    ways, n = paws.metrics["ways"], paws.metrics["n"]
    named = [(way["way"], way["limit"]) for way in ways[1:]]
    assert named == [("paper", 0.8), ("paper", 0.9999), ("semantic_response", 0.8)]
    assert n == 165 - LEARN // 2 and 0 < paws.metrics["n_same"] < n
    for way in ways:
        rows = [row for row in paws.rows if all(row[key] == way[key] for key in ("way", "asked", "limit"))]
        assert len(rows) == n
        for name, is_same in (("recall", 1), ("false_reuse", 0)):
            kind = [row["by_first"] for row in rows if row["is_same"] == is_same]
            assert way[name] == pytest.approx(sum(kind) / len(kind))
        assert way["hit_rate"] == pytest.approx(sum(row["is_hit"] for row in rows) / n)
    loose, strict = ways[1], ways[2]
    assert loose["recall"] > strict["recall"] and loose["hit_rate"] == 1
    assert told(PAIRS, paws).count("| 0 |") >= len(paws.metrics["summary"])


def test_too_few_pairs_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="learn=400: the data has 165 pairs"):
        measured(PAIRS, Folders(data=folder), learn=400)
