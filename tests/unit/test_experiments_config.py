"""Experiment files: checked, spread to a grid, named by what they hold."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.config import Experiment, load_experiments
from experiments.results import run_id
from llmcache.errors import ConfigError

ROOT = Path(__file__).parents[2]
LEAST = {"task": "stream", "data": {"path": "a.csv"}, "model": "minilm"}


def write(folder: Path, **values: Any) -> Path:
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump(LEAST | values), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_ours_is_valid(path: Path) -> None:
    assert load_experiments(path)


def test_defaults_and_one_file_alone(tmp_path: Path) -> None:
    (run,) = load_experiments(write(tmp_path))
    assert (run.group, run.name) == ("some", "minilm")
    assert run.experiment.data.path == ("a.csv",)
    assert run.experiment.rounds == 5
    assert run.experiment.cache.tau is None


def test_the_fitted_head_decides_the_payload(tmp_path: Path) -> None:
    (mean,) = load_experiments(write(tmp_path))
    (cls,) = load_experiments(write(tmp_path, head={"pool": "cls"}))
    (ready,) = load_experiments(write(tmp_path, head={"kind": "ready"}))
    assert [run.experiment.cache.payload for run in (mean, cls, ready)] == ["mean", "cls", "auto"]
    with pytest.raises(ConfigError, match=r"cache.payload: the head reads 'mean' \(got 'cls'\)"):
        load_experiments(write(tmp_path, cache={"payload": "cls"}))


def test_lists_are_a_grid_but_files_are_joined(tmp_path: Path) -> None:
    path = write(tmp_path, data={"path": ["a.csv", "b.csv"]}, cache={"tau": [0.8, 0.9]}, seed=[0, 1])
    runs = load_experiments(path)
    assert [run.name for run in runs] == [f"minilm-tau={t}-seed={s}" for t in (0.8, 0.9) for s in (0, 1)]
    assert [(run.experiment.cache.tau, run.experiment.seed) for run in runs] == [(0.8, 0), (0.8, 1), (0.9, 0), (0.9, 1)]
    assert {run.experiment.data.path for run in runs} == {("a.csv", "b.csv")}
    layers = load_experiments(
        path, ["cache.tau=0.9", "seed=0", "cache.payload=sequence", "cache.layers=[[0, 1], [-1]]"]
    )
    assert [run.experiment.cache.layers for run in layers] == [[0, 1], [-1]]


def test_set_replaces_and_adds(tmp_path: Path) -> None:
    changes = ["cache.tau=0.85", "head.pool=cls", "limit=null", "cache.policy={name: ttl, ttl_s: 5}"]
    (run,) = load_experiments(write(tmp_path, cache={"tau": 0.9}, limit=5), changes)
    assert run.experiment.cache.tau == 0.85
    assert run.experiment.cache.policy.options == {"ttl_s": 5}
    assert run.experiment.head.pool == "cls"
    assert run.experiment.limit is None


@pytest.mark.parametrize(
    ("values", "changes", "error"),
    [
        ({"ruonds": 3}, [], "some.yaml: ruonds: unknown setting; did you mean 'rounds'[?] known: task, seed"),
        (
            {"data": {"path": "a.csv", "labl": "x"}},
            [],
            "data.labl: unknown setting; did you mean 'label'[?] known: path",
        ),
        ({"cache": {"tua": 0.9}}, [], "cache.tua: unknown setting; did you mean 'tau'"),
        ({"cache": {"tau": 1.5}}, [], r"cache.tau: tau is a cosine similarity.*got 1.5"),
        ({"head": {"fit_share": 1.0}}, [], r"head.fit_share: .*got 1.0"),
        ({"data": {}}, [], "data.path: missing"),
        ({"data": {"path": []}}, [], r"data.path: .*got \(\)|data.path: .*got \[\]"),
        ({"data": "a.csv"}, [], "data: expected a mapping of settings"),
        ({"cache": None}, [], "cache: expected a mapping of settings"),
        ({"task": "guess"}, [], "task: .*'stream'.*got 'guess'"),
        ({"seed": []}, [], "seed: the list is empty"),
        ({}, ["tau"], "--set 'tau': write key=value"),
        ({}, ["seed.x=1"], "--set 'seed.x=1': "),
        ({}, ["cache.tau=[0.8"], "not valid YAML"),
        ({}, ["cash.tau=0.8"], "cash: unknown setting; did you mean 'cache'"),
    ],
)
def test_bad_settings(values: Any, changes: list[str], error: str, tmp_path: Path) -> None:
    path = write(tmp_path, seed=values.pop("seed", 0), **values)
    with pytest.raises(ConfigError, match=error) as raised:
        load_experiments(path, changes)
    assert "\n" not in str(raised.value)


def test_a_config_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("task: stream\ndata: {path: a.csv}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="model: missing"):
        load_experiments(path)


def test_what_is_kept_can_be_run_again(tmp_path: Path) -> None:
    """The resolved settings are a config, and have the same run id."""
    values = {"tau": {0: 0.9, -1: 0.8}, "layers": [0, 1], "payload": "sequence", "policy": {"name": "ttl", "ttl_s": 5}}
    (run,) = load_experiments(write(tmp_path, cache=values))
    kept = tmp_path / "config.yaml"
    kept.write_text(yaml.safe_dump(run.experiment.to_dict()), encoding="utf-8")
    (again,) = load_experiments(kept)
    assert again.experiment == run.experiment
    assert run_id("x", again.experiment.to_dict()) == run_id("x", run.experiment.to_dict())


def test_run_ids_follow_every_setting() -> None:
    base = Experiment.make(LEAST).to_dict()
    other = Experiment.make({**LEAST, "cache": {"max_entries": 7}}).to_dict()
    assert run_id("a b/c", base) != run_id("a b/c", other)
    assert run_id("a b/c", base).startswith("a_b_c-")
