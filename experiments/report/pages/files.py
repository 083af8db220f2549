"""Inputs of the pages' tables: finished runs by experiment, and figures of commands."""

import json
from collections.abc import Callable
from pathlib import Path

from experiments.report.claims import CLAIMS
from experiments.report.markdown import missing
from experiments.report.tables import Table
from experiments.runs.read import Figures, Run, read_runs, was_idle
from experiments.runs.runner import METRICS
from llmcache import ConfigError


def runs_of(results_dir: Path, *groups: str) -> list[Run]:
    """Return the finished runs of experiments, each by task and seed; one without runs is an error."""
    found = {group: runs_if_any(results_dir, group) for group in groups}
    for group, runs in found.items():
        if not runs:
            raise ConfigError(f"{results_dir / group}: no results; llmcache run configs/{group}.yaml")
    return [run for runs in found.values() for run in runs]


def runs_if_any(results_dir: Path, group: str) -> list[Run]:
    """Return the finished runs, or an empty list: for tables that mark what was not measured."""
    found = read_runs(path.parent for path in sorted((results_dir / group).glob(f"*/{METRICS}")))
    return sorted(found, key=lambda run: (run.task, run.config["seed"]))


def claims_runs(results_dir: Path) -> dict[str, list[Run]]:
    """Return the finished runs that the claims are judged by, by experiment."""
    return {group: runs_of(results_dir, group) for group in {claim.config: None for claim in CLAIMS}}


def all_of(show: Table, *groups: str) -> Callable[[Path], str]:
    """Return the function that shows the runs of experiments, all of which must be there."""
    return lambda results_dir: show(runs_of(results_dir, *groups))


def any_of(show: Table, *groups: str, is_timed: bool = False) -> Callable[[Path], str]:
    """Return the function that shows the runs there are; if there are none, a row says so.

    If the table `is_timed`, runs on a busy machine are left out.
    """

    def lines(results_dir: Path) -> str:
        runs = [run for group in groups for run in runs_if_any(results_dir, group) if run.is_timed or not is_timed]
        if runs:
            return show(runs)
        return missing(show([]).partition("\n")[0].strip("| ").split(" | "), groups[0])

    return lines


def figures_of(results_dir: Path, command: str) -> Figures:
    path = results_dir / command / METRICS
    if not path.is_file():
        raise ConfigError(f"{path}: not there; llmcache {command.replace('_', ' ')} --results-dir {results_dir.name}")
    figures: Figures = json.loads(path.read_text(encoding="utf-8"))
    return figures


def is_timed(results_dir: Path, command: str) -> bool:
    return was_idle(json.loads((results_dir / command / "env.json").read_text(encoding="utf-8")))
