"""Claims about what reuse does to answers, and about how many requests hit."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import paper
from experiments.frontier import at_tau, of_curve
from experiments.report.claims.harmless import PAPERS_CURVE, harmless_point, harmless_rows
from experiments.report.markdown import percent, points
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs import Run

STRAIGHT = 0.95  # share of the variance that a line has to explain to be called one


def accuracy(runs: Sequence[Run], results: Results) -> Judgement:
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
    if not is_below:
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, "no reuse at all: nothing hit")
    if all(is_below):
        return Judgement(Verdict.HOLDS, "; ".join(told), why)
    if any(is_above):
        return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)
    return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, "samples so small that the drop may be chance")


def documents(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_ahead = [], []
    for run in runs:
        layers, documents = (harmless_rows(run, curve) for curve in (PAPERS_CURVE, ("doccache", None)))
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


def layers(runs: Sequence[Run], results: Results) -> Judgement:
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


def memory(runs: Sequence[Run], results: Results) -> Judgement:
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
    holds = straightness >= STRAIGHT and rates[-1] > rates[0]
    verdict = Verdict.HOLDS if holds else Verdict.DOES_NOT_HOLD
    return Judgement(verdict, measured, why)


def explained_by_line(x: Any, y: Any) -> float:
    """Share of the variance of `y` (N,) that a line in `x` (N,) explains; 1 where nothing varies."""
    if np.ptp(y) == 0:
        return 1.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def taus(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_inside = [], []
    low, high = paper.TAUS
    for run in runs:
        found, worst = harmless_point(run, PAPERS_CURVE), at_tau(run.metrics["points"], PAPERS_CURVE, low)
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
