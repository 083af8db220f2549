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
from experiments.measures.learning import LearningExperiment, later, limit_of
from experiments.measures.sweep import SAME
from experiments.methods.base import COMPUTED, is_hit
from experiments.methods.responses import Encoder
from experiments.metrics.frontier import best, curves
from experiments.metrics.metrics import share_interval
from experiments.replay.advance import choose_threshold, serve
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.rehearsal import Frozen, Rehearsal, grow
from experiments.replay.replay import Replay, Units, by_request, replay
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import Calibration
from llmcache.lab import CalibratedReuse, OperatingPoint, RiskTarget, Sources

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
    """Settings of the measure."""

    # Who serves then: the calibration's requests alone, or later misses as well.
    sources: tuple[Sources, ...] = ("frozen", "growing")
    n_limits: int = Field(default=16, ge=2)  # limits of risk at which reuse is replayed
    # Other ways to decide that are shown beside that of the settings, with frozen sources: neighbours alone, the
    # forecast alone, `risk` (neighbours who vote, and the forecast), `combined` (risk or student).
    decisions: tuple[Literal["neighbours", "student", "risk", "combined"], ...] = (
        "neighbours",
        "student",
        "combined",
    )
    taus: tuple[float, ...] = Field(min_length=1)  # thresholds of the other ways
    # The other ways.
    baselines: tuple[Literal["paper", "doccache", "exact_response", "semantic_response"], ...] = (
        "paper",
        "doccache",
        "exact_response",
        "semantic_response",
    )
    encoder: str = "minilm"  # sentence encoder of the semantic response cache


def run(experiment: Trust, folders: Folders) -> Outcome:
    """Replay every curve, and serve what was calibrated."""
    rehearsal = experiment.rehearse(folders)
    points, calibrated = [*_points_of_llmcache(experiment, rehearsal)], [*_serve_calibrated(experiment, rehearsal)]
    for more, chosen in (_parts(experiment, rehearsal), _others(experiment, rehearsal)):
        points += more
        calibrated += chosen
    metrics = {
        **experiment.about(rehearsal.workload),
        "learn": experiment.learn,
        "n_counted": len(rehearsal.observed) - experiment.learn,
        "nocache": experiment.alone(rehearsal),
        "model_ms": rehearsal.model_ms,
        "points": points,
        "calibrated": calibrated,
        "summary": [*_hindsight(points), *map(_told_in_advance, calibrated)],
    }
    return Outcome(points, metrics)


def _points_of_llmcache(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Both kinds of sources: those that grow begin with all that was learned from, the others with A and B."""
    first, rest = rehearsal.observed[: experiment.learn], rehearsal.observed[experiment.learn :]
    if "growing" in experiment.sources:
        limits = _some(rehearsal.calibrated.learn(first).tolist(), experiment.n_limits)
        for limit in tracked(limits, len(limits), "Replaying growing sources"):
            served, sources = grow(rehearsal.calibrated, first, rest, limit)
            told = rehearsal.answers_from(experiment.learn, sources)
            yield _named(("llmcache", "growing"), limit, None) | _figures(experiment, rehearsal, told, served)
    yield from _frozen_points(experiment, rehearsal, rehearsal.calibrated, "llmcache")


def _frozen_points(
    experiment: Trust, rehearsal: Rehearsal, calibrated: CalibratedReuse, name: str
) -> Iterator[dict[str, Any]]:
    """A curve with the sources of a calibration alone."""
    claim = experiment.risk_target(min(experiment.max_drops))
    limits = _some(calibrated.learn(experiment.sources_for(rehearsal, claim)).tolist(), experiment.n_limits)
    frozen = experiment.frozen(rehearsal, calibrated, claim)
    for limit in limits:
        yield _named((name, "frozen"), limit, None) | _frozen_figures(experiment, rehearsal, frozen, limit)


def _parts(experiment: Trust, rehearsal: Rehearsal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What parts of llmcache do alone: a curve and calibrations of each, replayed, which tests hold to serving."""
    points: list[dict[str, Any]] = []
    calibrated: list[dict[str, Any]] = []
    for name in experiment.decisions:
        cache, reuse = rehearsal.beside(experiment.cache | {"decide": DECISIONS[name]})
        points += _frozen_points(experiment, rehearsal, reuse, name)
        for claim in experiment.frozen_claims:
            found = rehearsal.calibrate(reuse, experiment.learn, claim)
            frozen = experiment.frozen(rehearsal, reuse, claim)
            figures = _frozen_figures(experiment, rehearsal, frozen, limit_of(found))
            calibrated.append(_calibrated(name, claim, found) | figures)
        cache.unwrap()
    return points, calibrated


def _calibrated(name: str, claim: RiskTarget, found: Calibration) -> dict[str, Any]:
    """What a calibration of llmcache chose, and what it took."""
    return {
        **_chosen(name, claim, found.chosen, found.n_sources, found.n_tested),
        "calibration_s": round(found.seconds, 3),
        "lookup_ms": found.lookup_ms,
    }


def _chosen(
    name: str, claim: RiskTarget, setting: OperatingPoint | None, n_sources: int, n_tested: int
) -> dict[str, Any]:
    """What was chosen in advance, with the same tests for every way."""
    return {
        "method": name,
        "sources": claim.sources,
        "max_drop": claim.max_drop,
        "delta": claim.delta,
        "limit": None if setting is None else setting.limit,
        "hit_rate_expected": None if setting is None else setting.hit_rate,
        "bound": None if setting is None else setting.bound,
        "is_certified": setting is not None and claim.sources == "frozen",
        "n_sources": n_sources,
        "n_tested": n_tested,
        "calibration_s": None,
    }


def _some(limits: Sequence[float], n: int) -> list[float]:
    """At most `n` of the limits, evenly spread, the first and the last among them."""
    places = np.linspace(0, len(limits) - 1, min(n, len(limits))).round().astype(int)
    return [limits[place] for place in places]


def _named(curve: tuple[str, str | None], limit: float | None, tau: float | None) -> dict[str, Any]:
    return {"method": curve[0], "fingerprint": curve[1], "limit": limit, "tau": tau}


def _frozen_figures(experiment: Trust, rehearsal: Rehearsal, frozen: Frozen, limit: float) -> dict[str, Any]:
    """Figures with the sources of a calibration alone, at one limit."""
    served, sources = frozen.serve(limit)
    return _figures(experiment, rehearsal, rehearsal.answers_from(experiment.learn, sources), served)


def _figures(
    experiment: Trust, rehearsal: Rehearsal, told: Sequence[Answer], served: NDArray[np.str_]
) -> dict[str, Any]:
    counted, base = later(rehearsal.workload, experiment.learn), rehearsal.answers[experiment.learn :]
    intents = by_intent(counted, base, told, served)
    return experiment.figures(rehearsal, told, served) | {"by_intent": intents}


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
    answers, is_changed, learn = rehearsal.answers, rehearsal.workload.is_changed, experiment.learn
    for claim in _claims(experiment):
        setting, stored = choose_threshold(
            units, learn, claim, lambda one, other: is_changed(answers[one], answers[other])
        )
        again = serve(units, learn, setting, stored, grows=claim.sources == "growing")
        served, told = by_request(units, again), answers_of(units, again)
        chosen = _chosen(name, claim, setting, len(stored), learn - len(stored))
        yield chosen | _figures(experiment, rehearsal, told[learn:], served[learn:])


def _claims(experiment: Trust) -> list[RiskTarget]:
    """What is asked for, with each kind of sources."""
    return [experiment.risk_target(drop, kind) for kind in experiment.sources for drop in experiment.max_drops]


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
    for claim in _claims(experiment):
        rehearsal.cache.clear()  # what an earlier claim's misses left would serve repeats
        found = rehearsal.calibrate(rehearsal.calibrated, experiment.learn, claim)
        told, served = _serve(rehearsal, experiment.learn, f"Live: {claim.sources}, {claim.max_drop:g}")
        yield _calibrated("llmcache", claim, found) | _figures(experiment, rehearsal, told, served)


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
