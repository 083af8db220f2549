"""Points of curves that lose half a point at most: in hindsight, so an upper limit of what could be chosen."""

from collections.abc import Sequence

from experiments.metrics.frontier import Curve, best, of_curve
from experiments.metrics.metrics import FEWEST
from experiments.runs.read import Figures, Run

PAPERS_CURVE = ("llmcache", "mean")  # method and fingerprint
#: By what a loss is told, where 500 questions make half a point two and a half of them; elsewhere by the drop.
LOSS = {"openbookqa": "changed_answers"}


def loss_of(task: str) -> str:
    """By what figure a task's loss is told."""
    return LOSS.get(task, "accuracy_drop")


def rule_of(runs: Sequence[Run]) -> str:
    """How much may be lost on these streams, in words."""
    others = [f"{run.task}: half a per cent of {LOSS[run.task].replace('_', ' ')}" for run in runs if run.task in LOSS]
    return "at a loss of half a point at most" + (f" ({', '.join(others)})" if others else "")


def harmless_point(run: Run, curve: Curve) -> Figures | None:
    """The point of a curve with most hits that loses half a point at most; None where every point loses more."""
    return best(run.metrics["points"], curve, loss_of(run.task))


def harmless_rows(run: Run, curve: Curve) -> tuple[float, Sequence[float] | None]:
    """Share of rows that such a point serves, and its interval, that of the hits scaled to rows; 0 without a point."""
    point = harmless_point(run, curve)
    if point is None:
        return 0.0, (0.0, 0.0)
    rows, hits, bounds = point["rows_served"], point["hit_rate"], point["hit_rate_ci"]
    return float(rows), None if bounds is None else [bound * rows / hits if hits else bound for bound in bounds]


def harmless_tau(run: Run) -> Figures | None:
    """The point of the paper's curve with most hits that loses as little, and shows anything."""
    # Of fewer than `FEWEST` hits a half may be wrong though none was seen to be. And one at least has to be right.
    points = of_curve(run.metrics["points"], PAPERS_CURVE)
    enough = [point for point in points if point["precision"] and n_hits(run, point) >= FEWEST]
    return best(enough, PAPERS_CURVE, loss_of(run.task))


def n_hits(run: Run, point: Figures) -> int:
    """Hits of a point."""
    hits: int = round(point["hit_rate"] * run.metrics["n"])
    return hits
