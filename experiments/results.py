"""Where results lie: `<results-dir>/<experiment>/<run-id>/{config.yaml, env.json, rows.csv, metrics.json}`.

The run id is the readable name and a hash of all settings, so the path is the configuration: the same settings meet the
same folder on every machine. `metrics.json` comes last and whole; a folder without it is a run that did not finish.
"""

import csv
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.config import Named

Row = Mapping[str, Any]


class RunFolder:
    """The folder of one run."""

    def __init__(self, results_dir: Path, run: Named) -> None:
        """Work out the path; nothing is written yet.

        Args:
            results_dir: Root of all results.
            run: The run.
        """
        self._config = run.experiment.to_dict()
        self.path = results_dir / run.group / run_id(run.name, self._config)

    @property
    def is_done(self) -> bool:
        """Whether the run finished before."""
        return self._metrics.is_file()

    @property
    def metrics(self) -> dict[str, Any]:
        """The figures of a finished run."""
        figures: dict[str, Any] = json.loads(self._metrics.read_text(encoding="utf-8"))
        return figures

    def begin(self, env: Mapping[str, Any]) -> None:
        """Write settings and surroundings, before anything is measured; figures of an earlier run go."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics.unlink(missing_ok=True)
        _write(self.path / "config.yaml", yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True))
        _write(self.path / "env.json", _json(env))

    def finish(self, rows: Sequence[Row], metrics: Mapping[str, Any]) -> None:
        """Write the rows, then the figures.

        Args:
            rows: One a request, all with the same keys; None becomes an empty field.
            metrics: The figures; None stays null.
        """
        with (self.path / "rows.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
        _write(self._metrics, _json(metrics))

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.json"


def run_id(name: str, config: Mapping[str, Any]) -> str:
    """Readable name and short hash of the settings, fit for a folder name."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._=+-]+', '_', name)}-{digest[:8]}"


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
