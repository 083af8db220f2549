"""What the tables of the pages are made of: finished runs, and cells that hold the figure of every seed."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.runs.folder import METRICS
from experiments.runs.read import Figures, Run, read_runs, was_idle
from llmcache import ConfigError

#: What a cell says where a configuration asks for a run that is not there.
MISSING = "not measured"


def runs_of(results_dir: Path, group: str) -> list[Run]:
    """The finished runs of an experiment, by task and seed."""
    found = runs_if_any(results_dir, group)
    if not found:
        raise ConfigError(f"{results_dir / group}: no results; llmcache run configs/{group}.yaml")
    return found


def runs_if_any(results_dir: Path, group: str) -> list[Run]:
    """The same, or an empty list: for tables that say what was not measured."""
    found = read_runs(path.parent for path in sorted((results_dir / group).glob(f"*/{METRICS}")))
    return sorted(found, key=lambda run: (run.metrics.get("task", ""), run.config["seed"]))


def figures_of(results_dir: Path, command: str) -> Figures:
    """What a command wrote that is no experiment."""
    path = results_dir / command / METRICS
    if not path.is_file():
        raise ConfigError(f"{path}: not there; llmcache {command.replace('_', ' ')} --results-dir {results_dir.name}")
    figures: Figures = json.loads(path.read_text(encoding="utf-8"))
    return figures


def is_timed(results_dir: Path, command: str) -> bool:
    """Whether the times of a command may be shown; see `was_idle`."""
    return was_idle(json.loads((results_dir / command / "env.json").read_text(encoding="utf-8")))


def by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.task, []).append(run)
    return found


def each(values: Sequence[float | None], digits: int = 1, unit: str = " %") -> str:
    """A figure of every seed, in their order; a missing one is a dash, and none at all an empty cell."""
    if all(value is None for value in values):
        return ""
    return " / ".join("-" if value is None else f"{100 * value:z.{digits}f}" for value in values) + unit


def row_of(rows: Iterable[Figures], **wanted: object) -> Figures:
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            return row
    raise ConfigError(f"results: no row with {wanted}")
