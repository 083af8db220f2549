"""Where results lie: `<results-dir>/<experiment>/<run-id>/{config.yaml, env.json, metrics.json}`.

The run id is the readable name and a hash of all settings, so the path is the configuration: the same settings meet the
same folder on every machine. Nothing is there before the run is over; then `metrics.json` comes last. The rows of a
run, one a request or one a point of a curve, go to `<results-dir>/raw/<experiment>/<run-id>.csv`, which git ignores.
While a run is measured, a lock file in `<results-dir>` keeps other processes away from it.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import yaml

from experiments.runs.grid import Named
from experiments.support.files import write_together
from experiments.support.lock import held
from llmcache.errors import ConfigError

Row = Mapping[str, Any]

METRICS = "metrics.json"
RAW = "raw"  # folder of rows
_NAME_LENGTH = 150  # file systems take names of 255 bytes; hash and lock file need some of them


class RunFolder:
    """The folder of one run."""

    def __init__(self, results_dir: Path, run: Named) -> None:
        self._config = run.experiment.to_dict()
        self.path = results_dir / run.group / run_id(run.name, self._config)
        self.rows = results_dir / RAW / run.group / f"{self.path.name}.csv"
        self._lock = results_dir / f".{run.group}.{self.path.name}.lock"

    @property
    def is_done(self) -> bool:
        """Whether the run finished before."""
        return self._metrics.is_file()

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of a finished run."""
        try:
            figures: dict[str, Any] = json.loads(self._metrics.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self._metrics}: not valid JSON; measure again with --force") from error
        return figures

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes away from this run; see `experiments.support.lock.held`."""
        return held(self._lock)

    def write(self, env: Mapping[str, Any], rows: Sequence[Row], metrics: Mapping[str, Any]) -> None:
        """Write everything, or nothing, in place of what an earlier run left."""
        texts = {
            self.path / "config.yaml": yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True),
            self.path / "env.json": _json(env),
            self.rows: _csv(rows),
            self._metrics: _json(metrics),
        }
        for folder in (self.path, self.rows.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            write_together(texts)
        except BaseException:
            with suppress(OSError):
                self.path.rmdir()  # empty unless there were results before
            raise

    @property
    def _metrics(self) -> Path:
        return self.path / METRICS


def write_figures(folder: Path, config: Mapping[str, Any], env: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Write what a command measured that is no experiment: the same files as of a run, without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    config_text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    write_together(
        {folder / "config.yaml": config_text, folder / "env.json": _json(env), folder / METRICS: _json(metrics)}
    )


def run_id(name: str, config: Mapping[str, Any]) -> str:
    """Readable name and short hash of the settings, fit for a folder name."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._=+-]+', '_', name)[:_NAME_LENGTH]}-{digest[:8]}"


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _csv(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
