"""Inputs of the pages' tables: finished runs, and cells with the figure of every seed."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.runs.folder import METRICS
from experiments.runs.read import Figures, Run, read_runs, was_idle
from llmcache import ConfigError

#: Cell text for a configured run that is missing.
MISSING = "not measured"


def runs_of(results_dir: Path, group: str) -> list[Run]:
    """Return the finished runs of an experiment, by task and seed."""
    found = runs_if_any(results_dir, group)
    if not found:
        raise ConfigError(f"{results_dir / group}: no results; llmcache run configs/{group}.yaml")
    return found


def runs_if_any(results_dir: Path, group: str) -> list[Run]:
    """Return the finished runs, or an empty list: for tables that mark what was not measured."""
    found = read_runs(path.parent for path in sorted((results_dir / group).glob(f"*/{METRICS}")))
    return sorted(found, key=lambda run: (run.metrics.get("task", ""), run.config["seed"]))


def figures_of(results_dir: Path, command: str) -> Figures:
    """Return the figures of a command that is no experiment."""
    path = results_dir / command / METRICS
    if not path.is_file():
        raise ConfigError(f"{path}: not there; llmcache {command.replace('_', ' ')} --results-dir {results_dir.name}")
    figures: Figures = json.loads(path.read_text(encoding="utf-8"))
    return figures


def is_timed(results_dir: Path, command: str) -> bool:
    """Whether a command's times may be shown; see `was_idle`."""
    return was_idle(json.loads((results_dir / command / "env.json").read_text(encoding="utf-8")))


def by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.task, []).append(run)
    return found


def each(values: Sequence[float | None], digits: int = 1, unit: str = " %") -> str:
    """Format a figure of every seed, in order; a missing value is a dash, and no values give an empty cell."""
    if all(value is None for value in values):
        return ""
    return " / ".join("-" if value is None else f"{100 * value:z.{digits}f}" for value in values) + unit


def row_of(rows: Iterable[Figures], **wanted: object) -> Figures:
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    raise ConfigError(f"results: no row with {wanted}")
