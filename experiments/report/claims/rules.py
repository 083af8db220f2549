"""Rules that judge the paper's claims, and their evidence: points of curves that lose at most half a point.

The points are the best in hindsight, so an upper limit of what could be chosen in advance.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.metrics import paper
from experiments.metrics.frontier import Curve, at_tau, best, of_curve
from experiments.metrics.metrics import FEWEST
from experiments.report.markdown import percent, points, ratio
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


def _calls(runs: Sequence[Run], head: str) -> list[Figures]:
    """Return single calls of the paper's models, with its search and storage."""
    rows = [row for row in runs[0].metrics["calls"] if (row["model"], head) in paper.MS and row["head"] == head]
    return [row for row in rows if row["kept"] == "as the paper" and row["batch_size"] == 1]


def latency_told(runs: Sequence[Run], head: str) -> str:
    return "; ".join(
        f"{row['model']} {row['nocache_ms']:.1f} ms, a hit {row['hit_ms']:.1f}, a miss {row['miss_ms']:.1f}"
        for row in _calls(runs, head)
    )


def latency(runs: Sequence[Run], results: Results, head: str) -> Judgement:
    possible, beyond = [], []
    for row in _calls(runs, head):
        needed = partial(hits_needed, row["detail"]["ratios"], paper.MS[row["model"], head])
        least, middle, most = map(needed, ("p5", "median", "p95"))
        told = f"{percent(middle, 0)} hits ({percent(least, 0)} to {percent(most, 0)}) for {row['model']}"
        (possible if most < 1 else beyond).append(told)
    if beyond:
        return Judgement(Verdict.DOES_NOT_HOLD, f"on {hardware(runs)} (it takes {', '.join(beyond)})")
    return Judgement(Verdict.HOLDS_UNDER, f"{', '.join(possible)}, on {hardware(runs)}") if possible else NOTHING


def hits_needed(ratios: Mapping[str, Figures], ms: tuple[float, float], which: str) -> float:
    """Return the hit rate that gives the paper's ratio of times; `which` picks the hit ratio. Above 1: unreachable."""
    miss, hit = ratios["miss/nocache"]["median"], ratios["hit/nocache"][which]
    return float((miss - ms[1] / ms[0]) / (miss - hit)) if miss > hit else float("inf")


class Gain(NamedTuple):
    times: float  # speed-up
    loss: float  # loss at that speed-up, a fraction of 1


def speed_told(runs: Sequence[Run]) -> str:
    live = ((row, run) for run in runs for row in run.metrics["live"])
    row, run = max(live, key=lambda pair: float(pair[0]["speedup"]))
    return (
        f"fastest live run: {row['speedup']:.2f} times on {run.task} at tau {row['tau']}, a drop of "
        f"{points(row['accuracy_drop'])} points, {percent(row['changed_answers'])} of answers changed"
    )


def speed(runs: Sequence[Run], results: Results) -> Judgement:
    gains = [gain for run in runs for row in run.metrics["live"] for gain in _gains(run, row)]
    if not gains:
        return NOTHING
    harmless = max((gain.times for gain in gains if gain.loss <= paper.DROP), default=0.0)
    least_loss = min((gain.loss for gain in gains if gain.times >= paper.SPEEDUP), default=None)
    large, free, stream = _large_model(runs, results)
    where = f"on {hardware(runs)}"
    if harmless >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS, where)
    if large is not None and large >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS_UNDER, f"traffic such as {stream}, {where}")
    if least_loss is not None:
        return Judgement(Verdict.HOLDS_UNDER, f"a loss of {points(least_loss)} points or more, {where}")
    if large is not None and free < paper.SPEEDUP:
        where += f" (free hits would give {free:.2f} times at most, on any)"
    return Judgement(Verdict.DOES_NOT_HOLD, where)


def _gains(run: Run, row: Figures) -> Iterator[Gain]:
    """Yield a live run's gain, and the gain its costs imply on the whole stream, with more hits and maybe more loss."""
    loss = loss_of(run.task)
    yield Gain(row["speedup"], row[loss])
    whole = at_tau(run.metrics["points"], paper.CURVE, row["tau"])
    if row["speedup_all"] is not None and whole is not None:
        yield Gain(row["speedup_all"], whole[loss])


def _large_model(runs: Sequence[Run], results: Results) -> tuple[float | None, float, str]:
    """Return BERT-base's speed-up at the highest hit rate of any stream, that with free hits, and the stream."""
    calls = [row for run in results.get("table1_latency", ()) for row in run.metrics["calls"]]
    costs = next((row for row in calls if row["model"] == "bert-base" and row["kept"] == "pooled"), None)
    allowed = [(harmless_rows(run, paper.CURVE)[0], run.task) for run in runs]
    if costs is None or not allowed:
        return None, 1.0, ""
    rate, task = max(allowed)
    mean_ms = (1 - rate) * costs["miss_ms"] + rate * costs["hit_ms"]
    free = 1 / (1 - rate) if rate < 1 else float("inf")
    return costs["nocache_ms"] / mean_ms, free, f"{task}, {percent(rate)}"


def _generated(runs: Sequence[Run]) -> tuple[Figures, Figures] | None:
    row = next((row for row in runs[0].metrics["generation"] if row["model"] == "gpt2"), None)
    return None if row is None else (row["ratios"]["exact_hit/kv_cache"], row["ratios"]["miss/kv_cache"])


def generation_told(runs: Sequence[Run]) -> str:
    found = _generated(runs)
    return (
        "" if found is None else f"{ratio(found[0])} of its time where the prompt is known, {ratio(found[1])} where not"
    )


def generation(runs: Sequence[Run], results: Results) -> Judgement:
    found = _generated(runs)
    if found is None:
        return NOTHING
    known, new = found
    where = f"on {hardware(runs)}"
    if new["p95"] < 1:
        return Judgement(Verdict.HOLDS, where)
    if known["p95"] < 1:
        return Judgement(Verdict.HOLDS_UNDER, f"the whole prompt was asked before, {where}")
    return Judgement(Verdict.DOES_NOT_HOLD, where)


STRAIGHT = 0.95  # least share of variance explained by a line to call the relation linear


def _at_a_tau(runs: Sequence[Run]) -> list[tuple[str, Figures]]:
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
