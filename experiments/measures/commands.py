"""Measure `commands`: shell commands, one after another from an empty folder, and the wall time of each.

A command finds this checkout in `$CHECKOUT`. If one fails, the measure ends with its last lines.
"""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from pydantic import Field

from experiments.measures.base import Experiment, Outcome
from experiments.support.files import Folders
from llmcache import LLMCacheError

_CHECKOUT = Path(__file__).parents[2]
_OF_CALLER = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
_SHOWN = 10  # last lines of a command that failed


class Commands(Experiment):
    title: str  # of the run's folder
    commands: dict[str, str] = Field(min_length=1)  # for sh, by name

    @property
    def name(self) -> str:
        return self.title


def run(experiment: Commands, folders: Folders) -> Outcome:
    with TemporaryDirectory() as empty:
        rows = [
            {"command": name, "seconds": _seconds(name, line, Path(empty))}
            for name, line in experiment.commands.items()
        ]
    total = {"command": "all", "seconds": sum(row["seconds"] for row in rows)}
    return Outcome(rows, {"task": experiment.title, "summary": [*rows, total]})


def _seconds(name: str, command: str, folder: Path) -> float:
    """Run a command; return its seconds. Its environment is the caller's, without the caller's virtual environment."""
    environment = {key: value for key, value in os.environ.items() if key not in _OF_CALLER}
    started = perf_counter()
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment | {"CHECKOUT": str(_CHECKOUT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-_SHOWN:])
        raise LLMCacheError(f"commands.{name}: exit status {done.returncode}\n{last}")
    return perf_counter() - started
