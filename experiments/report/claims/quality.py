"""Claims about answer quality and hit rates under reuse."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.metrics import paper
from experiments.metrics.frontier import at_tau, of_curve
from experiments.metrics.metrics import FEWEST, share_interval
from experiments.report.claims.evidence import PAPERS_CURVE, harmless_rows, harmless_tau, n_hits, rule_of, weak_models
from experiments.report.markdown import percent, points, share
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs.read import Figures, Run

STRAIGHT = 0.95  # least share of variance explained by a line to call the relation linear
MORE, FEWER, CHANCE = "more", "fewer", "no difference beyond chance"


def accuracy(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_below, is_above = [], [], []
    for run in runs:
        for label, figures in run.metrics["methods"].items():
            if figures["method"] == "llmcache" and "tau" in figures["options"]:
                bounds = figures["accuracy_drop_ci"]
                if figures["hit_rate"]:  # without hits, nothing can be lost
                    is_below.append(bounds is not None and bounds[1] < paper.DROP)
                    is_above.append(bounds is not None and bounds[0] > paper.DROP)
                told.append(
                    f"{run.task} ({label}): drop {points(figures['accuracy_drop'], bounds)} points at "
                    f"{percent(figures['hit_rate'])} hits, {percent(figures['changed_answers'])} of the answers changed"
                )
    if not told:
        return NOTHING
    why = (
        "When a layer's whole output is replaced, the layers above compute the earlier request's answer: spans point "
        "into another passage, next tokens follow another text. Only requests with the same answer survive that."
    )
    weak = weak_models(runs)
    note = f"(a weak model shows the direction, not the size: {weak})" if weak else ""
    if weak:
        why += " A model that hardly beats a trivial answer carries no magnitude: a better one may lose more or less."
    if not is_below:
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"no reuse at all: nothing hit {note}".rstrip())
    if all(is_below):
        return Judgement(Verdict.HOLDS, "; ".join(told), why, note)
    if any(is_above):
        return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why, note)
    small = "samples so small that the drop may be chance"
    return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"{small} {note}".rstrip())


def documents(runs: Sequence[Run], results: Results) -> Judgement:
    told, found = [], []
    for run in runs:
        ours, theirs = (harmless_rows(run, curve) for curve in (PAPERS_CURVE, ("doccache", None)))
        if ours[0] or theirs[0]:  # else both serve nothing on this stream
            found.append(_difference(ours[1], theirs[1]))
            told.append(f"{run.task} {share(*ours)} against {share(*theirs)}: {found[-1]}")
    if not told:
        return NOTHING
    counts = ", ".join(f"{what} on {found.count(what)}" for what in (MORE, FEWER, CHANCE))
    measured = (
        f"rows served {rule_of(runs)}, llmcache against DocCache: {'; '.join(told)}. So {counts} of {len(found)} "
        "streams, where intervals that overlap are taken for chance"
    )
    why = (
        "Both compare mean embeddings and hand out another request's final states; whether they do it layer by layer "
        "changes what it costs, not what is answered. Rows of equal length only, as llmcache keeps whole sequences "
        "under heads that read tokens, mean fewer hits and fewer mistakes."
    )
    if weak := weak_models(runs):
        why += f" The share of a weak model says little of a better one: {weak}."
    n_ahead = found.count(MORE)
    if n_ahead == len(found):
        return Judgement(Verdict.HOLDS, measured, why)
    if n_ahead:
        return Judgement(Verdict.HOLDS_UNDER, measured, why, f"{n_ahead} of {len(found)} streams")
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)


def _difference(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    """Return `MORE`, `FEWER` or `CHANCE` by comparing the intervals of two shares."""
    if ours is None or theirs is None:
        return CHANCE
    if ours[0] > theirs[1]:
        return MORE
    return FEWER if ours[1] < theirs[0] else CHANCE


def layers(runs: Sequence[Run], results: Results) -> Judgement:
    told, is_right = [], []
    for run in runs:
        layers, written = run.metrics["layers"], run.metrics["runs"]["as_written"]
        half = len(layers) // 2
        alike = [row["alike_by_layer"] for row in layers]
        is_right.append(max(alike[:half]) >= paper.HIT_RATE and alike[-1] < max(alike[:half]))
        told.append(
            f"{run.task} (n = {written['n']:,}): as written {_exactly(run, written['hit_rate'])} in every layer, "
            f"{percent(written['changed_per_hit'])} of these hits with another answer; with a fingerprint a layer "
            f"{percent(layers[0]['hit_rate_per_layer'])} in the lowest and {percent(layers[-1]['hit_rate_per_layer'])} "
            f"in the highest; states that are alike, by layer: {', '.join(_exactly(run, value) for value in alike)}"
        )
    why = (
        "One fingerprint and one tau decide for all layers at once, so the rate cannot differ between them. With a "
        "fingerprint of what enters each layer it can only rise with depth: who took a stored state meets the same "
        "entry again, at similarity 1, in the next layer. So the claim is judged by the states: a hit is worth "
        "something where the stored state is like the one that it replaces."
    )
    verdict = Verdict.HOLDS if all(is_right) else Verdict.DOES_NOT_HOLD
    return Judgement(verdict, "; ".join(told), why)


def _exactly(run: Run, value: float) -> str:
    """Format a share of the counted requests, with its interval if windows of text are independent."""
    if run.config["task"].get("repeats") is not None:  # windows made from one window are one cluster
        return percent(value)
    n = run.metrics["runs"]["as_written"]["n"]
    return share(value, share_interval(round(value * n), n))


def memory(runs: Sequence[Run], results: Results) -> Judgement:
    plain = [run for run in runs if run.config["cache"]["compression"]["name"] == "none"]
    if len(plain) < 3:
        return NOTHING
    plain.sort(key=_size)
    sizes, rates = np.array([_size(run) for run in plain]), np.array([run.metrics["hit_rate"] for run in plain])
    straightness, gains = explained_by_line(np.log2(sizes), rates), np.diff(rates)
    steps = ", ".join(f"{size} entries {percent(rate)}" for size, rate in zip(sizes, rates, strict=True))
    measured = (
        f"{steps}; a line in the logarithm of the size explains {percent(straightness)} of the variance of these "
        f"{len(plain)} rates; gains a doubling between {points(gains.min())} and {points(gains.max())} points"
    )
    why = (
        "With requests as frequent as one over a power of their rank, twice the entries cover a share of traffic that "
        "changes slowly with size; once everything that repeats is held, more entries gain nothing."
    )
    if straightness < STRAIGHT or rates[-1] <= rates[0]:
        return Judgement(Verdict.DOES_NOT_HOLD, measured, why)
    if conditions := "; ".join(_limits(plain)):
        return Judgement(Verdict.HOLDS_UNDER, measured, why, conditions)
    return Judgement(Verdict.HOLDS, measured, why)


def _limits(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the limits of what hit rates by size say about other traffic and sizes."""
    traffic = runs[0].config["task"].get("traffic")
    if traffic is not None:
        yield f"one stream of {runs[0].metrics['n']:,} requests, drawn with a popularity skew of {traffic['skew']}"
    for run in runs:
        if not run.metrics["evicted"] and not run.metrics["expelled"]:
            yield f"{_size(run):,} entries are more than it fills: {run.metrics['entries']:,} stored, none evicted"


def _size(run: Run) -> int:
    size: int = run.config["cache"]["max_entries"]
    return size


def explained_by_line(x: Any, y: Any) -> float:
    """Return the share of the variance of `y` (N,) that a line in `x` (N,) explains; 1 if `y` is constant."""
    if np.ptp(y) == 0:
        return 1.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def taus(runs: Sequence[Run], results: Results) -> Judgement:
    told, inside, judged = list[str](), list[str](), list[Run]()
    low, high = paper.TAUS
    for run in runs:
        worst = at_tau(run.metrics["points"], PAPERS_CURVE, low)
        if worst is None:
            continue
        judged.append(run)
        found = harmless_tau(run)
        equal = [] if found is None else _taus_with_as_many_hits(run, found)
        if None not in equal and any(tau is not None and low <= tau <= high for tau in equal):
            inside.append(run.task)
        told.append(
            f"{run.task} (n = {run.metrics['n']:,}): {_chosen(run, found, equal)}; at {low} a drop of "
            f"{points(worst['accuracy_drop'], worst['accuracy_drop_ci'])} points"
        )
    if not told:
        return NOTHING
    measured = (
        f"the threshold with most hits {rule_of(judged)}, of those with {FEWEST} hits or more, not all wrong, in "
        f"hindsight: {'; '.join(told)}"
    )
    why = (
        "Similarity of mean embeddings has another scale for every model and length of request: long texts of any "
        "content are more alike than short ones. No one interval can fit all."
    )
    if weak := weak_models(judged):
        why += f" The share of a weak model says little of a better one: {weak}."
    if len(inside) == len(told):
        return Judgement(Verdict.HOLDS, measured, why)
    if inside:
        return Judgement(
            Verdict.HOLDS_UNDER, measured, why, f"{len(inside)} of {len(told)} streams ({', '.join(inside)})"
        )
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)


def _taus_with_as_many_hits(run: Run, found: Figures) -> list[float | None]:
    curve = of_curve(run.metrics["points"], PAPERS_CURVE)
    return [point["tau"] for point in curve if point["hit_rate"] == found["hit_rate"]]


def _chosen(run: Run, found: Figures | None, equal: Sequence[float | None]) -> str:
    if found is None:
        return "no threshold"
    chosen = "no threshold, exact repeats only" if None in equal else f"tau {found['tau']}"
    return (
        f"{chosen}, {n_hits(run, found):,} hits ({percent(found['hit_rate'])}), a drop of "
        f"{points(found['accuracy_drop'], found['accuracy_drop_ci'])} points"
    )
