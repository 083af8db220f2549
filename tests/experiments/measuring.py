"""Runs measures on a generated stream and a model with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.data.streams.support_desk import Request, support_desk
from experiments.measures import MEASURES
from experiments.measures.base import Outcome
from experiments.report import tables
from experiments.runs.folder import without
from experiments.runs.grid import make_experiment
from experiments.runs.read import Run
from experiments.support.files import Folders

LEARN, N = 200, 320
TASK = {"name": "held_out", "model": "untrained", "limit": N, "data": {"path": "support_desk", "limit": 700}}
Values = Mapping[str, Any]


def desk(n: int, *intents: str) -> list[Request]:
    """Return `n` requests with these intents from the support-desk stream."""
    return [request for request in support_desk(40 * n) if request.label in intents][:n]


def learning(measure: str, **changes: Any) -> dict[str, Any]:
    """Settings of a measure that learns from the first LEARN of N requests."""
    return {
        "measure": measure,
        "task": TASK,
        "learn": LEARN,
        "max_drops": [0.2],
        "cache": {"answer": "class"},
    } | changes


def measured(values: Values, folders: Folders | None = None, **changes: Any) -> Outcome:
    """Run a measure with some settings changed; return its outcome."""
    done: Outcome = MEASURES[values["measure"]].run(make_experiment({**values, **changes}), folders or Folders())
    return done


def told(values: Values, outcome: Outcome) -> str:
    """Return the tables of a run from its saved figures; assert that all rows have the same columns."""
    assert len({tuple(row) for row in outcome.rows}) <= 1
    kept = json.loads(json.dumps(without(outcome.metrics, MEASURES[values["measure"]].details), allow_nan=False))
    run = Run("some", Path("some"), make_experiment(values).to_dict(), {}, kept)
    return tables.of_runs([run])
