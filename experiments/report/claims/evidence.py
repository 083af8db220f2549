"""Evidence for verdicts: points of curves that lose at most half a point, the hardware, and model quality.

The points are the best in hindsight, so an upper limit of what could be chosen in advance.
"""

from collections.abc import Iterator, Sequence

from experiments.metrics import paper
from experiments.metrics.frontier import Curve, best, of_curve
from experiments.metrics.metrics import FEWEST
from experiments.runs.read import Figures, Run

PAPERS_CURVE = ("llmcache", "mean")  # method and fingerprint
#: Loss measured by changed answers, where 500 questions make half a point two and a half questions; elsewhere by the
#: drop.
LOSS = {"openbookqa": "changed_answers"}
#: Least ratio of a model's figure to its trivial baseline for the size of a loss to carry over to better models.
STRONG = 2.0

THEIR_HARDWARE = (
    f" The paper timed on {paper.HARDWARE}; what a layer, a lookup and the copy of a state cost there was not measured "
    "here, so the verdict is about this hardware alone."
)


def loss_of(task: str) -> str:
    return LOSS.get(task, "accuracy_drop")


def rule_of(runs: Sequence[Run]) -> str:
    """Return the allowed loss on these streams, in words."""
    others = [f"{run.task}: half a per cent of {LOSS[run.task].replace('_', ' ')}" for run in runs if run.task in LOSS]
    return "at a loss of half a point at most" + (f" ({', '.join(others)})" if others else "")


def harmless_point(run: Run, curve: Curve) -> Figures | None:
    """Return the curve's point with most hits that loses at most half a point; None without such a point."""
    return best(run.metrics["points"], curve, loss_of(run.task))


def harmless_rows(run: Run, curve: Curve) -> tuple[float, Sequence[float] | None]:
    """Return the share of rows that point serves, and the interval of the hits scaled to rows; 0 without a point."""
    point = harmless_point(run, curve)
    if point is None:
        return 0.0, (0.0, 0.0)
    rows, hits, bounds = point["rows_served"], point["hit_rate"], point["hit_rate_ci"]
    return float(rows), None if bounds is None else [bound * rows / hits if hits else bound for bound in bounds]


def harmless_tau(run: Run) -> Figures | None:
    """Return the point with most hits that loses at most half a point, among the paper's points with enough hits."""
    # With fewer than `FEWEST` hits, half may be wrong although none was seen to be. And at least one hit must be right.
    points = of_curve(run.metrics["points"], PAPERS_CURVE)
    enough = [point for point in points if point["precision"] and n_hits(run, point) >= FEWEST]
    return best(enough, PAPERS_CURVE, loss_of(run.task))


def n_hits(run: Run, point: Figures) -> int:
    hits: int = round(point["hit_rate"] * run.metrics["n"])
    return hits


def hardware(runs: Sequence[Run]) -> str:
    """Return the hardware of the runs: `2 CPU cores`, or the accelerators."""
    found = {run.env["gpu"] if _on_gpu(run) else f"{run.env['n_cpus']} CPU cores" for run in runs}
    return " and ".join(sorted(map(str, found)))


def _on_gpu(run: Run) -> bool:
    return run.env["gpu"] is not None and run.config.get("device", "cpu") != "cpu"


def weak_models(runs: Sequence[Run]) -> str:
    """Return models that barely beat a trivial answer, as `model F1 51.8 % where ... gives 44.9 %`; "" if none."""
    return "; ".join(dict.fromkeys(told for run in runs for told in _weak(run)))


def _weak(run: Run) -> Iterator[str]:
    known = run.metrics.get("facts", {}).get("prepared") or {}
    if "evaluation" in known:
        name, own, trivial, answer = "F1", known["evaluation"]["f1"], known["always_no_answer"]["f1"], "no answer ever"
    elif "chance" in known:
        name, own, trivial, answer = "accuracy", known["test"], known["chance"], "chance"
    else:
        return
    if own < STRONG * trivial:
        yield f"{run.task} {name} {100 * own:.1f} % where {answer} gives {100 * trivial:.1f} %"
