"""`llmcache run` and `llmcache sweep`: complete results, nothing measured twice, one-line errors."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.options import INTERRUPTED
from experiments.measures import MEASURES, Measure
from experiments.measures.base import Outcome
from experiments.methods import METHODS
from experiments.runs import runner
from experiments.runs.folder import RunFolder
from experiments.runs.grid import load_experiments
from experiments.support.files import held
from experiments.tasks import TASKS
from tests.experiments.commands import Commands
from tests.experiments.measuring import desk
from tests.experiments.test_models import save_tiny

CONFIGS = Path(__file__).parents[2] / "configs"
SMOKE = CONFIGS / "smoke.yaml"
STREAM = """
measure: serve
task:
  name: stream
  model: tiny
  data: {path: [part0.jsonl, part1.jsonl], text: question, label: intent}
methods: [{method: llmcache, tau: 0.8}, {method: exact_response}]
rounds: 1
warmup: 2
"""


@pytest.fixture
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLMCACHE_DATA", "LLMCACHE_MODELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _nothing_from_outside: None) -> Path:
    """The config of an experiment, with its model and data beside it."""
    monkeypatch.chdir(tmp_path)
    requests = desk(120, "order_status", "cancel_order")
    for number, part in enumerate((requests[:50], requests[50:])):
        lines = [json.dumps({"question": request.text, "intent": request.label}) for request in part]
        (tmp_path / f"part{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    save_tiny(tmp_path / "models" / "tiny")
    path = tmp_path / "tiny_stream.yaml"
    path.write_text(STREAM, encoding="utf-8")
    return path


def options(folder: Path) -> list[str | Path]:
    return ["--data-dir", folder, "--models-dir", folder / "models", "--results-dir", folder / "out"]


def run(config: Path, *changes: str) -> list[str | Path]:
    return ["run", config, *options(config.parent), *(word for change in changes for word in ("--set", change))]


def groups(config: Path) -> list[str]:
    return [path.name for path in (config.parent / "out").glob("[!.]*") if path.name != "raw"]


def folders(config: Path) -> list[Path]:
    return sorted((config.parent / "out" / "tiny_stream").glob("[!.]*"))


def metrics_of(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return figures


def rows_of(folder: Path) -> list[dict[str, str]]:
    path = folder.parents[1] / "raw" / folder.parent.name / f"{folder.name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_results_are_complete_and_kept_until_forced(
    config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(*run(config, "rounds=2")) == 0
    (folder,) = folders(config)
    assert f"measured: {folder}" in command.out.replace("\n", "")
    assert "tiny_stream stream-tiny: 60 requests" in command.out
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "env.json", "metrics.json"}
    metrics, rows = metrics_of(folder), rows_of(folder)
    assert (metrics["n"], metrics["facts"]["n_fit"], metrics["limit"]) == (60, 60, None)
    assert metrics["seconds"] > 0
    assert len(rows) == 60 * 3
    for label, figures in metrics["methods"].items():
        assert label in command.out
        assert f"{figures['speedup']:.2f}" in command.out and f"{figures['hit_rate']:.1%}" in command.out
        assert figures["nocache_ms"]["n"] == figures["cache_ms"]["n"] == 120  # both rounds
        own = [row for row in rows if row["method"] == label]
        assert figures["hit_rate"] == pytest.approx(1 - [row["served"] for row in own].count("computed") / 60)
        assert figures["changed_answers"] == pytest.approx(sum(int(row["is_changed"]) for row in own) / 60)
        assert figures["accuracy"] == pytest.approx(sum(float(row["score"]) for row in own) / 60)
    assert {row["served"] for row in rows} >= {"paper", "response", "computed"}
    env = json.loads((folder / "env.json").read_text())
    assert env.keys() >= {"git", "versions", "cpu", "threads", "seed"}
    assert str(config.parent) not in (folder / "config.yaml").read_text()

    assert command(*run(config, "rounds=2")) == 0
    assert "kept from before: " in command.out and metrics_of(folder) == metrics
    # Other folders, given by environment variables, lead to the same results.
    elsewhere = config.parent / "elsewhere"
    shutil.copytree(config.parent, elsewhere, ignore=shutil.ignore_patterns("out"))
    monkeypatch.setenv("LLMCACHE_DATA", str(elsewhere))
    monkeypatch.setenv("LLMCACHE_MODELS", str(elsewhere / "models"))
    monkeypatch.chdir(elsewhere / "models")
    there = ["run", elsewhere / config.name, "--results-dir", config.parent / "out", "--set", "rounds=2"]
    assert command(*there, "--force") == 0
    assert metrics_of(folder) != metrics  # measured again: times differ
    (folder / "metrics.json").unlink()  # as if it had been interrupted
    assert command(*there) == 0
    assert metrics_of(folder)["n"] == 60 and folders(config) == [folder]


def test_a_grid_runs_once_a_point_and_several_changes_may_follow_one_set(config: Path, command: Commands) -> None:
    assert command(*run(config, "warmup=0"), "seed=[0, 1]", "task.limit=20") == 0
    names = [folder.name.rpartition("-")[0] for folder in folders(config)]
    assert names == ["stream-tiny-seed=0", "stream-tiny-seed=1"]
    assert command.out.count("measured: ") == 2 and "20 requests" in command.out
    assert "no-such.yaml" in command.refused(*run(config, "warmup=0"), "seed=[0, 1]", "no-such.yaml")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("task.data.text=txt", "has no column 'txt'; columns found: 'question', 'intent'"),
        ("task.data.path=none.csv", "no file"),
        ("task.model=no/such", "model: 'no/such' could not be loaded"),
        ("task.model=minilm-snips", "/models; make it: llmcache prepare minilm-snips --models-dir "),
        ("task.max_length=999", "max_length: 999 is more than this model's 128 positions"),
        ("task.data.limit=1", "head.fit_share: "),
        ("task.head={kind: ready}", "model: 'tiny' has no trained classifier"),
        ("task={name: squad_v2, model: tiny, data: made}", "model: 'tiny' has no trained span head"),
        ("task={name: openbookqa, model: tiny, data: made}", "model: 'tiny' has no trained multiple-choice head"),
        ("task={name: wikitext, model: tiny, data: made}", "model: 'tiny' has no trained language-model head"),
        ("task={name: squad_v2, model: tiny}", "squad_v2/eval.json; say where the data is with --data-dir"),
        ("task={name: squad_v2, model: untrained, data: made}", "methods: llmcache-tau=0.8: tau=0.8 with a"),
        ("methods=[{method: llmcache, payload: cls}]", "methods: llmcache-payload=cls: payload: the head"),
    ],
)
def test_bad_input_is_one_line(change: str, error: str, config: Path, command: Commands) -> None:
    assert error in command.refused(*run(config, change))
    assert groups(config) == []


def test_what_cannot_be_read_or_written_is_told_before_anything_is_measured(config: Path, command: Commands) -> None:
    assert command.refused("run", "none.yaml") == "none.yaml: No such file or directory"
    for name in ("run", "sweep", "report"):
        told = f"{config.parent}: is a folder; name the YAML files in it: {config.parent}/*.yaml"
        assert command.refused(name, config.parent) == told
    out = config.parent / "out"
    out.write_text("a file")
    told = f"--results-dir {out}: cannot be made a folder (File exists); give one that can be written"
    assert command.refused(*run(config)) == told
    refused = command.refused("sweep", config, "--results-dir", "/proc/x")
    assert refused.startswith("--results-dir /proc/x: cannot be made a folder (No such")


def test_two_processes_do_not_measure_the_same_run(config: Path, command: Commands) -> None:
    (named,) = load_experiments(config)
    with held(RunFolder(config.parent / "out", named).lock):
        assert "another process holds .tiny_stream.stream-tiny-" in command.refused(*run(config))
        assert command("sweep", config, *options(config.parent)) == 0
        assert "skipped: another process is measuring it" in command.out
        assert groups(config) == []
    assert command(*run(config)) == 0
    assert groups(config) == ["tiny_stream"]


def fake(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[Any]:
    """Make runs return or raise these in turn, and later runs the last; return the list of the runs' experiments."""
    ran: list[Any] = []

    def measure(experiment: Any, folders: Any) -> Outcome:
        outcome = found[min(len(ran), len(found) - 1)]
        ran.append(experiment)
        if isinstance(outcome, BaseException):
            raise outcome
        return Outcome([], outcome)

    fakes = {name: Measure(known.settings, measure) for name, known in MEASURES.items()}
    monkeypatch.setattr(runner, "MEASURES", fakes)
    return ran


def test_a_sweep_goes_on_and_lists_what_failed(config: Path, command: Commands) -> None:
    broken, strange = config.with_name("broken.yaml"), config.with_name("strange.yaml")
    broken.write_text(STREAM.replace("part0.jsonl", "none.csv"))
    strange.write_text(STREAM.replace("model: tiny", "model: no/such"))
    assert command("sweep", broken, strange, config, *options(config.parent)) == 1
    lines = command.out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/3] broken stream-tiny",
        "[2/3] strange stream-such",
        "[3/3] tiny_stream stream-tiny",
    ]
    assert lines[1].startswith("  failed: data.path: no file") and lines[3].startswith("  failed: model: 'no/such'")
    assert lines[5].startswith("  measured, ") and str(folders(config)[0]) in lines[5]
    told = [line for line in command.err.splitlines() if "[transformers]" not in line]
    assert told[-3] == "2 of 3 failed:"
    assert told[-2].startswith("broken stream-tiny: data.path") and told[-1].startswith("strange stream-such: model")
    assert groups(config) == ["tiny_stream"]


def test_a_sweep_that_was_interrupted_goes_on(config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(STREAM + "seed: [0, 1, 2]\n")
    ran = fake(monkeypatch, {"value": 1}, KeyboardInterrupt(), {"value": 3})
    assert command("sweep", config, *options(config.parent)) == INTERRUPTED
    told = "what is finished stays, and the same command goes on with the rest"
    assert command.err == f"llmcache: interrupted; {told}\n"
    assert [metrics_of(folder)["value"] for folder in folders(config)] == [1]
    assert command("sweep", config, *options(config.parent)) == 0
    assert [experiment.seed for experiment in ran] == [0, 1, 1, 2]
    assert command.out.count("  kept, ") == 1 and command.out.count("  measured, ") == 2


def test_a_sweep_takes_all_configs_but_smoke(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    fake(monkeypatch, {"summary": []})
    monkeypatch.setattr("experiments.report.plots.draw_all", lambda results_dir: [])  # they have nothing to draw
    expected = {path.stem for path in CONFIGS.glob("*.yaml")} - {"smoke"}
    assert command("sweep") == 0
    assert {path.name for path in (tmp_path / "results").glob("[!.]*")} == {*expected, "raw"}
    monkeypatch.chdir(tmp_path / "results")
    assert "no YAML file in" in command.refused("sweep")


@pytest.mark.usefixtures("_nothing_from_outside")
def test_smoke_runs_every_task_and_every_method(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI's command: offline, without data or prepared models."""
    monkeypatch.chdir(CONFIGS.parent)
    assert command("run", "configs/smoke.yaml", "--results-dir", tmp_path) == 0
    runs = load_experiments(SMOKE)
    assert {run.experiment.task.name for run in runs} == TASKS.keys() - {"prompts"}  # prompts have no right answers
    assert {run.experiment.task.title for run in runs} >= {"wikitext", "wikitext-repeats"}
    served = set()
    for run in runs:
        folder = RunFolder(tmp_path, run)
        metrics, rows = folder.metrics, rows_of(folder.path)
        json.dumps(metrics, allow_nan=False)
        assert {figures["method"] for figures in metrics["methods"].values()} == METHODS.keys()
        is_untrained = run.experiment.task.model == "untrained"
        assert (metrics["facts"].get("weights") == "random") == is_untrained
        for figures in metrics["methods"].values():
            assert figures["speedup"] > 0 and 0 <= figures["accuracy"] <= 1 and 0 <= figures["hit_rate"] <= 1
            assert figures["cache_ms"]["median"] > 0 and figures["bypassed"] == 0
            served |= figures["hits_by_rung"].keys()
        assert len(rows) == metrics["n"] * len(metrics["methods"])
        assert "nan" not in {row["answer"] for row in rows}
    assert served == {"exact", "paper", "document", "response"}
