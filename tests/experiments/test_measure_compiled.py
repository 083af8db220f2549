"""The measure `compiled`: four ways to make a call, each of which is what it is counted as."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.measures.compiled import Bench
from experiments.runs.grid import make_experiment
from experiments.support.folders import Folders
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured, told
from tests.tiny_models import CLASSIFIERS, build

SMALL = {
    "measure": "compiled",
    "models": ["tiny"],
    "batch_sizes": [2],
    "seq_lens": [12],
    "buckets": [16],
    "rounds": 10,
    "backend": "eager",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    path: Path = tmp_path_factory.mktemp("models")
    build(CLASSIFIERS["bert"]).save_pretrained(path / "tiny")
    return Folders(models=path)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_a_row_has_all_kinds_of_call_and_the_table_tells_them(folders: Folders) -> None:
    outcome = measured(SMALL, folders)
    (row,) = outcome.rows
    assert (row["model"], row["rows"], row["tokens"], row["bucket"]) == ("tiny", 2, 12, 16)
    detail = outcome.metrics["calls"][0]["detail"]
    for kind in ("nocache", "nocache_compiled", "miss", "miss_compiled", "hit", "hit_compiled"):
        assert row[f"{kind}_ms"] == detail[f"{kind}_ms"]["median"] > 0
        assert detail[f"{kind}_ms"]["n"] == 10
    assert row["miss_compiled_ratio"] == detail["ratios"]["miss_compiled/nocache"]["median"]
    text = told(SMALL, outcome)
    assert "compiled miss / no cache" in text and "| tiny | 2 | 12 | 16 |" in text


def test_a_miss_that_no_graph_ran_stops_the_measure(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(make_experiment(SMALL), str(folders.models / "tiny"), 2, 12)
    bench._caches["_compiled"]._components.compiled.close()
    with pytest.raises(RuntimeError, match="a miss_compiled call had 0 hits and 0 rows run by a graph"):
        bench.measure()


def test_lengths_beyond_the_buckets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"seq_lens: give 8 to 16.*got 17"):
        make_experiment({**SMALL, "seq_lens": [17]})
