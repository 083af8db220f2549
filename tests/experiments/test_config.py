"""Experiment files: settings are checked, lists become a grid, and settings name the runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.runs.grid import load_experiments, make_experiment
from experiments.runs.runner import run_id
from llmcache.errors import ConfigError

ROOT = Path(__file__).parents[2]
TASK = {"name": "stream", "model": "minilm", "data": {"path": "a.csv"}}
SWEEP = {"measure": "sweep", "taus": [0.9]}
LEAST = {"measure": "serve", "task": TASK, "methods": [{"method": "llmcache"}]}


def write(folder: Path, **values: Any) -> Path:
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump(({"task": TASK} if "measure" in values else LEAST) | values))
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_ours_is_valid(path: Path) -> None:
    assert load_experiments(path)


def test_lists_are_a_grid_but_files_and_methods_are_not(tmp_path: Path) -> None:
    methods = [{"method": "llmcache", "tau": 0.9}, {"method": "exact_response"}]
    path = write(tmp_path, rounds=[1, 2], seed=[0, 1], methods=methods)
    runs = load_experiments(path, ["task.data.path=[a.csv, b.csv]"])
    assert [run.name for run in runs] == [f"stream-minilm-rounds={r}-seed={s}" for r in (1, 2) for s in (0, 1)]
    assert {run.experiment.task.data.path for run in runs} == {("a.csv", "b.csv")}
    assert {run.group for run in runs} == {"some"}
    several = load_experiments(
        path, ["methods=[[{method: llmcache}], [{method: exact_response}]]", "rounds=1", "seed=0"]
    )
    assert [[method.label for method in run.experiment.methods] for run in several] == [
        ["llmcache"],
        ["exact_response"],
    ]


def test_set_reaches_sections_of_a_task_and_every_mapping_of_a_list(tmp_path: Path) -> None:
    (run,) = load_experiments(write(tmp_path), ["data.path=b.csv", "head.pool=cls", "traffic.n=50"])
    task = run.experiment.task
    assert (task.data.path, task.head.pool, task.traffic.n) == (("b.csv",), "cls", 50)
    squad = {"name": "squad_v2", "model": "spanner", "data": "made", "limit": 7}
    methods = [{"method": "doccache"}, {"method": "semantic_response", "threshold": 0.9}]
    path = write(tmp_path, task=[TASK, squad], methods=methods)
    stream, spans = load_experiments(path, ["task.limit=5", "methods.threshold=0.7"])
    assert (stream.experiment.task.limit, spans.experiment.task.limit) == (5, 5)
    assert [method.options for method in spans.experiment.methods] == [{"threshold": 0.7}] * 2
    with pytest.raises(ConfigError, match=r"'task.data.limit=5': data is no mapping, nor a list of them"):
        load_experiments(path, ["task.data.limit=5"])  # the second task has no such setting


@pytest.mark.parametrize(
    ("values", "changes", "error"),
    [
        ({"ruonds": 3}, [], "some.yaml: ruonds: unknown setting; did you mean 'rounds'[?] known: measure, seed"),
        ({"measure": "guess"}, [], "some.yaml: measure: 'guess' is not known; known: serve"),
        ({"task": "stream"}, [], "task: expected a mapping of settings"),
        ({}, ["task.data.labl=x"], "task.data.labl: unknown setting; did you mean 'label'[?] known: path"),
        ({}, ["task.data={}"], "task.data.path: missing"),
        ({}, ["task.data.path=[]"], r"task.data.path: .*got \(\)|task.data.path: .*got \[\]"),
        ({"methods": "llmcache"}, [], r"methods: give a list of at least one method \(got 'llmcache'\)"),
        ({"methods": []}, [], "methods: give a list of at least one method"),
        ({"methods": [{"tau": 0.9}]}, [], r"methods\[0\].method: missing; known: nocache, llmcache, doccache"),
        ({"methods": [{"method": "llmcache", "tau": 1.5}]}, [], r"methods\[0\].tau: tau is a .*cosine.*got 1.5"),
        ({"methods": [{"method": "doccache", "options": 3}]}, [], r"methods\[0\].options: expected a mapping"),
        ({"methods": [{"method": "doccache"}] * 2}, [], "methods: two are called 'doccache'"),
        ({"methods": [{"method": "llmcache", "label": "nocache"}]}, [], "methods: the label 'nocache' is that of"),
        ({"seed": []}, [], "seed: the list is empty"),
        ({}, ["rounds"], "--set 'rounds': write key=value"),
        ({"seed": [0, 1]}, ["seed.x=1"], "--set 'seed.x=1': seed is no mapping, nor a list of them"),
        (SWEEP | {"fingerprints": ["median"]}, [], "fingerprint: unknown name 'median'; known: attention, mean"),
        (SWEEP | {"cache": {"max_entrys": 8}}, [], "cache.max_entrys: unknown setting; did you mean 'max_entries'"),
        (SWEEP | {"live_taus": [1.5]}, [], r"cache.tau: .*got 1.5"),
        ({"measure": "observe", "cache": {"policy": "newest"}}, [], "policy: unknown name 'newest'; known: divergence"),
    ],
)
def test_bad_settings_are_one_line(values: Any, changes: list[str], error: str, tmp_path: Path) -> None:
    path = write(tmp_path, **values)
    with pytest.raises(ConfigError, match=error) as raised:
        load_experiments(path, changes)
    assert "\n" not in str(raised.value)


def test_the_settings_that_are_kept_give_the_same_run(tmp_path: Path) -> None:
    tau = {"method": "llmcache", "tau": {0: 0.9, -1: 0.8}, "layers": [0, 1], "policy": {"name": "ttl", "ttl_s": 5}}
    methods = [tau, {"method": "doccache", "threshold": 0.8, "label": "documents"}]
    (run,) = load_experiments(write(tmp_path, methods=methods))
    kept = run.experiment.to_dict()
    assert make_experiment(yaml.safe_load(yaml.safe_dump(kept))).to_dict() == kept
    others = [kept, kept | {"seed": 1}, make_experiment(LEAST).to_dict()]
    assert len({run_id("a", one) for one in others}) == 3
    assert run_id("a b/c", {"b": [1, None], "a": {"c": 0.1, "d": "ü"}}) == "a_b_c-b335881a"
    assert run_id("a", {"x": 1, "y": 2}) == run_id("a", {"y": 2, "x": 1})
    one, other = (run_id("m" * 400, {"x": i}) for i in (1, 2))
    assert one != other and len(one) < 200  # a valid file name
