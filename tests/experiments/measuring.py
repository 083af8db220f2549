"""Runs measures on a generated stream and a model with random weights."""

from collections.abc import Mapping
from typing import Any

from experiments.measures import MEASURES
from experiments.measures.base import Outcome
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders

LEARN, N = 200, 320
TASK = {"name": "held_out", "model": "untrained", "limit": N, "data": {"path": "support_desk", "limit": 700}}


def learning(measure: str, **changes: Any) -> dict[str, Any]:
    """Settings of a measure that learns from the first LEARN of N requests."""
    values = {"measure": measure, "task": TASK, "learn": LEARN, "max_drops": [0.2], "cache": {"answer": "class"}}
    return values | changes


def measured(values: Mapping[str, Any], folders: Folders | None = None, **changes: Any) -> Outcome:
    """Run a measure with some settings changed; return its outcome."""
    done: Outcome = MEASURES[values["measure"]].run(make_experiment({**values, **changes}), folders or Folders())
    return done
