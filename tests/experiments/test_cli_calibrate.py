"""`llmcache calibrate`: what was chosen is shown, kept and saved; what cannot be calibrated is told in one line."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.cli.calibrate import _show
from experiments.runs.grid import load_experiments
from experiments.support.folders import Folders
from experiments.tasks import build
from llmcache import LLMCache
from llmcache.calibration.calibration import Calibration, OperatingPoint
from llmcache.cli import main as cli

VALUES = {
    "measure": "trust",
    "seed": [3, 0],
    "task": {"name": "held_out", "model": "untrained", "data": {"path": "support_desk", "limit": 700}},
    "learn": 240,
    "max_drops": [0.2],
    "taus": [0.9],
    "cache": {"answer": "class"},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "trust_made.yaml"
    path.write_text(yaml.safe_dump(VALUES), encoding="utf-8")
    return path


def run_main(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["calibrate", *map(str, args)])
    return int(exit_info.value.code or 0)


@pytest.mark.slow
def test_what_was_chosen_is_shown_and_kept(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "figures.json"
    assert run_main(config, "--json", kept, "--set", "max_drops=[0.3]", "cache.delta=0.1") == 0
    shown = capsys.readouterr().out
    told = json.loads(kept.read_text())
    (figures,) = told["calibrations"]
    assert "trust_made support_desk-untrained-seed=3, the first of 2 runs" in shown
    assert "changed <= 30 %, 90 % sure" in shown
    chosen = figures["chosen"]
    assert (figures["max_drop"], figures["delta"]) == (0.3, 0.1)
    assert figures["n_sources"] + figures["n_tested"] <= 240
    assert f"{100 * chosen['bound']:.2f} %" in shown
    assert chosen["bound"] <= 0.3 and chosen in figures["curve"]
    assert told["settings"]["seed"] == 3


@pytest.mark.slow
def test_each_loss_of_the_experiment_is_calibrated_as_if_it_were_alone(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for drops in ("[0.4, 0.2]", "[0.4]", "[0.2]"):
        kept = tmp_path / "figures.json"
        assert run_main(config, "--json", kept, "--set", f"max_drops={drops}") == 0
        shown = capsys.readouterr().out
        made = json.loads(kept.read_text())["calibrations"]
        assert [f"changed <= {100 * one['max_drop']:g} %" in shown for one in made] == [True] * len(made)
        found[drops] = [(one["max_drop"], one["chosen"], one["curve"]) for one in made]
    assert found["[0.4, 0.2]"] == found["[0.4]"] + found["[0.2]"]
    assert [drop for drop, _, _ in found["[0.4, 0.2]"]] == [0.4, 0.2]


@pytest.mark.slow
def test_what_is_saved_serves_again(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "saved"
    assert run_main(config, "--save", folder, "--set", "seed=0") == 0
    assert f"saved to {folder}" in capsys.readouterr().out
    (run,) = load_experiments(config, ["seed=0"])
    workload = build(run.experiment.task, Folders(), 0)
    with LLMCache.load(workload.module, folder, tokenizer=workload.tokenizer) as cache:
        assert cache.calibration is not None and cache.calibration.is_certified
        assert cache.calibration.max_drop == cache.config.max_drop == 0.2
        rungs = set()
        for request in workload.requests[240:]:
            cache(**request.inputs)
            rungs.add(cache.last[0].rung)
        assert "semantic" in rungs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "error"),
    [
        (
            ["--set", "task.limit=90", "max_drops=[0.2, 0.05]"],
            "llmcache: 90 requests cannot show a loss of at most 0.05",
        ),
        (
            ["--set", "cache.max_drop=0.1"],
            "llmcache: cache.max_drop=0.1: an experiment asks for the losses in max_drops",
        ),
        (
            ["--save", "kept", "--set", "max_drops=[0.2, 0.3]"],
            "llmcache: --save keeps one calibration: choose a loss of",
        ),
        (["--set", "task.limit=90"], "llmcache: 90 requests cannot show a loss of at most 0.2"),
        (["--set", "cache.tau=0.9"], "llmcache: tau=0.9 is your own choice"),
        (["--json", "."], "llmcache: .: cannot be written"),
        (["other.yaml"], "llmcache: give one CONFIG (got "),
    ],
)
def test_refusals_are_one_line(
    config: Path, args: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(config, *args) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("llmcache:")]
    assert len(told) == 1 and told[0].startswith(error)


def test_an_experiment_that_learns_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    assert run_main(root / "configs" / "banking77.yaml") == 2
    assert "measure: 'serve' learns from no requests" in capsys.readouterr().err


def test_that_nothing_is_reused_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    failed = OperatingPoint(0.1, 0.2, 0.1, 0.15)
    _show("mine", Calibration(None, (failed,), "changed", 0.05, 0.05, 100, 100, "frozen", "w", "h", 1.0))
    shown = capsys.readouterr().out
    assert "nothing is reused approximately: not even the strictest limit" in shown
    assert "0.15" in shown


def test_the_setting_that_ended_it_is_shown_of_a_long_curve(capsys: pytest.CaptureFixture[str]) -> None:
    passed = [OperatingPoint(i / 1000, i / 100, 0.0, 0.01) for i in range(1, 48)]
    curve = (*passed, OperatingPoint(0.048, 0.777, 0.1, 0.2))
    _show("mine", Calibration(curve[-2], curve, "changed", 0.05, 0.05, 100, 100, "frozen", "w", "h", 1.0))
    shown = capsys.readouterr().out
    assert "0.777" in shown and "one of 3" in shown
