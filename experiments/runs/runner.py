"""Runs, and the layout of results: `<results-dir>/<experiment>/<run-id>/{config.yaml, env.json, metrics.json}`.

The run id is a readable name and a hash of all settings: the same settings give the same folder on every machine.
Nothing is written before the run ends. `metrics.json`, written last, has the figures that pages read. All figures, and
the rows (one per request, or one per point of a curve), go to `<results-dir>/raw/<experiment>/<run-id>.{json, csv}`,
which git ignores. During a run, a lock file in `<results-dir>` keeps other processes away from it.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from experiments.measures import MEASURES
from experiments.runs.grid import Named, load_experiments
from experiments.support.environment import describe
from experiments.support.files import Folders, held, write_together
from llmcache import ConfigError

Row = Mapping[str, Any]

METRICS = "metrics.json"
RAW = "raw"  # folder that git ignores
_NAME_LENGTH = 150  # file systems allow 255 bytes; hash and lock file need some of them
_LINE_LENGTH = 120  # of JSON


class RunFolder:
    def __init__(self, results_dir: Path, run: Named) -> None:
        self._config = run.experiment.to_dict()
        self.path = results_dir / run.group / run_id(run.name, self._config)
        self._metrics = self.path / METRICS
        self._raw = results_dir / RAW / run.group / self.path.name
        self.lock = results_dir / f".{run.group}.{self.path.name}.lock"  # held while the run is measured

    @property
    def is_done(self) -> bool:
        return self._metrics.is_file()

    @property
    def metrics(self) -> dict[str, Any]:
        try:
            figures: dict[str, Any] = json.loads(self._metrics.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self._metrics}: not valid JSON; measure again with --force") from error
        return figures

    def write(
        self, env: Mapping[str, Any], rows: Sequence[Row], metrics: Mapping[str, Any], details: Sequence[str] = ()
    ) -> None:
        """Write all files, or none, in place of an earlier run's. metrics.json leaves out the keys in `details`."""
        texts = {
            self.path / "config.yaml": yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True),
            self.path / "env.json": as_json(env),
            self._raw.with_name(f"{self.path.name}.csv"): _csv(rows),
            self._raw.with_name(f"{self.path.name}.json"): as_json(metrics),
            self._metrics: as_json(without(metrics, details)),
        }
        for folder in (self.path, self._raw.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            write_together(texts)
        except BaseException:
            with suppress(OSError):
                self.path.rmdir()  # empty unless an earlier run left results
            raise


def write_figures(folder: Path, config: Mapping[str, Any], env: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Write the figures of a command that is no experiment: a run's files, without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    config_text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_together(
        {folder / "config.yaml": config_text, folder / "env.json": as_json(env), folder / METRICS: as_json(metrics)}
    )


def run_id(name: str, config: Mapping[str, Any]) -> str:
    """Return a readable name and a short hash of the settings, usable as a folder name."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._=+-]+', '_', name)[:_NAME_LENGTH]}-{digest[:8]}"


def without(values: Any, keys: Sequence[str]) -> Any:
    """Return plain values without some dotted keys; a key applies to every element of a list."""
    if isinstance(values, list | tuple):
        return [without(value, keys) for value in values]
    if not isinstance(values, Mapping):
        return values
    below = {name: [key.partition(".")[2] for key in keys if key.startswith(f"{name}.")] for name in values}
    return {name: without(value, below[name]) for name, value in values.items() if name not in keys}


def as_json(values: Mapping[str, Any]) -> str:
    """Format JSON; a value that fits on one line is written on one."""
    return f"{_lines(values)}\n"


def _lines(value: Any, indent: str = "") -> str:
    line = json.dumps(value, allow_nan=False)
    if len(indent) + len(line) <= _LINE_LENGTH or not isinstance(value, Mapping | list | tuple):
        return line
    deeper = f"{indent}  "
    if isinstance(value, Mapping):
        names = (name if isinstance(name, str) else json.dumps(name) for name in value)
        parts = [
            f"{json.dumps(name)}: {_lines(part, deeper)}" for name, part in zip(names, value.values(), strict=True)
        ]
    else:
        parts = [_lines(part, deeper) for part in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    inner = ",\n".join(f"{deeper}{part}" for part in parts)
    return f"{opening}\n{inner}\n{indent}{closing}"


def _csv(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
