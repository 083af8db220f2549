"""Results on disk: written whole or not at all, by one process per run."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.measures import Measure
from experiments.measures.base import Outcome
from experiments.runs import runner
from experiments.runs.folder import RunFolder, as_json, without
from experiments.runs.grid import Named, make_experiment
from experiments.runs.runner import Finished, run_one
from experiments.support.environment import PACKAGES, describe
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from tests.experiments.test_config import LEAST, ROOT

FILES = {"config.yaml", "env.json", "metrics.json"}
RUN = Named("group", "name", make_experiment(LEAST))
N_TURNS = 200
Measured = Callable[..., Finished]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """`measured(value, force=False)`: run with a measure that returns this value, or raises it."""
    value: Any = None

    def measure(experiment: Any, folders: Folders) -> Outcome:
        if isinstance(value, BaseException):
            raise value
        return Outcome(
            [{"id": "a", "x": value, "y": None}, {"id": "b", "x": value, "y": "1,5"}], {"value": value, "points": [1]}
        )

    def run(found: Any, force: bool = False) -> Finished:
        nonlocal value
        value = found
        return run_one(RUN, tmp_path, Folders(), force)

    monkeypatch.setattr(runner, "MEASURES", {"serve": Measure(type(RUN.experiment), measure, ("points",))})
    return run


def everything(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("[!.]*") if path.is_file()}


def test_a_run_leaves_three_files_and_its_rows_apart(measured: Measured, tmp_path: Path) -> None:
    done = measured(3)
    assert done.is_new and {path.name for path in done.path.iterdir()} == FILES
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"group", "raw"}
    assert yaml.safe_load((done.path / "config.yaml").read_text()) == RUN.experiment.to_dict()
    assert (tmp_path / "raw" / "group" / f"{done.path.name}.csv").read_text() == 'id,x,y\na,3,\nb,3,"1,5"\n'
    assert json.loads((done.path / "env.json").read_text())["seed"] == 0
    figures = json.loads((done.path / "metrics.json").read_text())
    assert figures == {key: value for key, value in done.metrics.items() if key != "points"}
    assert figures["value"] == 3 and figures["seconds"] >= 0
    raw = tmp_path / "raw" / "group" / f"{done.path.name}.json"
    assert json.loads(raw.read_text()) == done.metrics and done.metrics["points"] == [1]


def test_details_are_left_out_by_dotted_keys_and_lines_are_short() -> None:
    values = {"a": 1, "b": [{"c": 2, "d": [3]}, {"c": 4, "d": []}], "e": {"c": 5, "f": ["long"] * 40}}
    assert without(values, ["a", "b.c", "e.f"]) == {"b": [{"d": [3]}, {"d": []}], "e": {"c": 5}}
    text = as_json(values)
    assert json.loads(text) == values and '  "b": [{"c": 2, "d": [3]}, {"c": 4, "d": []}],' in text.splitlines()
    assert max(map(len, text.splitlines())) <= 120


def test_numbers_are_names_in_quotes_in_long_lines_as_well() -> None:
    by_layer = dict.fromkeys(range(12), 1 / 3)
    for values in ({"hits": {0: 1}}, {"hits": by_layer}):
        assert json.loads(as_json(values)) == json.loads(json.dumps(values))


def test_what_is_there_is_kept_until_forced(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [measured(1), measured(2), measured(2, force=True)]
    assert [(one.is_new, one.metrics["value"]) for one in found] == [(True, 1), (False, 1), (True, 2)]
    answers = iter([False, True])  # absent at first; another process finishes it before the lock is held
    monkeypatch.setattr(RunFolder, "is_done", property(lambda folder: next(answers)))
    kept = measured(3)
    assert (kept.is_new, kept.metrics["value"]) == (False, 2)


@pytest.mark.parametrize("error", [ConfigError("no data"), FileNotFoundError("no file"), KeyboardInterrupt()])
def test_a_run_that_does_not_end_leaves_what_was_there(
    error: BaseException, measured: Measured, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        measured(error)
    assert everything(tmp_path) == {}
    measured(1)
    before = everything(tmp_path)
    with pytest.raises(type(error)):
        measured(error, force=True)
    assert everything(tmp_path) == before


def test_damaged_figures_are_told(measured: Measured) -> None:
    (measured(1).path / "metrics.json").write_text('{"value": ')
    with pytest.raises(ConfigError, match=r"metrics.json: not valid JSON; measure again with --force"):
        measured(1)
    assert measured(1, force=True).metrics["value"] == 1


#: After the start signal, increments a count in a file, each time with the lock held.
TAKE_TURNS = """
import sys
from pathlib import Path
from time import sleep
from experiments.support.files import InUseError, held
folder, n_turns = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while not (folder / "go").exists():
    sleep(0.001)
while n_turns:
    try:
        with held(folder / "lock"):
            (folder / "count").write_text(str(int((folder / "count").read_text()) + 1))
        n_turns -= 1
    except InUseError:
        sleep(0.0001)  # else those that wait take the processor from the one that holds it
"""


def test_only_one_process_holds_a_lock(tmp_path: Path) -> None:
    """If two processes held the lock at once, an increment would be lost, or read half-written."""
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", TAKE_TURNS, str(tmp_path), str(N_TURNS)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    (tmp_path / "go").touch()
    for process in processes:
        process.communicate(timeout=120)
    assert int((tmp_path / "count").read_text()) == 3 * N_TURNS


def test_surroundings_are_complete() -> None:
    env = describe(7)
    assert env["seed"] == 7 and re.fullmatch("[0-9a-f]{40}", env["git"]) and isinstance(env["git_dirty"], bool)
    assert env["versions"].keys() == {"llmcache", *PACKAGES} >= {"datasets", "datasketch"}
    assert None not in env["versions"].values()
    assert env["threads"]["torch"] == 1 and env["n_cpus"] >= 1 and env["memory_bytes"] > 2**28
    json.dumps(env)
