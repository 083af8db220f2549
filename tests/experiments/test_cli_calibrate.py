"""`llmcache calibrate`: the chosen limit is shown, written and saved; errors are one line."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.runs.grid import load_experiments
from experiments.support.files import Folders
from experiments.tasks import build
from llmcache import LLMCache
from tests.experiments.commands import Commands
from tests.experiments.measuring import TASK, learning

VALUES = learning("trust", seed=[3, 0], task=TASK | {"limit": None}, learn=240, taus=[0.9])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "trust_made.yaml"
    path.write_text(yaml.safe_dump(VALUES), encoding="utf-8")
    return path


def test_what_was_chosen_is_shown_and_kept(config: Path, command: Commands) -> None:
    def calibrated(*changes: str) -> list[dict[str, object]]:
        assert command("calibrate", config, "--json", kept, "--set", *changes) == 0
        found: list[dict[str, object]] = json.loads(kept.read_text())["calibrations"]
        assert all(f"changed <= {100 * one['max_drop']:g} %, 90 % sure" in command.out for one in found)
        return found

    kept = config.with_name("figures.json")
    both = calibrated("max_drops=[0.4, 0.2]", "cache.delta=0.1")
    assert "trust_made support_desk-untrained-seed=3, the first of 2 runs" in command.out
    assert json.loads(kept.read_text())["settings"]["seed"] == 3
    assert [figures["max_drop"] for figures in both] == [0.4, 0.2]
    for figures in both:
        chosen = figures["chosen"]
        assert figures["delta"] == 0.1 and figures["n_sources"] + figures["n_tested"] <= 240
        assert f"{100 * chosen['bound']:.2f} %" in command.out
        assert chosen["bound"] <= figures["max_drop"] and chosen in figures["curve"]
    # The second target is calibrated as if it were the only one.
    (alone,) = calibrated("cache.delta=0.1")
    assert [both[1][name] for name in ("chosen", "curve")] == [alone[name] for name in ("chosen", "curve")]


def test_what_is_saved_serves_again(config: Path, command: Commands) -> None:
    folder = config.with_name("saved")
    assert command("calibrate", config, "--save", folder, "--set", "seed=0") == 0
    assert f"saved to {folder}" in command.out
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


LOSSES = "cache.max_drop=0.1: an experiment asks for the losses in max_drops"


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--set", "task.limit=90", "max_drops=[0.2, 0.05]"], "90 requests cannot show a loss of at most 0.05"),
        (["--set", "cache.max_drop=0.1"], LOSSES),
        (["--save", "kept", "--set", "max_drops=[0.2, 0.3]"], "--save keeps one calibration: choose a loss of"),
        (["--set", "task.limit=90"], "90 requests cannot show a loss of at most 0.2"),
        (["--set", "cache.tau=0.9"], "max_drop with tau=0.9: "),
        (["--json", "."], ".: cannot be written"),
        (["other.yaml"], "give one CONFIG (got "),
    ],
)
def test_refusals_are_one_line(config: Path, args: list[str], error: str, command: Commands) -> None:
    assert command.refused("calibrate", config, *args).startswith(error)
