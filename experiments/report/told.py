"""The table of a kind of run whose summary tells it all: the same columns as on the screen, of every run."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.report.markdown import table
from experiments.runs.read import Run


def told(runs: Sequence[Run]) -> Iterator[str]:
    """One table, whose rows are those of all runs. Shares are fractions of 1."""
    names = list(runs[0].metrics["summary"][0])
    rows = [(run, shown) for run in runs for shown in run.metrics["summary"]]
    yield table(
        ("stream", "seed", *names),
        [(run.task, run.config["seed"], *(_cell(shown[name]) for name in names)) for run, shown in rows],
    )


def _cell(value: Any) -> str:
    """A value; missing is empty."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
