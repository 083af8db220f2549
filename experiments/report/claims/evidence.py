"""What verdicts rest on: points of curves that lose half a point at most, the hardware, and how good the models are.

The points are the best in hindsight, so an upper limit of what could be chosen.
"""

from collections.abc import Iterator, Sequence

from experiments.metrics import paper
from experiments.metrics.frontier import Curve, best, of_curve
from experiments.metrics.metrics import FEWEST
from experiments.runs.read import Figures, Run

PAPERS_CURVE = ("llmcache", "mean")  # method and fingerprint
#: By what a loss is told, where 500 questions make half a point two and a half of them; elsewhere by the drop.
LOSS = {"openbookqa": "changed_answers"}
#: How many times its trivial baseline a model has to reach for the size of a loss to say something of better models.
STRONG = 2.0

THEIR_HARDWARE = (
    f" The paper timed on {paper.HARDWARE}; what a layer, a lookup and the copy of a state cost there was not measured "
    "here, so the verdict is about this hardware alone."
)


def loss_of(task: str) -> str:
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
    hits: int = round(point["hit_rate"] * run.metrics["n"])
    return hits


def hardware(runs: Sequence[Run]) -> str:
    """Where the runs were measured: `2 CPU cores`, or the accelerators."""
    found = {run.env["gpu"] if _on_gpu(run) else f"{run.env['n_cpus']} CPU cores" for run in runs}
    return " and ".join(sorted(map(str, found)))


def _on_gpu(run: Run) -> bool:
    return run.env["gpu"] is not None and run.config.get("device", "cpu") != "cpu"


def weak_models(runs: Sequence[Run]) -> str:
    """Models that hardly do better than a trivial answer, as `model F1 51.8 % where ... gives 44.9 %`; empty: none."""
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
