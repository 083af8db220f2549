"""Measure `trust`: calibrated reuse on one stream: what could be had, and what is had with a bound.

    first `learn` requests   computed and learned from; stored by every way that is compared
    the later ones           counted: in hindsight at many limits, replayed; with a limit chosen in advance, live

Curves: llmcache with sources that grow and with those of a calibration alone, what its parts do alone (neighbours
without a forecast, the forecast without neighbours: `student`), the paper's way (mean embedding, nearest one above
tau), DocCache, the response caches. `precision`, the share of hits that leave the answer as it was, against the hit
rate tells them apart. All that has a threshold is calibrated as well, by the same tests on the same requests.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment, figures_of, later
from experiments.measures.sweep import SAME
from experiments.methods.base import COMPUTED, is_hit
from experiments.methods.responses import Encoder
from experiments.metrics.frontier import best, curves
from experiments.metrics.metrics import quality, share_interval
from experiments.replay.advance import choose_threshold, serve
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.rehearsal import Rehearsal, freeze, grow, risks_about
from experiments.replay.replay import Replay, Units, by_request, replay
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration, split
from llmcache.calibration.risk_target import Sources

#: Losses that a frontier is told for.
LOSSES = {"accuracy_drop": "0.5 points", "changed_answers": "0.5 % changed"}

#: Parts of llmcache, by how it decides.
DECISIONS: Mapping[str, Mapping[str, Any]] = {
    "neighbours": {"name": "risk", "forecast": False},
    "student": {"name": "student"},
    "risk": {"name": "risk"},
    "combined": {"name": "combined"},
}
_N_TIMED = 200  # lookups of the semantic response cache

Reading = Callable[[Units, Replay], list[Answer]]


class Trust(LearningExperiment):
    """Settings of the measure.

    Attributes:
        sources: Who serves then: the calibration's requests alone, or later misses as well.
        n_limits: Limits of risk at which reuse is replayed.
        decisions: Other ways to decide that are shown beside that of the settings, with frozen sources: neighbours
            alone, the forecast alone, `risk` (neighbours who vote, and the forecast), `combined` (risk or student).
        taus: Thresholds of the other ways.
        baselines: The other ways.
        encoder: Sentence encoder of the semantic response cache.
    """

    sources: tuple[Sources, ...] = ("frozen", "growing")
    n_limits: int = Field(default=16, ge=2)
    decisions: tuple[Literal["neighbours", "student", "risk", "combined"], ...] = (
        "neighbours",
        "student",
        "combined",
    )
    taus: tuple[float, ...] = Field(min_length=1)
    baselines: tuple[Literal["paper", "doccache", "exact_response", "semantic_response"], ...] = (
        "paper",
        "doccache",
        "exact_response",
        "semantic_response",
    )
    encoder: str = "minilm"


def run(experiment: Trust, folders: Folders) -> Outcome:
    """Replay every curve, and serve what was calibrated."""
    rehearsal = experiment.rehearse(folders)
    workload = rehearsal.workload
    points, calibrated = [*_points_of_llmcache(experiment, rehearsal)], [*_serve_calibrated(experiment, rehearsal)]
    for more, chosen in (_parts(experiment, rehearsal), _others(experiment, rehearsal)):
        points += more
        calibrated += chosen
    counted, base = later(workload, experiment.learn), rehearsal.answers[experiment.learn :]
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": len(base),
        "nocache": quality(counted, base, base, np.zeros(len(base), dtype=bool), experiment.seed),
        "model_ms": rehearsal.model_ms,
        "points": points,
        "calibrated": calibrated,
        "summary": [*_hindsight(points), *map(_told_in_advance, calibrated)],
    }
    return Outcome(points, metrics)


def _points_of_llmcache(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Both kinds of sources: those that grow begin with all that was learned from, the others with A and B."""
    cases = rehearsal.observed
    first, rest = cases[: experiment.learn], cases[experiment.learn :]
    limits = (
        _some(rehearsal.calibrated.learn(first).tolist(), experiment.n_limits)
        if "growing" in experiment.sources
        else []
    )
    for limit in tracked(limits, len(limits), "Replaying growing sources"):
        yield _point(
            experiment, rehearsal, ("llmcache", "growing"), limit, *grow(rehearsal.calibrated, first, rest, limit)
        )
    yield from _frozen_points(experiment, rehearsal, rehearsal.calibrated, "llmcache")


def _frozen_points(
    experiment: Trust, rehearsal: Rehearsal, calibrated: CalibratedReuse, name: str
) -> Iterator[dict[str, Any]]:
    """A curve with the sources of a calibration alone."""
    first, rest = rehearsal.observed[: experiment.learn], rehearsal.observed[experiment.learn :]
    learned, _ = split(len(first), experiment.risk_target(min(experiment.max_drops)))
    sources = [first[i] for i in learned]
    limits = _some(calibrated.learn(sources).tolist(), experiment.n_limits)
    risks, kept = risks_about(calibrated, sources, rest), {case.row.key for case in sources}
    for limit in limits:
        yield _point(experiment, rehearsal, (name, "frozen"), limit, *freeze(risks, kept, rest, limit))


def _parts(experiment: Trust, rehearsal: Rehearsal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What parts of llmcache do alone: a curve and calibrations of each, replayed."""
    points: list[dict[str, Any]] = []
    calibrated: list[dict[str, Any]] = []
    for name in experiment.decisions:
        cache, reuse = rehearsal.beside(experiment.cache | {"decide": DECISIONS[name]})
        points += _frozen_points(experiment, rehearsal, reuse, name)
        calibrated += [_part(experiment, rehearsal, reuse, name, drop) for drop in experiment.max_drops]
        cache.unwrap()
    return points, calibrated


def _part(
    experiment: Trust, rehearsal: Rehearsal, calibrated: CalibratedReuse, name: str, max_drop: float
) -> dict[str, Any]:
    """A calibration of one part, and what the later requests get: replayed, which tests hold to serving."""
    first, rest = rehearsal.observed[: experiment.learn], rehearsal.observed[experiment.learn :]
    claim = experiment.risk_target(max_drop)
    found = rehearsal.calibrate(calibrated, experiment.learn, claim)
    learned, _ = split(len(first), claim)
    sources = list({first[i].row.key: first[i] for i in learned}.values())
    limit = -math.inf if found.chosen is None else found.chosen.limit
    risks, kept = risks_about(calibrated, sources, rest), {case.row.key for case in sources}
    served, told_by = freeze(risks, kept, rest, limit)
    told = rehearsal.answers_from(experiment.learn, told_by)
    return _chosen(name, "frozen", found) | _figures(experiment, rehearsal, told, served)


def _chosen(name: str, sources: Sources, found: Calibration) -> dict[str, Any]:
    """What a calibration chose."""
    setting = found.chosen
    return {
        "method": name,
        "sources": sources,
        "max_drop": found.max_drop,
        "delta": found.delta,
        "limit": None if setting is None else setting.limit,
        "hit_rate_expected": None if setting is None else setting.hit_rate,
        "bound": None if setting is None else setting.bound,
        "is_certified": found.is_certified,
        "n_sources": found.n_sources,
        "n_tested": found.n_tested,
        "calibration_s": round(found.seconds, 3),
        "lookup_ms": found.lookup_ms,
    }


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
    counted, base = later(rehearsal.workload, experiment.learn), rehearsal.answers[experiment.learn :]
    figures = figures_of(counted, base, told, served, experiment.seed)
    return figures | {"by_intent": by_intent(counted, base, told, served)}


def by_intent(
    counted: Workload, base: Sequence[Answer], told: Sequence[Answer], served: NDArray[np.str_]
) -> dict[str, Any] | None:
    """Share of changed answers of each intent's requests: the worst one's with its interval, and the median."""
    # An intent is a request's reference; `n_over` counts those with more than twice the rate of all requests. The
    # interval is of the worst intent alone: of many intents one is bad by chance.
    if not all(isinstance(request.reference, int) for request in counted.requests):
        return None  # the task knows no intents
    names = np.array([request.reference for request in counted.requests])
    changed = np.array([counted.is_changed(one, other) for one, other in zip(base, told, strict=True)], dtype=bool)
    hits = is_hit(served)
    rows: list[dict[str, Any]] = []
    for name in np.unique(names):
        mine = names == name
        n, n_hits, n_changed = (int(part.sum()) for part in (mine, mine & hits, mine & changed))
        rows.append({"intent": int(name), "n": n, "n_hits": n_hits, "n_changed": n_changed, "changed": n_changed / n})
    worst = max(rows, key=lambda row: (row["changed"], row["n"]))
    return {
        "n_intents": len(rows),
        "n_over": sum(int(row["changed"] > 2 * changed.mean()) for row in rows),
        "median": float(np.median([row["changed"] for row in rows])),
        "worst": {
            **worst,
            "intent": counted.show(worst["intent"]),
            "changed_ci": share_interval(worst["n_changed"], worst["n"]),
            "changed_per_hit": worst["n_changed"] / worst["n_hits"] if worst["n_hits"] else None,
        },
    }


def _others(experiment: Trust, rehearsal: Rehearsal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The other ways, which store what llmcache learns from: curves, and calibrations where there is a threshold."""
    recording = Recording(rehearsal.workload, rehearsal.outputs, rehearsal.put_out)
    points: list[dict[str, Any]] = []
    calibrated: list[dict[str, Any]] = []
    for name in experiment.baselines:
        units, answers_of = _way(name, experiment, recording)
        units = replace(units, first_searched=experiment.learn)
        points += _points_of_another(experiment, rehearsal, name, units, answers_of)
        if name != "exact_response":
            timed = {"lookup_ms": _encoder_ms(experiment, rehearsal) if name == "semantic_response" else None}
            calibrated += [row | timed for row in _calibrated_other(experiment, rehearsal, name, units, answers_of)]
    return points, calibrated


def _points_of_another(
    experiment: Trust, rehearsal: Rehearsal, name: str, units: Units, answers_of: Reading
) -> Iterator[dict[str, Any]]:
    """The curve of one of the other ways."""
    taus = (math.inf,) if name == "exact_response" else (SAME, *experiment.taus)
    for tau, again in zip(taus, replay(units, taus), strict=True):
        served, told = by_request(units, again), answers_of(units, again)
        at = _named((name, None), None, None if math.isinf(tau) else tau)
        yield at | _figures(experiment, rehearsal, told[experiment.learn :], served[experiment.learn :])


def _calibrated_other(
    experiment: Trust, rehearsal: Rehearsal, name: str, units: Units, answers_of: Reading
) -> Iterator[dict[str, Any]]:
    """Its threshold, chosen as a calibration of llmcache chooses its limit, and what the later requests get."""
    answers, is_changed = rehearsal.answers, rehearsal.workload.is_changed
    for sources in experiment.sources:
        for max_drop in experiment.max_drops:
            claim = experiment.risk_target(max_drop, sources)
            setting, stored = choose_threshold(
                units, experiment.learn, claim, lambda one, other: is_changed(answers[one], answers[other])
            )
            again = serve(units, experiment.learn, setting, stored, grows=sources == "growing")
            served, told = by_request(units, again), answers_of(units, again)
            yield {
                "method": name,
                "sources": sources,
                "max_drop": max_drop,
                "delta": claim.delta,
                "limit": None if setting is None else setting.limit,
                "hit_rate_expected": None if setting is None else setting.hit_rate,
                "bound": None if setting is None else setting.bound,
                "is_certified": setting is not None and sources == "frozen",
                "n_sources": len(stored),
                "n_tested": experiment.learn - len(stored),
                "calibration_s": None,
                **_figures(experiment, rehearsal, told[experiment.learn :], served[experiment.learn :]),
            }


def _encoder_ms(experiment: Trust, rehearsal: Rehearsal) -> float:
    """Median time in which the sentence encoder embeds one text: what each lookup of the semantic cache costs."""
    encode, times = Encoder(experiment.encoder), []
    with torch.inference_mode():
        for request in rehearsal.workload.requests[:_N_TIMED]:
            started = perf_counter()
            encode(request.text)
            times.append(perf_counter() - started)
    return float(np.median(times)) * 1e3


def _way(name: str, experiment: Trust, recording: Recording) -> tuple[Units, Reading]:
    """What a way looks up, and how its answers are read."""
    if name == "doccache":
        return recording.documents(), recording.handed
    if name == "semantic_response":
        return recording.texts(experiment.encoder), recording.borrowed
    mean = recording.rows(make_fingerprint("mean"), fits_any_length=True)
    return mean, recording.reread if name == "paper" else recording.borrowed


def _serve_calibrated(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Calibrate on the first requests, for each claim anew, and serve the later ones live and in order."""
    for sources in experiment.sources:
        for max_drop in experiment.max_drops:
            claim = experiment.risk_target(max_drop, sources)
            rehearsal.cache.clear()  # what an earlier claim's misses left would serve repeats
            found = rehearsal.calibrate(rehearsal.calibrated, experiment.learn, claim)
            told, served = _serve(rehearsal, experiment.learn, f"Live: {sources}, {max_drop:g}")
            yield _chosen("llmcache", sources, found) | _figures(experiment, rehearsal, told, served)


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
    return _shown(f"{row['method']} {row['sources']}", within, "calibrated hits", row) | {"bound": row["bound"]}


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
