"""The paper's claims, each with a rule that turns what was measured into a verdict.

Rules look at figures only, and were fixed before the run whose results lie in this repository.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import paper
from experiments.frontier import Curve, at_tau, best, of_curve
from experiments.report.markdown import number, percent, points, ratio
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs import Figures, Run


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of LLMCache (Bansal 2025).

    Attributes:
        said: The claim.
        config: The experiment that tests it.
        judge: Runs of that experiment, at least one, and those of all experiments by name, to a judgement.
    """

    said: str
    config: str
    judge: Callable[[Sequence[Run], Results], Judgement]


PAPERS_CURVE = ("llmcache", "mean")  # method and fingerprint
#: By what a loss is told, where 500 questions make half a point two and a half of them; elsewhere by the drop.
LOSS = {"openbookqa": "changed_answers"}
STRAIGHT = 0.95  # share of the variance that a line has to explain to be called one


def judge(results: Results) -> list[tuple[Claim, Judgement]]:
    """Every claim and what became of it, given the runs of each experiment."""
    own = [(claim, results.get(claim.config)) for claim in CLAIMS]
    return [(claim, claim.judge(runs, results) if runs else NOTHING) for claim, runs in own]


def _latency(runs: Sequence[Run], results: Results) -> Judgement:
    told, needed = [], []
    for row in runs[0].metrics["calls"]:
        known = paper.MS.get((row["model"], row["head"]))
        if known is not None and row["kept"] == "as the paper" and row["batch_size"] == 1:
            without, with_cache = known
            share = hits_needed(row, without / with_cache)
            needed.append(share)
            told.append(
                f"{row['model']}: {row['nocache_ms']:.1f} ms without a cache, a hit {row['hit_ms']:.1f}, a miss "
                f"{row['miss_ms']:.1f}; the paper's ratio of {without / with_cache:.2f} takes {percent(share, 0)} hits"
            )
    if not needed:
        return NOTHING
    why = (
        "A request costs what a hit costs or what a miss costs, so an average latency says how many requests hit, and "
        "little else. The paper gives none beside its table. What hit rates real streams allow is another claim."
    )
    if max(needed) > 1:
        return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)
    condition = f"a hit rate of at least {percent(min(needed), 0)} to {percent(max(needed), 0)}"
    return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, condition)


def hits_needed(row: Figures, ratio: float) -> float:
    """Share of hits at which a stream goes `ratio` times as fast as without a cache; above 1: none is enough."""
    target: float = row["nocache_ms"] / ratio
    gain: float = row["miss_ms"] - row["hit_ms"]
    return (row["miss_ms"] - target) / gain if gain > 0 else float("inf")


def _speed(runs: Sequence[Run], results: Results) -> Judgement:
    live = [(run.task, figures) for run in runs for figures in run.metrics["live"]]
    if not live:
        return NOTHING
    harmless = [pair for pair in live if _is_harmless(*pair)]
    fastest = max(live, key=_by_speed)
    told = [f"fastest of {len(live)} live runs: {_run(*fastest)}"]
    if harmless:
        told.append(f"fastest with a drop of half a point at most: {_run(*max(harmless, key=_by_speed))}")
    large, stream = _large_model(runs, results)
    if large is not None:
        told.append(
            f"with BERT-base's costs of table 1 the most hits that a stream allows at that drop ({stream}) come to "
            f"{large:.2f} times"
        )
    why = (
        "A hit saves all layers, but not the embedding, the lookup and the head, and a miss costs the lookup on top. "
        "So speed is a matter of the hit rate, and the hit rate of how many answers may be another request's."
    )
    if harmless and max(map(_by_speed, harmless)) >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS, "; ".join(told), why)
    if large is not None and large >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"traffic such as {stream}")
    if _by_speed(fastest) >= paper.SPEEDUP:
        drop = min(figures["accuracy_drop"] for _, figures in live if figures["speedup"] >= paper.SPEEDUP)
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"a loss of {points(drop)} points or more")
    return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)


def _large_model(runs: Sequence[Run], results: Results) -> tuple[float | None, str]:
    """Speed-up of BERT-base at the highest hit rate of any stream that costs half a point at most, and that stream."""
    calls = [row for run in results.get("table1_latency", ()) for row in run.metrics["calls"]]
    costs = next((row for row in calls if row["model"] == "bert-base" and row["kept"] == "pooled"), None)
    allowed = [(_harmless_rows(run, PAPERS_CURVE), run.task) for run in runs]
    if costs is None or not allowed:
        return None, ""
    rate, task = max(allowed)
    mean_ms = (1 - rate) * costs["miss_ms"] + rate * costs["hit_ms"]
    return costs["nocache_ms"] / mean_ms, f"{task}, {percent(rate)}"


def _by_speed(pair: tuple[str, Figures]) -> float:
    """Measured, or what the costs measured come to at the hit rate of the whole stream, whichever is more."""
    figures = pair[1]
    return max(figures["speedup"], figures["speedup_all"] or 0.0)


def _is_harmless(task: str, figures: Figures) -> bool:
    return bool(figures[LOSS.get(task, "accuracy_drop")] <= paper.DROP)


def _run(task: str, figures: Figures) -> str:
    whole = "" if figures["speedup_all"] is None else f" ({figures['speedup_all']:.2f} at the whole stream's hit rate)"
    return (
        f"{task} at tau {figures['tau']}, {number(figures['speedup'], 2)} times{whole}, {percent(figures['hit_rate'])} "
        f"hits, drop {points(figures['accuracy_drop'])} points, {percent(figures['changed_answers'])} of the answers "
        "changed"
    )


def _generation(runs: Sequence[Run], results: Results) -> Judgement:
    row = next((row for row in runs[0].metrics["generation"] if row["model"] == "gpt2"), None)
    if row is None:
        return NOTHING
    without, with_kv = (row[f"{kind}_ms"]["median"] for kind in ("nocache", "kv_cache"))
    known, new = (row["ratios"][f"{kind}/kv_cache"] for kind in ("exact_hit", "miss"))
    measured = (
        f"{row['prompt_tokens']} prompt and {row['new_tokens']} new tokens: {without:.0f} ms without any cache, "
        f"{with_kv:.0f} with K/V caching; with llmcache on top {ratio(known)} times the latter where the prompt was "
        f"asked before, {ratio(new)} where not (median of the rounds' ratios, 5th to 95th percentile)"
    )
    why = (
        "K/V caching already removes what is computed twice within a generation; a cache across requests can only save "
        "the prefill, and only of a prompt that is known: the tokens after it have to be computed one by one."
    )
    if new["p95"] < 1:
        return Judgement(Verdict.HOLDS, measured, why)
    if known["p95"] < 1:
        return Judgement(Verdict.HOLDS_UNDER, measured, why, "the whole prompt was asked before")
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)


def _accuracy(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_below, is_above = [], [], []
    for run in runs:
        for label, figures in run.metrics["methods"].items():
            if figures["method"] == "llmcache" and "tau" in figures["options"]:
                low, high = figures["accuracy_drop_ci"]
                if figures["hit_rate"]:  # where nothing hits, nothing can be lost
                    is_below.append(high < paper.DROP)
                    is_above.append(low > paper.DROP)
                told.append(
                    f"{run.task} ({label}): drop {points(figures['accuracy_drop'], (low, high))} points at "
                    f"{percent(figures['hit_rate'])} hits, {percent(figures['changed_answers'])} of the answers changed"
                )
    if not told:
        return NOTHING
    why = (
        "When a layer's whole output is replaced, the layers above compute the earlier request's answer: spans point "
        "into another passage, next tokens follow another text. Only requests with the same answer survive that."
    )
    if is_below and all(is_below):
        return Judgement(Verdict.HOLDS, "; ".join(told), why)
    if any(is_above):
        return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)
    return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, "samples so small that the drop may be chance")


def _documents(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_ahead = [], []
    for run in runs:
        layers, documents = (_harmless_rows(run, curve) for curve in (PAPERS_CURVE, ("doccache", None)))
        if layers or documents:  # else neither serves anything there
            is_ahead.append(layers >= documents)
        told.append(f"{run.task} {percent(layers)} against {percent(documents)}")
    if not told:
        return NOTHING
    measured = "rows served at a loss of half a point at most, llmcache against DocCache: " + "; ".join(told)
    why = (
        "Both compare mean embeddings and hand out another request's final states; whether they do it layer by layer "
        "changes what it costs, not what is answered. Rows of equal length only, as llmcache keeps whole sequences "
        "under heads that read tokens, mean fewer hits and fewer mistakes."
    )
    if is_ahead and all(is_ahead):
        return Judgement(Verdict.HOLDS, measured, why)
    if any(is_ahead):
        where = f"{sum(is_ahead)} of {len(is_ahead)} streams"
        return Judgement(Verdict.HOLDS_UNDER, measured, why, where)
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)


def _harmless(run: Run, curve: Curve) -> Figures | None:
    """The point of a curve with most hits that loses half a point at most; None where every point loses more."""
    return best(run.metrics["points"], curve, LOSS.get(run.task, "accuracy_drop"))


def _harmless_rows(run: Run, curve: Curve) -> float:
    """Share of rows that such a point serves; 0 where there is none."""
    point = _harmless(run, curve)
    return 0.0 if point is None else float(point["rows_served"])


def _layers(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_right = [], []
    for run in runs:
        layers, written = run.metrics["layers"], run.metrics["runs"]["as_written"]
        half = len(layers) // 2
        alike = [row["alike_by_layer"] for row in layers]
        is_right.append(max(alike[:half]) >= paper.HIT_RATE and alike[-1] < max(alike[:half]))
        told.append(
            f"{run.task}: as written {percent(written['hit_rate'])} in every layer, "
            f"{percent(written['changed_per_hit'])} of these hits with another answer; with a fingerprint a layer "
            f"{percent(layers[0]['hit_rate_per_layer'])} in the lowest and {percent(layers[-1]['hit_rate_per_layer'])} "
            f"in the highest; states that are alike, by layer: {', '.join(map(percent, alike))}"
        )
    why = (
        "One fingerprint and one tau decide for all layers at once, so the rate cannot differ between them. With a "
        "fingerprint of what enters each layer it can only rise with depth: who took a stored state meets the same "
        "entry again, at similarity 1, in the next layer. So the claim is judged by the states: a hit is worth "
        "something where the stored state is like the one that it replaces."
    )
    verdict = Verdict.HOLDS if all(is_right) else Verdict.DOES_NOT_HOLD
    return Judgement(verdict, "; ".join(told), why)


def _memory(runs: Sequence[Run], results: Results) -> Judgement:
    plain = [run for run in runs if run.config["cache"]["compression"]["name"] == "none"]
    by_size = sorted((run.config["cache"]["max_entries"], run.metrics["hit_rate"]) for run in plain)
    if len(by_size) < 3:
        return NOTHING
    sizes, rates = (np.array(values, dtype=float) for values in zip(*by_size, strict=True))
    straightness, gains = explained_by_line(np.log2(sizes), rates), np.diff(rates)
    steps = ", ".join(f"{size:.0f} entries {percent(rate)}" for size, rate in by_size)
    measured = (
        f"{steps}; a line in the logarithm of the size explains {percent(straightness)} of the variance; gains a "
        f"doubling between {points(gains.min())} and {points(gains.max())} points"
    )
    why = (
        "With requests as frequent as one over a power of their rank, twice the entries cover a share of traffic that "
        "changes slowly with size; once everything that repeats is held, more entries gain nothing."
    )
    verdict = Verdict.HOLDS if straightness >= STRAIGHT else Verdict.DOES_NOT_HOLD
    return Judgement(verdict, measured, why)


def explained_by_line(x: Any, y: Any) -> float:
    """Share of the variance of `y` (N,) that a line in `x` (N,) explains; 1 where nothing varies."""
    if np.ptp(y) == 0:
        return 1.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def _taus(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_inside = [], []
    low, high = paper.TAUS
    for run in runs:
        found, worst = _harmless(run, PAPERS_CURVE), at_tau(run.metrics["points"], PAPERS_CURVE, low)
        if found is None or worst is None:
            continue
        equal = [
            point["tau"]
            for point in of_curve(run.metrics["points"], PAPERS_CURVE)
            if point["hit_rate"] == found["hit_rate"]
        ]
        is_inside.append(None not in equal and any(low <= tau <= high for tau in equal))
        chosen = "no threshold, exact repeats only" if None in equal else f"tau {equal[0]}"
        told.append(
            f"{run.task}: {chosen} ({percent(found['hit_rate'])} hits); at {low} a drop of "
            f"{points(worst['accuracy_drop'])} points"
        )
    if not told:
        return NOTHING
    measured = "the threshold with most hits at a loss of half a point at most, in hindsight: " + "; ".join(told)
    why = (
        "Similarity of mean embeddings has another scale for every model and length of request: long texts of any "
        "content are more alike than short ones. No one interval can fit all."
    )
    if all(is_inside):
        return Judgement(Verdict.HOLDS, measured, why)
    if any(is_inside):
        return Judgement(Verdict.HOLDS_UNDER, measured, why, f"{sum(is_inside)} of {len(is_inside)} streams")
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)


CLAIMS: Sequence[Claim] = (
    Claim(
        "Table 1: latency falls from 218.6 to 91.3 ms (BERT-base), 123.4 to 57.9 (DistilBERT), 304.8 to 112.5 (GPT-2 "
        "small) at batch 1 and 128 tokens",
        "table1_latency",
        _latency,
    ),
    Claim("Inference is up to 3.1 times as fast", "fig5_tau", _speed),
    Claim("Table 1: GPT-2 is faster than with K/V caching (177.3 ms)", "table1_latency", _generation),
    Claim(
        "Table 2: accuracy falls by less than half a point on WikiText-103, SQuAD v2 and OpenBookQA",
        "table2_accuracy",
        _accuracy,
    ),
    Claim("Table 2: accuracy stays nearer to that of the model than with DocCache", "fig5_tau", _documents),
    Claim(
        "Figure 3: up to 92 % of requests hit in low and middle layers, fewer above", "fig3_hit_rate_by_layer", _layers
    ),
    Claim("Figure 4: the hit rate grows with the logarithm of the cache size", "fig4_memory", _memory),
    Claim("Figure 5: the best thresholds lie between 0.82 and 0.88", "fig5_tau", _taus),
)
