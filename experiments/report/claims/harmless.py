"""Points of curves that lose half a point at most: in hindsight, so an upper limit of what could be chosen."""

from experiments.frontier import Curve, best
from experiments.runs import Figures, Run

PAPERS_CURVE = ("llmcache", "mean")  # method and fingerprint
#: By what a loss is told, where 500 questions make half a point two and a half of them; elsewhere by the drop.
LOSS = {"openbookqa": "changed_answers"}
#: What these figures are called.
LOST = {"accuracy_drop": "drop", "changed_answers": "changed answers"}


def loss_of(task: str) -> str:
    """By what figure a task's loss is told."""
    return LOSS.get(task, "accuracy_drop")


def harmless_point(run: Run, curve: Curve) -> Figures | None:
    """The point of a curve with most hits that loses half a point at most; None where every point loses more."""
    return best(run.metrics["points"], curve, loss_of(run.task))


def harmless_rows(run: Run, curve: Curve) -> float:
    """Share of rows that such a point serves; 0 where there is none."""
    point = harmless_point(run, curve)
    return 0.0 if point is None else float(point["rows_served"])
