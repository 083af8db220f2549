"""Measure `trust`: calibrated reuse on one stream: what could be had, and what is had with a bound.

    first `learn` requests   computed and learned from; stored by every way that is compared
    the later ones           counted: in hindsight at many limits, replayed; with a limit chosen in advance, live

Curves: llmcache with sources that grow and with those of a calibration alone, the paper's way (mean embedding, nearest
one above tau), DocCache, the response caches. `precision`, the share of hits that leave the answer as it was, against
the hit rate tells them apart.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.folders import Folders
from experiments.frontier import best, curves
from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment, figures_of, later
from experiments.measures.sweep import SAME
from experiments.methods.base import COMPUTED
from experiments.metrics import quality
from experiments.progress import tracked
from experiments.recording import Recording, make_fingerprint
from experiments.rehearsal import Rehearsal, doubts_about, freeze, grow
from experiments.replay import Replay, Units, by_request, replay
from experiments.workload import Answer
from llmcache.calibration import split
from llmcache.claim import Sources

#: Losses that a frontier is told for.
LOSSES = {"accuracy_drop": "0.5 points", "changed_answers": "0.5 % changed"}


class Trust(LearningExperiment):
    """Settings of the measure.

    Attributes:
        sources: Who serves then: the calibration's requests alone, or later misses as well.
        n_limits: Limits of doubt at which reuse is replayed.
        taus: Thresholds of the other ways.
        baselines: The other ways.
        encoder: Sentence encoder of the semantic response cache.
    """

    sources: tuple[Sources, ...] = ("frozen", "growing")
    n_limits: int = Field(default=16, ge=2)
    taus: tuple[float, ...] = Field(min_length=1)
    baselines: tuple[Literal["paper", "doccache", "exact_response", "semantic_response"], ...] = (
        "paper",
        "doccache",
        "exact_response",
        "semantic_response",
    )
    encoder: str = "minilm"


def run(experiment: Trust, folders: Folders) -> Outcome:
    """Replay every curve, and serve what was calibrated.

    Raises:
        ConfigError: The data or the model does not fit the settings.
        FileNotFoundError: A data file is missing.
    """
    rehearsal = experiment.rehearse(folders)
    workload = rehearsal.workload
    points = [
        *_points_of_llmcache(experiment, rehearsal),
        *_points_of_others(experiment, rehearsal),
    ]
    calibrated = list(_serve_calibrated(experiment, rehearsal))
    counted, base = later(workload, experiment.learn), rehearsal.answers[experiment.learn :]
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": len(base),
        "nocache": quality(counted, base, base, np.zeros(len(base), dtype=bool), experiment.seed),
        "points": points,
        "calibrated": calibrated,
        "summary": [*_hindsight(points), *map(_told_in_advance, calibrated)],
    }
    return Outcome(points, metrics)


def _points_of_llmcache(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Both kinds of sources: those that grow begin with all that was learned from, the others with A and B."""
    cases = rehearsal.observed
    first, rest = cases[: experiment.learn], cases[experiment.learn :]
    limits = _some(rehearsal.trust.learn(first).tolist(), experiment.n_limits)
    for limit in tracked(limits, len(limits), "Replaying growing sources"):
        yield _point(experiment, rehearsal, ("llmcache", "growing"), limit, *grow(rehearsal.trust, first, rest, limit))
    learned, _ = split(len(first), experiment.claim(min(experiment.max_drops)))
    sources = [first[i] for i in learned]
    limits = _some(rehearsal.trust.learn(sources).tolist(), experiment.n_limits)
    doubts, kept = doubts_about(rehearsal.trust, sources, rest), {case.row.key for case in sources}
    for limit in limits:
        yield _point(experiment, rehearsal, ("llmcache", "frozen"), limit, *freeze(doubts, kept, rest, limit))


def _some(limits: Sequence[float], n: int) -> list[float]:
    """At most `n` of the limits, evenly spread, the first and the last among them."""
    places = np.linspace(0, len(limits) - 1, min(n, len(limits))).round().astype(int)
    return [limits[place] for place in places]


def _point(
    experiment: Trust,
    rehearsal: Rehearsal,
    curve: tuple[str, str],
    limit: float,
    served: NDArray[np.str_],
    sources: Sequence[str | None],
) -> dict[str, Any]:
    """Figures of llmcache at one limit."""
    told = rehearsal.answers_from(experiment.learn, sources)
    return _named(curve, limit, None) | _figures(experiment, rehearsal, told, served)


def _named(curve: tuple[str, str | None], limit: float | None, tau: float | None) -> dict[str, Any]:
    return {"method": curve[0], "fingerprint": curve[1], "limit": limit, "tau": tau}


def _figures(
    experiment: Trust, rehearsal: Rehearsal, told: Sequence[Answer], served: NDArray[np.str_]
) -> dict[str, Any]:
    counted = later(rehearsal.workload, experiment.learn)
    return figures_of(counted, rehearsal.answers[experiment.learn :], told, served, experiment.seed)


def _points_of_others(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """The other ways. What llmcache learns from, they store without searching it."""
    recording = Recording(rehearsal.workload, rehearsal.outputs)
    for name in experiment.baselines:
        units, answers_of = _way(name, experiment, recording)
        units = replace(units, first_searched=experiment.learn)
        taus = (math.inf,) if name == "exact_response" else (SAME, *experiment.taus)
        for tau, again in zip(taus, replay(units, taus), strict=True):
            served, told = by_request(units, again), answers_of(units, again)
            at = _named((name, None), None, None if math.isinf(tau) else tau)
            yield at | _figures(experiment, rehearsal, told[experiment.learn :], served[experiment.learn :])


def _way(name: str, experiment: Trust, recording: Recording) -> tuple[Units, Callable[[Units, Replay], list[Answer]]]:
    """What a way looks up, and how its answers are read."""
    if name == "doccache":
        return recording.documents(), recording.handed
    if name == "semantic_response":
        return recording.texts(experiment.encoder), recording.borrowed
    mean = recording.rows(make_fingerprint("mean"), fits_any_length=True)
    return mean, recording.reread if name == "paper" else recording.borrowed


def _serve_calibrated(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Calibrate on the first requests, for each claim anew, and serve the later ones live and in order."""
    first = rehearsal.observed[: experiment.learn]
    for sources in experiment.sources:
        for max_drop in experiment.max_drops:
            claim = experiment.claim(max_drop, sources)
            rehearsal.cache.clear()  # what an earlier claim's misses left would serve repeats
            found = rehearsal.trust.calibrate(first, claim)
            told, served = _serve(rehearsal, experiment.learn, f"Live: {sources}, {max_drop:g}")
            yield {
                "sources": sources,
                "max_drop": max_drop,
                "delta": claim.delta,
                "limit": None if found.chosen is None else found.chosen.limit,
                "hit_rate_expected": None if found.chosen is None else found.chosen.hit_rate,
                "bound": None if found.chosen is None else found.chosen.bound,
                "is_certified": found.is_certified,
                "n_sources": found.n_sources,
                "n_tested": found.n_tested,
                "calibration_s": round(found.seconds, 3),
                **_figures(experiment, rehearsal, told, served),
            }


def _serve(rehearsal: Rehearsal, first: int, what: str) -> tuple[list[Answer], NDArray[np.str_]]:
    """What the later requests are told by the cache as it is, and what serves each."""
    workload, told, served = rehearsal.workload, [], []
    for number in tracked(range(first, len(workload.requests)), len(workload.requests) - first, what):
        output = rehearsal.cache(**workload.requests[number].inputs)
        told.append(workload.answer(output, number))
        served.append(rehearsal.cache.last[0].rung or COMPUTED)
    return told, np.array(served)


def _hindsight(points: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Most hits of each curve, by what may be lost: what nobody could have chosen in advance."""
    for loss, within in LOSSES.items():
        for curve in curves(points):
            point = best(points, curve, loss)
            yield _shown(" ".join(name for name in curve if name), within, "hindsight hits", point)


def _told_in_advance(row: Mapping[str, Any]) -> dict[str, Any]:
    within = f"{100 * row['max_drop']:g} % changed"
    return _shown(f"llmcache {row['sources']}", within, "calibrated hits", row) | {"bound": row["bound"]}


def _shown(way: str, within: str, column: str, figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a table on the screen has of a setting. Hindsight and what was chosen in advance never share a column."""
    got = figures or {}
    row = {"way": way, "at most": within, "hindsight hits": None, "calibrated hits": None}
    row[column] = got.get("hit_rate")
    return row | {
        "changed": got.get("changed_answers"),
        "drop": got.get("accuracy_drop"),
        "bound": None,
    }
