"""`llmcache run` and `llmcache sweep`: results in their place, nothing measured twice, wrong input in one line."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.data.made import make_choices, make_lines, make_questions
from experiments.data.streams.support_desk import support_desk
from experiments.measures import MEASURES, Measure
from experiments.measures.base import Outcome
from experiments.methods import METHODS
from experiments.runs import runner
from experiments.runs.folder import RunFolder
from experiments.runs.grid import load_experiments
from experiments.tasks import TASKS
from llmcache.cli import main as cli
from llmcache.cli.output import INTERRUPTED
from tests.experiments.test_models import save_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LLMCACHE_DATA", "LLMCACHE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    requests = support_desk(120, intents=("order_status", "cancel_order"))
    for number, part in enumerate((requests[:50], requests[50:])):
        with (tmp_path / f"part{number}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "intent"])
            writer.writerows((request.text, request.label) for request in part)
    save_tiny(tmp_path / "models" / "tiny")
    values = {
        "measure": "serve",
        "task": {
            "name": "stream",
            "model": "tiny",
            "data": {"path": ["part0.csv", "part1.csv"], "text": "question", "label": "intent"},
        },
        "methods": [{"method": "llmcache", "tau": 0.8}, {"method": "exact_response"}],
        "rounds": 1,
        "warmup": 2,
    }
    path = tmp_path / "tiny_stream.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run_main(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(arg) for arg in args])
    return int(exit_info.value.code or 0)


def options(folder: Path) -> list[str | Path]:
    return ["--data-dir", folder, "--models-dir", folder / "models", "--results-dir", folder / "out"]


def run_config(config: Path, *args: str) -> int:
    return run_main("run", config, *options(config.parent), *args)


def folders(config: Path) -> list[Path]:
    group = config.parent / "out" / "tiny_stream"
    return sorted(group.glob("[!.]*")) if group.is_dir() else []


def metrics_of(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return figures


@pytest.mark.slow
def test_results_are_complete(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config, "--set", "rounds=2") == 0
    (folder,) = folders(config)
    shown = capsys.readouterr().out
    assert str(folder) in shown.replace("\n", "")
    assert "tiny_stream stream-tiny: 60 requests" in shown
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "env.json", "rows.csv", "metrics.json"}
    metrics = metrics_of(folder)
    rows = list(csv.DictReader((folder / "rows.csv").read_text(encoding="utf-8").splitlines()))
    assert (metrics["n"], metrics["facts"]["n_fit"], metrics["limit"]) == (60, 60, None)
    assert metrics["seconds"] > 0
    assert len(rows) == 60 * 3
    for label, figures in metrics["methods"].items():
        assert label in shown and f"{figures['speedup']:.2f}" in shown and f"{figures['hit_rate']:.1%}" in shown
        assert figures["nocache_ms"]["n"] == figures["cache_ms"]["n"] == 120  # both rounds
        own = [row for row in rows if row["method"] == label]
        assert figures["hit_rate"] == pytest.approx(1 - [row["served"] for row in own].count("computed") / 60)
        assert figures["changed_answers"] == pytest.approx(sum(int(row["is_changed"]) for row in own) / 60)
        assert figures["accuracy"] == pytest.approx(sum(float(row["score"]) for row in own) / 60)
    assert {row["served"] for row in rows} >= {"semantic", "response", "computed"}
    env = json.loads((folder / "env.json").read_text())
    assert env.keys() >= {"git", "versions", "cpu", "threads", "seed"}


@pytest.mark.slow
def test_a_finished_run_is_kept_until_forced(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config) == 0
    metrics = folders(config)[0] / "metrics.json"
    before = metrics.read_text()
    assert "measured: " in capsys.readouterr().out
    assert run_config(config) == 0
    assert metrics.read_text() == before
    assert "kept from before: " in capsys.readouterr().out
    assert run_config(config, "--force") == 0
    assert metrics.read_text() != before  # times are never the same twice
    metrics.unlink()  # as if it had been interrupted
    assert run_config(config) == 0
    assert metrics.is_file() and len(folders(config)) == 1


@pytest.mark.slow
def test_where_data_and_models_lie_is_no_setting(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folders come from the environment too, and another machine's folders meet the same results."""
    assert run_config(config) == 0
    (folder,) = folders(config)
    elsewhere = config.parent / "elsewhere"
    shutil.copytree(config.parent, elsewhere, ignore=shutil.ignore_patterns("out"))
    monkeypatch.setenv("LLMCACHE_DATA", str(elsewhere))
    monkeypatch.setenv("LLMCACHE_MODELS", str(elsewhere / "models"))
    monkeypatch.chdir(elsewhere / "models")
    assert run_main("run", elsewhere / config.name, "--results-dir", config.parent / "out", "--force") == 0
    assert folders(config) == [folder]
    assert str(config.parent) not in (folder / "config.yaml").read_text()


@pytest.mark.slow
def test_a_grid_runs_once_a_point(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config, "--set", "seed=[0, 1]") == 0
    names = [folder.name.rpartition("-")[0] for folder in folders(config)]
    assert names == ["stream-tiny-seed=0", "stream-tiny-seed=1"]
    assert capsys.readouterr().out.count("measured: ") == 2


@pytest.mark.slow
def test_several_changes_may_follow_one_set(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config(config, "--set", "warmup=0", "seed=[0, 1]", "task.limit=20") == 0
    assert len(folders(config)) == 2
    assert "20 requests" in capsys.readouterr().out
    assert run_config(config, "no-such.yaml") == 2
    assert "no-such.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_a_ready_model_needs_no_fit(config: Path) -> None:
    save_tiny(config.parent / "models" / "ready", labels=("order_status", "cancel_order"))
    changes = ["--set", "task.model=ready", "--set", "task.head={kind: ready, fit_share: 0}"]
    assert run_config(config, *changes) == 0
    metrics = metrics_of(folders(config)[0])
    assert (metrics["n"], metrics["facts"]["n_fit"]) == (120, 0)
    assert metrics["methods"]["llmcache-tau=0.8"]["hit_rate"] > 0


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["task.data.text=txt"], "has no column 'txt'; columns found: 'question', 'intent'"),
        (["task.data.path=none.csv"], "no file"),
        (["task.data.pth=x"], "task.data.pth: unknown setting; did you mean 'path'?"),
        (["task.model=no/such"], "model: 'no/such' could not be loaded"),
        (
            ["task.model=minilm-snips", "task.data.path=none.csv"],
            "/models; make it: llmcache prepare minilm-snips --models-dir ",
        ),
        (["task.max_length=999"], "max_length: 999 is more than this model's 128 positions"),
        (["task.data.limit=1"], "head.fit_share: "),
        (["task.data.path=empty.csv"], "no records, so there is nothing to stream"),
        (["task.data.path=rare.csv"], "occurs in the stream (4 of 4 requests) but not among"),
        (["task.data.path=same.csv"], "only one label ('x')"),
        (["task.head={kind: ready}"], "model: 'tiny' holds no trained classifier"),
        (["task={name: squad_v2, model: tiny, data: made}"], "model: 'tiny' holds no trained span head"),
        (["task={name: openbookqa, model: tiny, data: made}"], "model: 'tiny' holds no trained multiple-choice head"),
        (["task={name: wikitext, model: tiny, data: made}"], "model: 'tiny' holds no trained language-model head"),
        (["task={name: squad_v2, model: tiny}"], "squad_v2/eval.json; say where the data is with --data-dir"),
        (
            ["task={name: squad_v2, model: untrained, data: made}"],
            "methods: llmcache-tau=0.8: tau=0.8 with a",
        ),
        (
            ["methods=[{method: llmcache, payload: cls}]"],
            "methods: llmcache-payload=cls: payload: the head",
        ),
        (["methods=[{method: llmcach}]"], "methods[0].method: 'llmcach' is not known"),
    ],
)
def test_bad_input_is_one_line(args: list[str], error: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents: dict[str, Any] = {
        "empty": [],
        "rare": [f"t{i},x{i}" for i in range(8)],
        "same": [f"t{i},x" for i in range(8)],
    }
    for name, lines in contents.items():
        text = "\n".join(["question,intent", *lines])
        (config.parent / f"{name}.csv").write_text(text + "\n", encoding="utf-8")
    capsys.readouterr()
    assert run_config(config, *(word for change in args for word in ("--set", change))) == 2
    captured = capsys.readouterr()
    assert error in captured.err
    told = [
        line.startswith("llmcache: ") for line in captured.err.splitlines()
    ]  # transformers may say something before
    assert told.count(True) == 1 and told[-1]
    assert captured.out == ""
    assert folders(config) == []


def test_a_config_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("run", tmp_path / "none.yaml") == 2
    assert capsys.readouterr().err.endswith("none.yaml: No such file or directory\n")


def test_results_that_cannot_be_written(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is measured."""
    (config.parent / "out").write_text("a file")
    assert run_config(config) == 2
    told = "cannot be made a folder (File exists); give one that can be written"
    assert capsys.readouterr().err == f"llmcache: --results-dir {config.parent / 'out'}: {told}\n"
    assert run_main("sweep", config, "--results-dir", "/proc/x") == 2
    assert capsys.readouterr().err.startswith("llmcache: --results-dir /proc/x: cannot be made a folder (No such")


@pytest.mark.parametrize("command", ["run", "sweep", "report"])
def test_a_folder_is_no_config(command: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(command, config.parent) == 2
    told = f"{config.parent}: is a folder; name the YAML files in it: {config.parent}/*.yaml"
    assert capsys.readouterr().err == f"llmcache: {told}\n"


HOLD = """
import sys
from pathlib import Path
from experiments.support.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(config: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process is at the run."""
    (run,) = load_experiments(config)
    command = [sys.executable, "-c", HOLD, str(RunFolder(config.parent / "out", run)._lock)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_two_processes_do_not_measure_the_same_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held_elsewhere(config):
        assert run_config(config) == 2
        error = capsys.readouterr().err
        assert "another process holds .tiny_stream.stream-tiny-" in error and error.count("\n") == 1
        assert run_main("sweep", config, *options(config.parent)) == 0
        assert "skipped: another process is measuring it" in capsys.readouterr().out
        assert folders(config) == []
    assert run_config(config) == 0
    assert [path.name for path in (config.parent / "out").glob("[!.]*")] == ["tiny_stream"]


def fake(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    """Let every run find this, or raise it."""

    def measure(experiment: Any, folders: Any) -> Outcome:
        if isinstance(outcome, BaseException):
            raise outcome
        return Outcome([], outcome)

    fakes = {name: Measure(known.settings, measure) for name, known in MEASURES.items()}
    monkeypatch.setattr(runner, "MEASURES", fakes)


def test_other_measures_show_their_summary(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = [{"tau": 0.8, "hit rate": 1 / 3, "speed-up": None}, {"tau": 0.9, "hit rate": 0.0, "speed-up": 1.5}]
    fake(monkeypatch, {"summary": summary, "methods": {}})
    assert run_config(config) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["hit"] in lines and ["tau", "rate", "speed-up"] in lines
    assert ["0.8", "0.3333"] in lines and ["0.9", "0", "1.5"] in lines


def test_a_summary_without_rows(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {"summary": []})
    assert run_config(config) == 0


@pytest.mark.slow
def test_a_sweep_goes_on_and_lists_what_failed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = config.with_name("broken.yaml")
    broken.write_text(config.read_text().replace("part0.csv", "none.csv"))
    strange = config.with_name("strange.yaml")
    strange.write_text(config.read_text().replace("model: tiny", "model: no/such"))
    assert run_main("sweep", broken, strange, config, *options(config.parent)) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/3] broken stream-tiny",
        "[2/3] strange stream-such",
        "[3/3] tiny_stream stream-tiny",
    ]
    assert lines[1].startswith("  failed: data.path: no file") and lines[3].startswith("  failed: model: 'no/such'")
    assert lines[5].startswith("  measured, ") and str(folders(config)[0]) in lines[5]
    told = [line for line in captured.err.splitlines() if "[transformers]" not in line]
    assert told[-3] == "2 of 3 failed:"
    assert told[-2].startswith("broken stream-tiny: data.path") and told[-1].startswith("strange stream-such: model")
    assert [path.name for path in (config.parent / "out").glob("[!.]*")] == ["tiny_stream"]


def test_a_sweep_that_was_interrupted_goes_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + "seed: [0, 1, 2]\n")
    started = []

    def measure(experiment: Any, folders: Any) -> Outcome:
        started.append(experiment.seed)
        if started == [0, 1]:
            raise KeyboardInterrupt
        return Outcome([], {"value": len(started)})

    monkeypatch.setattr(runner, "MEASURES", {"serve": Measure(MEASURES["serve"].settings, measure)})
    assert run_main("sweep", config, *options(config.parent)) == INTERRUPTED
    told = "what is finished stays, and the same command goes on with the rest"
    assert capsys.readouterr().err == f"llmcache: interrupted; {told}\n"
    assert [metrics_of(folder)["value"] for folder in folders(config)] == [1]
    assert run_main("sweep", config, *options(config.parent)) == 0
    assert started == [0, 1, 1, 2]
    shown = capsys.readouterr().out
    assert shown.count("  kept, ") == 1 and shown.count("  measured, ") == 2


def test_a_full_disk_ends_a_sweep(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would spoil every further run too."""
    config.write_text(config.read_text() + "seed: [0, 1]\n")
    fake(monkeypatch, OSError(28, "No space left on device", "rows.csv"))
    assert run_main("sweep", config, *options(config.parent)) == 2
    captured = capsys.readouterr()
    assert captured.err == "llmcache: rows.csv: No space left on device\n"
    assert "[2/2]" not in captured.out


@pytest.mark.slow
def test_a_sweep_takes_all_configs_but_smoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    fake(monkeypatch, {"summary": []})
    monkeypatch.setattr("experiments.report.plots.draw_all", lambda results_dir: [])  # there is nothing in them to draw
    expected = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"smoke"}
    assert run_main("sweep") == 0
    assert {path.name for path in (tmp_path / "results").glob("[!.]*")} == expected
    monkeypatch.chdir(tmp_path / "results")
    capsys.readouterr()
    assert run_main("sweep") == 2
    assert "no YAML file in" in capsys.readouterr().err


def finite(values: Any, where: str) -> None:
    if isinstance(values, dict):
        for key, value in values.items():
            finite(value, f"{where}.{key}")
    elif isinstance(values, list):
        for value in values:
            finite(value, where)
    elif isinstance(values, float):
        assert math.isfinite(values), where


@pytest.mark.slow
def test_smoke_runs_every_task_and_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very command of continuous integration: offline, without data and without prepared models."""
    for name in ("LLMCACHE_DATA", "LLMCACHE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    assert run_main("run", "configs/smoke.yaml", "--results-dir", tmp_path) == 0
    runs = load_experiments(ROOT / "configs" / "smoke.yaml")
    assert {run.experiment.task.name for run in runs} == TASKS.keys() - {"prompts"}  # which have no right answers
    assert {run.experiment.task.title for run in runs} >= {"wikitext", "wikitext-repeats"}
    for run in runs:
        folder = RunFolder(tmp_path, run)
        metrics = folder.metrics
        assert {figures["method"] for figures in metrics["methods"].values()} == METHODS.keys()
        is_untrained = run.experiment.task.model == "untrained"
        assert (metrics["facts"].get("weights") == "random") == is_untrained
        for label, figures in metrics["methods"].items():
            finite(figures, f"{run.name}: {label}")
            assert figures["speedup"] > 0 and 0 <= figures["accuracy"] <= 1 and 0 <= figures["hit_rate"] <= 1
            assert figures["cache_ms"]["median"] > 0 and figures["bypassed"] == 0
        rows = list(csv.DictReader((folder.path / "rows.csv").read_text(encoding="utf-8").splitlines()))
        assert len(rows) == metrics["n"] * len(metrics["methods"])
        assert "nan" not in {row["answer"] for row in rows}
    served = {
        kind
        for run in runs
        for figures in RunFolder(tmp_path, run).metrics["methods"].values()
        for kind in figures["hits_by_rung"]
    }
    assert served == {"exact", "semantic", "document", "response"}


def test_smoke_finds_enough_made_records() -> None:
    n_made = {"squad_v2": len(make_questions(0)), "openbookqa": len(make_choices(0)), "wikitext": len(make_lines(0))}
    for run in load_experiments(ROOT / "configs" / "smoke.yaml"):
        task = run.experiment.task
        assert task.limit < n_made.get(task.name, math.inf)
