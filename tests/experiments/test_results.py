"""Results on disk: written whole or not at all, kept until forced, and read as they were written."""

import json
import re
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.measures import Measure
from experiments.measures.base import Outcome
from experiments.runs import runner
from experiments.runs.grid import Named, make_experiment
from experiments.runs.runner import Finished, RunFolder, as_json, run_one, without
from experiments.support.environment import PACKAGES
from experiments.support.files import Folders
from llmcache import __version__
from llmcache.errors import ConfigError
from tests.experiments.test_config import LEAST

RUN = Named("group", "name", make_experiment(LEAST))
ROWS = [{"id": "a", "x": None}, {"id": "b", "x": "1,5"}]
Measured = Callable[..., Finished]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """`measured(value, force=False)`: run with a measure that returns this value, or raises it."""

    def run(found: Any, force: bool = False) -> Finished:
        def measure(experiment: Any, folders: Folders) -> Outcome:
            if isinstance(found, BaseException):
                raise found
            return Outcome(ROWS, {"value": found, "points": [1]})

        monkeypatch.setattr(runner, "MEASURES", {"serve": Measure(type(RUN.experiment), measure, ("points",))})
        return run_one(RUN, tmp_path, Folders(), force)

    return run


def everything(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("[!.]*") if path.is_file()}


def test_a_run_leaves_three_files_and_its_rows_apart(measured: Measured, tmp_path: Path) -> None:
    done = measured(3)
    raw, run = Path("raw", "group", done.path.name), Path("group", done.path.name)
    found = everything(tmp_path)
    assert found.keys() == {f"{raw}.csv", f"{raw}.json", *(str(run / name) for name in FILES)}
    assert found[f"{raw}.csv"] == 'id,x\na,\nb,"1,5"\n' and json.loads(found[f"{raw}.json"]) == done.metrics
    assert yaml.safe_load(found[str(run / "config.yaml")]) == RUN.experiment.to_dict()
    figures = json.loads(found[str(run / "metrics.json")])
    assert figures == {"seconds": done.metrics["seconds"], "value": 3} and done.metrics["points"] == [1]
    env = json.loads(found[str(run / "env.json")])
    assert env.keys() >= {"started", "git_dirty", "python", "cpu", "n_cpus", "gpu", "memory_bytes", "threads", "seed"}
    assert re.fullmatch("[0-9a-f]{40}", env["git"])
    installed = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in distributions()}
    assert env["versions"] == {"llmcache": __version__, **{name: installed.get(name) for name in PACKAGES}}


FILES = ("config.yaml", "env.json", "metrics.json")


def test_what_is_there_is_kept_until_forced_and_by_a_run_that_does_not_end(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_forced in (False, True):
        before = everything(tmp_path)
        for error in (ConfigError("no data"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                measured(error, force=is_forced)
        assert everything(tmp_path) == before and bool(before) == is_forced
        measured(0)
    found = [measured(1, force=True), measured(2), measured(2, force=True)]
    assert [(one.is_new, one.metrics["value"]) for one in found] == [(True, 1), (False, 1), (True, 2)]
    (found[0].path / "metrics.json").write_text('{"value": ')
    with pytest.raises(ConfigError, match=r"metrics.json: not valid JSON; measure again with --force"):
        measured(1)
    (found[0].path / "metrics.json").unlink()  # as if it had been interrupted
    assert measured(2).is_new
    answers = iter([False, True])  # absent at first; another process finishes it before the lock is held
    monkeypatch.setattr(RunFolder, "is_done", property(lambda folder: next(answers)))
    kept = measured(3)
    assert (kept.is_new, kept.metrics["value"]) == (False, 2)


def test_json_has_short_lines_and_details_are_left_out_by_dotted_keys() -> None:
    values = {"a": 1, "b": [{"c": 2, "d": [3]}, {"c": 4, "d": []}], "e": {"c": 5, "f": dict.fromkeys(range(12), 1 / 3)}}
    assert without(values, ["a", "b.c", "e.f"]) == {"b": [{"d": [3]}, {"d": []}], "e": {"c": 5}}
    text = as_json(values)
    assert json.loads(text) == json.loads(json.dumps(values)) and max(map(len, text.splitlines())) <= 120
    assert '  "b": [{"c": 2, "d": [3]}, {"c": 4, "d": []}],' in text.splitlines()
