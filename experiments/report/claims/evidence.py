"""Evidence for verdicts: points of curves that lose at most half a point, the hardware, and model quality.

The points are the best in hindsight, so an upper limit of what could be chosen in advance.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.metrics import paper
from experiments.metrics.frontier import Curve, best, of_curve
from experiments.metrics.metrics import FEWEST
from experiments.runs.read import Figures, Run

#: Finished runs by experiment.
Results = Mapping[str, Sequence[Run]]


class Verdict(StrEnum):
    HOLDS = "holds"
    HOLDS_UNDER = "partly"
    DOES_NOT_HOLD = "fails"
    INCOMPLETE = "incomplete"
    NOT_MEASURED = "unmeasured"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict  # on the claim as written
    condition: str = ""  # with `HOLDS_UNDER`, when it holds; else a note to the verdict


NOTHING = Judgement(Verdict.NOT_MEASURED)

#: Loss measured by changed answers, where 500 questions make half a point two and a half questions; elsewhere by the
#: drop.
LOSS = {"openbookqa": "changed_answers"}
#: Least ratio of a model's figure to its trivial baseline for the size of a loss to carry over to better models.
STRONG = 2.0


def loss_of(task: str) -> str:
    return LOSS.get(task, "accuracy_drop")


def harmless_rows(run: Run, curve: Curve) -> tuple[float, Sequence[float] | None]:
    """Return the most rows that a point of the curve serves at a loss of half a point at most, and their interval."""
    point = best(run.metrics["points"], curve, loss_of(run.task))
    if point is None:
        return 0.0, (0.0, 0.0)
    rows, hits, bounds = point["rows_served"], point["hit_rate"], point["hit_rate_ci"]
    return float(rows), None if bounds is None else [bound * rows / hits if hits else bound for bound in bounds]


def harmless_tau(run: Run) -> Figures | None:
    """Return the point with most hits that loses at most half a point, among the paper's points with enough hits."""
    # With fewer than `FEWEST` hits, half may be wrong although none was seen to be. And at least one hit must be right.
    points = of_curve(run.metrics["points"], paper.CURVE)
    enough = [p for p in points if p["precision"] and round(p["hit_rate"] * run.metrics["n"]) >= FEWEST]
    return best(enough, paper.CURVE, loss_of(run.task))


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
