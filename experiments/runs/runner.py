"""Run experiments from their files: the missing ones, one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.measures import MEASURES
from experiments.runs.folder import RunFolder
from experiments.runs.grid import Named, load_experiments
from experiments.support.environment import describe
from experiments.support.files import Folders, held
from llmcache import ConfigError


@dataclass(frozen=True, slots=True)
class Finished:
    run: Named
    path: Path
    metrics: Mapping[str, Any]  # its figures, and `seconds`, the wall time; for an earlier run, those in metrics.json
    is_new: bool  # measured now, not by an earlier run


def load_all(configs: Sequence[Path], changes: Sequence[str] = ()) -> list[Named]:
    """Read and check all experiments in the files; `changes` apply to every file."""
    for path in configs:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name the YAML files in it: {path / '*.yaml'}")
    return [run for path in configs for run in load_experiments(path, changes)]


def run_one(run: Named, results_dir: Path, folders: Folders, force: bool = False) -> Finished:
    """Measure a run unless its results exist. A failed or interrupted run leaves earlier results unchanged."""
    folder, measured = RunFolder(results_dir, run), None
    if force or not folder.is_done:
        with held(folder.lock):
            if force or not folder.is_done:  # another process may have finished it meanwhile
                measured = _measure(run, folder, folders)
    return Finished(run, folder.path, folder.metrics if measured is None else measured, measured is not None)


def _measure(run: Named, folder: RunFolder, folders: Folders) -> Mapping[str, Any]:
    env, started = describe(run.experiment.seed), perf_counter()
    measure = MEASURES[run.experiment.measure]
    outcome = measure.run(run.experiment, folders)
    metrics = {"seconds": round(perf_counter() - started, 3), **outcome.metrics}
    folder.write(env, outcome.rows, metrics, measure.details)
    return metrics
