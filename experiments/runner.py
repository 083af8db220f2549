"""Run experiments from their files: those that are not there yet, one after another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Named, load_experiments
from experiments.environment import describe
from experiments.folders import Folders
from experiments.measures import MEASURES
from experiments.results import RunFolder


@dataclass(frozen=True, slots=True)
class Finished:
    """One run and where it lies.

    Attributes:
        run: Name and settings.
        path: Its folder.
        metrics: Its figures.
        is_new: Measured now, not found from before.
    """

    run: Named
    path: Path
    metrics: Mapping[str, Any]
    is_new: bool


def run_all(
    configs: Sequence[Path],
    results_dir: Path,
    folders: Folders,
    changes: Sequence[str] = (),
    force: bool = False,
) -> Iterator[Finished]:
    """Run everything that the files ask for. All files are read and checked before the first run.

    Args:
        configs: YAML files.
        results_dir: Root of all results.
        folders: Where data and models lie.
        changes: `key=value` for every file.
        force: Measure again what is there already.

    Raises:
        ConfigError: A setting or the data is wrong.
        FileNotFoundError: A file is missing.
    """
    for run in [run for path in configs for run in load_experiments(path, changes)]:
        folder = RunFolder(results_dir, run)
        is_new = force or not folder.is_done
        if is_new:
            folder.begin(describe(run.experiment.seed))
            outcome = MEASURES[run.experiment.measure].run(run.experiment, folders)
            folder.finish(outcome.rows, outcome.metrics)
        yield Finished(run, folder.path, folder.metrics, is_new)
