"""Claims about time: cost of a request, speed-up of a stream, and generation."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from experiments.metrics import paper
from experiments.metrics.frontier import at_tau
from experiments.report.claims.evidence import NOTHING, Judgement, Results, Verdict, hardware, harmless_rows, loss_of
from experiments.report.markdown import percent, points, ratio
from experiments.runs.read import Figures, Run


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
    """Return the ratios to K/V caching of a known and of a new prompt."""
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
