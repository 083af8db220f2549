"""Claims about answer quality and hit rates under reuse."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.metrics import paper
from experiments.metrics.frontier import at_tau, of_curve
from experiments.report.claims.evidence import (
    NOTHING,
    Judgement,
    Results,
    Verdict,
    harmless_rows,
    harmless_tau,
    weak_models,
)
from experiments.report.markdown import percent, points
from experiments.runs.read import Figures, Run

STRAIGHT = 0.95  # least share of variance explained by a line to call the relation linear


def _at_a_tau(runs: Sequence[Run]) -> list[tuple[str, Figures]]:
    """Return the stream and the figures of every method with a tau."""
    served = [(run.task, figures) for run in runs for figures in run.metrics["methods"].values()]
    return [(task, row) for task, row in served if row["method"] == "llmcache" and "tau" in row["options"]]


def accuracy_told(runs: Sequence[Run]) -> str:
    return "drop, points: " + "; ".join(
        f"{task} {points(row['accuracy_drop'], row['accuracy_drop_ci'])} at {percent(row['hit_rate'])} hits, "
        f"{percent(row['changed_answers'])} changed"
        for task, row in _at_a_tau(runs)
    )


def accuracy(runs: Sequence[Run], results: Results) -> Judgement:
    found = [row for _, row in _at_a_tau(runs)]
    if not found:
        return NOTHING
    bounds = [row["accuracy_drop_ci"] for row in found if row["hit_rate"]]  # without hits, nothing can be lost
    weak = weak_models(runs)
    note = f"(a weak model shows the direction, not the size: {weak})" if weak else ""
    if not bounds:
        return Judgement(Verdict.HOLDS_UNDER, f"no reuse at all: nothing hit {note}".rstrip())
    if all(ci is not None and ci[1] < paper.DROP for ci in bounds):
        return Judgement(Verdict.HOLDS, note)
    if any(ci is not None and ci[0] > paper.DROP for ci in bounds):
        return Judgement(Verdict.DOES_NOT_HOLD, note)
    return Judgement(Verdict.HOLDS_UNDER, f"samples so small that the drop may be chance {note}".rstrip())


def documents_told(runs: Sequence[Run]) -> str:
    return f"{len(runs)} streams, by the hits that lose half a point at most"


def documents(runs: Sequence[Run], results: Results) -> Judgement:
    pairs = [[harmless_rows(run, curve) for curve in (paper.CURVE, ("doccache", None))] for run in runs]
    pairs = [pair for pair in pairs if any(rows for rows, _ in pair)]  # else both serve nothing on this stream
    n_ahead = sum(ours is not None and theirs is not None and ours[0] > theirs[1] for (_, ours), (_, theirs) in pairs)
    return _on_some(n_ahead, len(pairs))


def _on_some(n_held: int, n: int, which: str = "") -> Judgement:
    """Return the judgement on a claim that holds on some streams."""
    if not n:
        return NOTHING
    if n_held in (0, n):
        return Judgement(Verdict.HOLDS if n_held else Verdict.DOES_NOT_HOLD)
    return Judgement(Verdict.HOLDS_UNDER, f"{n_held} of {n} streams{which}")


def layers_told(runs: Sequence[Run]) -> str:
    written = ((run.task, run.metrics["runs"]["as_written"]) for run in runs)
    return "; ".join(
        f"{task}: {percent(row['hit_rate'])} in every layer alike, {percent(row['changed_per_hit'])} of them with "
        "another answer"
        for task, row in written
    )


def layers(runs: Sequence[Run], results: Results) -> Judgement:
    """Judge by the states: a hit is worth something where the stored state is like the one that it replaces.

    Hits cannot show it. As written they are the same in all layers; with a fingerprint a layer they can only rise with
    depth, since a row with a stored state meets the same entry again in the next layer.
    """
    for run in runs:
        alike = [row["alike_by_layer"] for row in run.metrics["layers"]]
        most = max(alike[: len(alike) // 2])
        if most < paper.HIT_RATE or alike[-1] >= most:
            return Judgement(Verdict.DOES_NOT_HOLD)
    return Judgement(Verdict.HOLDS)


def _plain(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without compression, from small to large."""
    return sorted((run for run in runs if run.config["cache"]["compression"]["name"] == "none"), key=_size)


def _size(run: Run) -> int:
    size: int = run.config["cache"]["max_entries"]
    return size


def memory_told(runs: Sequence[Run]) -> str:
    return ", ".join(f"{_size(run):,}: {percent(run.metrics['hit_rate'])}" for run in _plain(runs))


def memory(runs: Sequence[Run], results: Results) -> Judgement:
    plain = _plain(runs)
    if len(plain) < 3:
        return NOTHING
    rates = np.array([run.metrics["hit_rate"] for run in plain])
    if explained_by_line(np.log2([_size(run) for run in plain]), rates) < STRAIGHT or rates[-1] <= rates[0]:
        return Judgement(Verdict.DOES_NOT_HOLD)
    conditions = "; ".join(_limits(plain))
    return Judgement(Verdict.HOLDS_UNDER if conditions else Verdict.HOLDS, conditions)


def _limits(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the limits of what hit rates by size say about other traffic and sizes."""
    traffic = runs[0].config["task"].get("traffic")
    if traffic is not None:
        yield f"one stream of {runs[0].metrics['n']:,} requests, drawn with a popularity skew of {traffic['skew']}"
    for run in runs:
        if not run.metrics["evicted"] and not run.metrics["expelled"]:
            yield f"{_size(run):,} entries are more than it fills: {run.metrics['entries']:,} stored, none evicted"


def explained_by_line(x: Any, y: Any) -> float:
    """Return the share of the variance of `y` (N,) that a line in `x` (N,) explains; 1 if `y` is constant."""
    return 1.0 if np.ptp(y) == 0 else float(np.corrcoef(x, y)[0, 1] ** 2)


def _at_lowest(run: Run) -> Figures | None:
    return at_tau(run.metrics["points"], paper.CURVE, paper.TAUS[0])


def taus_told(runs: Sequence[Run]) -> str:
    low = ((run.task, _at_lowest(run)) for run in runs)
    told = ", ".join(f"{task} {points(row['accuracy_drop'])}" for task, row in low if row is not None)
    return f"drop at {paper.TAUS[0]}, points: {told}"


def taus(runs: Sequence[Run], results: Results) -> Judgement:
    asked = [run for run in runs if _at_lowest(run) is not None]
    inside = [run.task for run in asked if _is_inside(run)]
    return _on_some(len(inside), len(asked), f" ({', '.join(inside)})")


def _is_inside(run: Run) -> bool:
    """Whether a threshold with most harmless hits is in the paper's range, and serves more than exact repeats."""
    found = harmless_tau(run)
    if found is None:
        return False
    equal = [p["tau"] for p in of_curve(run.metrics["points"], paper.CURVE) if p["hit_rate"] == found["hit_rate"]]
    return None not in equal and any(paper.TAUS[0] <= tau <= paper.TAUS[1] for tau in equal)
