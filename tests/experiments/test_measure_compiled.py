"""The measure `compiled`: six kinds of call, each checked to be its kind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.measures.compiled import Bench, Shape
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache import LLMCache
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
    for name, family in {"tiny": "bert", "causal": "gpt2", "grouped": "llama"}.items():
        build(CLASSIFIERS[family]).save_pretrained(path / name)
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


def test_what_cannot_be_compiled_is_left_empty_and_told(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise ConfigError("compile: no graph could be made, see the log")

    monkeypatch.setattr(LLMCache, "compile", refuse)
    outcome = measured(SMALL, folders)
    (row,) = outcome.rows
    assert row["not_run"] == "compile: no graph could be made, see the log"
    assert row["nocache_ms"] is row["miss_compiled_ratio"] is row["bucket"] is None
    shape = "tiny, float32, 2 rows of 12 tokens, host banks"
    assert f"Not run: {shape}: compile: no graph could be made, see the log" in told(SMALL, outcome)


def test_a_miss_that_no_graph_ran_stops_the_measure(folders: Folders) -> None:
    bench = Bench(make_experiment(SMALL), str(folders.models / "tiny"), Shape("float32", 2, 12, "host"))
    bench._caches["_compiled"] = plain = bench._caches[""]  # which has no graphs
    bench._models |= dict.fromkeys(("miss_compiled", "hit_compiled"), plain.model)
    with pytest.raises(RuntimeError, match="a miss_compiled call had 0 hits and 0 rows run by a graph"):
        bench.measure()
