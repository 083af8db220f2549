"""Claims about time: cost of a request, speed-up of a stream, and generation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from experiments.metrics import paper
from experiments.metrics.frontier import at_tau
from experiments.report.claims.evidence import PAPERS_CURVE, THEIR_HARDWARE, hardware, harmless_rows, loss_of, rule_of
from experiments.report.markdown import number, percent, points, ratio
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs.read import Figures, Run


def latency(runs: Sequence[Run], results: Results, head: str) -> Judgement:
    told, possible, beyond = list[str](), list[str](), list[str]()
    for row in runs[0].metrics["calls"]:
        known = paper.MS.get((row["model"], row["head"]))
        if known is None or row["head"] != head or row["kept"] != "as the paper" or row["batch_size"] != 1:
            continue
        times = known[0] / known[1]
        least, middle, most = (hits_needed(row["detail"]["ratios"], times, which) for which in ("p5", "median", "p95"))
        hits = f"{percent(middle, 0)} hits ({percent(least, 0)} to {percent(most, 0)})"
        told.append(
            f"{row['model']}: {row['nocache_ms']:.1f} ms without a cache, a hit {row['hit_ms']:.1f}, a miss "
            f"{row['miss_ms']:.1f}; the paper's {times:.2f} times as fast takes {hits}"
        )
        (possible if most < 1 else beyond).append(f"{hits} for {row['model']}")
    if not told:
        return NOTHING
    why = (
        "A request costs what a hit costs or what a miss costs, so an average latency says how many requests hit, and "
        "little else. The paper gives none beside its table. What hit rates real streams allow is another claim. Where "
        "the head answers at every token, a hit still has to run it. The times are those of one row of the table; rows "
        "were measured minutes apart, and only ratios within one can be compared." + THEIR_HARDWARE
    )
    measured = f"on {(where := hardware(runs))}: {'; '.join(told)}"
    if beyond:
        return Judgement(Verdict.DOES_NOT_HOLD, measured, why, f"on {where} (it takes {', '.join(beyond)})")
    return Judgement(Verdict.HOLDS_UNDER, measured, why, f"{', '.join(possible)}, on {where}")


def hits_needed(ratios: Mapping[str, Figures], times: float, which: str = "median") -> float:
    """Return the hit rate at which a stream is `times` as fast; `which` picks the hit ratio. Above 1: unreachable."""
    miss, hit = ratios["miss/nocache"]["median"], ratios["hit/nocache"][which]
    return float((miss - 1 / times) / (miss - hit)) if miss > hit else float("inf")


#: Why accuracy may rise although answers change, by stream.
RISES: Mapping[str, str] = {
    "wikitext-repeats": (
        " That accuracy rises on wikitext-repeats is made by the stream: windows come back with some of their tokens "
        "replaced, but most of what is to be predicted is as before, and states of the window without the replacements "
        "come from unbroken text."
    )
}


@dataclass(frozen=True, slots=True)
class Gain:
    task: str
    times: float  # speed-up
    loss: float  # loss at that speed-up, a fraction of 1
    told: str  # both as text


def speed(runs: Sequence[Run], results: Results) -> Judgement:
    gains = [gain for run in runs for row in run.metrics["live"] for gain in _gains(run, row)]
    if not gains:
        return NOTHING
    fastest = max(gains, key=attrgetter("times"))
    harmless = max((gain for gain in gains if gain.loss <= paper.DROP), key=attrgetter("times"), default=None)
    told = [f"fastest: {fastest.told}"]
    if harmless is not None:
        told.append(f"fastest {rule_of(runs)}: {harmless.told}")
    large, free, stream = _large_model(runs, results)
    if large is not None:
        told.append(
            f"with BERT-base's costs of table 1 the most hits that a stream allows at that loss ({stream}) come to "
            f"{large:.2f} times, and if hits and lookups cost nothing, on whatever hardware, to {free:.2f}"
        )
    why = (
        "A hit saves all layers, but not the embedding, the lookup and the head, and a miss costs the lookup on top. "
        "So speed is a matter of the hit rate, and the hit rate of how many answers may be another request's."
        + THEIR_HARDWARE
    )
    if harmless is not None and harmless.loss < 0:
        why += RISES.get(harmless.task, "")
    measured, where = f"on {hardware(runs)}: {'; '.join(told)}", f"on {hardware(runs)}"
    if harmless is not None and harmless.times >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS, measured, why, where)
    if large is not None and large >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS_UNDER, measured, why, f"traffic such as {stream}, {where}")
    if fastest.times >= paper.SPEEDUP:
        loss = min(gain.loss for gain in gains if gain.times >= paper.SPEEDUP)
        return Judgement(Verdict.HOLDS_UNDER, measured, why, f"a loss of {points(loss)} points or more, {where}")
    if large is not None and free < paper.SPEEDUP:
        where += f" (free hits would give {free:.2f} times at most, on any)"
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why, where)


def _gains(run: Run, row: Figures) -> Iterator[Gain]:
    """Yield a live run's gain, and the gain its costs imply on the whole stream, with more hits and maybe more loss."""
    loss = loss_of(run.task)
    where = f"{run.task} at tau {row['tau']}"
    yield Gain(
        run.task,
        row["speedup"],
        row[loss],
        f"{where}, {number(row['speedup'], 2)} times live, {percent(row['hit_rate'])} hits among {row['n']:,} "
        f"requests, {_lost(row)}",
    )
    whole = at_tau(run.metrics["points"], PAPERS_CURVE, row["tau"])
    if row["speedup_all"] is not None and whole is not None:
        yield Gain(
            run.task,
            row["speedup_all"],
            whole[loss],
            f"{where}, {number(row['speedup_all'], 2)} times by its costs at the {percent(row['hit_rate_all'])} hits "
            f"among all {run.metrics['n']:,} requests, {_lost(whole)}",
        )


def _lost(figures: Figures) -> str:
    return (
        f"a drop of {points(figures['accuracy_drop'], figures['accuracy_drop_ci'])} points, "
        f"{percent(figures['changed_answers'])} of all answers changed"
    )


def _large_model(runs: Sequence[Run], results: Results) -> tuple[float | None, float, str]:
    """Return BERT-base's speed-up at the highest hit rate of any stream, that with free hits, and the stream."""
    calls = [row for run in results.get("table1_latency", ()) for row in run.metrics["calls"]]
    costs = next((row for row in calls if row["model"] == "bert-base" and row["kept"] == "pooled"), None)
    allowed = [(harmless_rows(run, PAPERS_CURVE)[0], run.task) for run in runs]
    if costs is None or not allowed:
        return None, 1.0, ""
    rate, task = max(allowed)
    mean_ms = (1 - rate) * costs["miss_ms"] + rate * costs["hit_ms"]
    free = 1 / (1 - rate) if rate < 1 else float("inf")
    return costs["nocache_ms"] / mean_ms, free, f"{task}, {percent(rate)}"


def generation(runs: Sequence[Run], results: Results) -> Judgement:
    row = next((row for row in runs[0].metrics["generation"] if row["model"] == "gpt2"), None)
    if row is None:
        return NOTHING
    without, with_kv = (row[f"{kind}_ms"]["median"] for kind in ("nocache", "kv_cache"))
    known, new = (row["ratios"][f"{kind}/kv_cache"] for kind in ("exact_hit", "miss"))
    where = f"on {hardware(runs)}"
    measured = (
        f"{where}: {row['prompt_tokens']} prompt and {row['new_tokens']} new tokens: {without:.0f} ms without any "
        f"cache, {with_kv:.0f} with K/V caching; with llmcache on top {ratio(known)} times the latter where the prompt "
        f"was asked before, {ratio(new)} where not (ratios of {row['nocache_ms']['n']} rounds: median, 5th to 95th "
        "percentile)"
    )
    why = (
        "K/V caching already removes what is computed twice within a generation; a cache across requests can only save "
        "the prefill, and only of a prompt that is known: the tokens after it have to be computed one by one."
        + THEIR_HARDWARE
    )
    if new["p95"] < 1:
        return Judgement(Verdict.HOLDS, measured, why, where)
    if known["p95"] < 1:
        return Judgement(Verdict.HOLDS_UNDER, measured, why, f"the whole prompt was asked before, {where}")
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why, where)
