"""What a verdict hangs on beside its figures: the hardware that times were taken on, and how good the models are."""

from collections.abc import Iterator, Sequence

from experiments.metrics import paper
from experiments.runs.read import Run

#: How many times its trivial baseline a model has to reach for the size of a loss to say something of better models.
STRONG = 2.0

THEIR_HARDWARE = (
    f" The paper timed on {paper.HARDWARE}; what a layer, a lookup and the copy of a state cost there was not measured "
    "here, so the verdict is about this hardware alone."
)


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
