"""Measure `trust`: calibrated reuse on one stream: what could be had, and what is had with a bound.

    first `learn` requests   computed and learned from; stored by every way that is compared
    the later ones           counted: in hindsight at many limits, replayed; with a limit chosen in advance, live

Curves: llmcache with sources that grow and with those of a calibration alone, what
its forecast does without neighbours (`student`), the paper's way (mean embedding, nearest one above tau), DocCache, the
response caches. `precision`, the share of hits that leave the answer as it was, against the hit
rate tells them apart. All that has a threshold is calibrated as well, by the same tests on the same requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment, limit_of
from experiments.measures.trust_figures import figures, in_advance, named
from experiments.measures.trust_others import others
from experiments.methods.base import COMPUTED
from experiments.metrics.frontier import best, curves
from experiments.replay.rehearsal import Frozen, Rehearsal, empty, grow
from experiments.replay.student import Student
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer
from llmcache import Calibration
from llmcache.lab import CalibratedReuse, RiskTarget, Sources

#: Losses that a frontier is told for.
LOSSES = {"accuracy_drop": "0.5 points", "changed_answers": "0.5 % changed"}


class Trust(LearningExperiment):
    """Settings of the measure."""

    # Who serves then: the calibration's requests alone, or later misses as well.
    sources: tuple[Sources, ...] = ("frozen", "growing")
    n_limits: int = Field(default=16, ge=2)  # limits of risk at which reuse is replayed
    student: bool = True  # show what the forecast alone does, without neighbours, with frozen sources
    taus: tuple[float, ...] = Field(min_length=1)  # thresholds of the other ways
    # The other ways.
    baselines: tuple[Literal["paper", "doccache", "exact_response", "semantic_response"], ...] = (
        "paper",
        "doccache",
        "exact_response",
        "semantic_response",
    )
    encoder: str = "minilm"  # sentence encoder of the semantic response cache

    @property
    def claims(self) -> list[RiskTarget]:
        """What is asked for, with each kind of sources."""
        return [self.risk_target(drop, kind) for kind in self.sources for drop in self.max_drops]


def run(experiment: Trust, folders: Folders) -> Outcome:
    """Replay every curve, and serve what was calibrated."""
    rehearsal = experiment.rehearse(folders)
    points, calibrated = [*_points_of_llmcache(experiment, rehearsal)], [*_serve_calibrated(experiment, rehearsal)]
    for more, chosen in (_student(experiment, rehearsal), others(experiment, rehearsal)):
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
            yield named(("llmcache", "growing"), limit, None) | figures(experiment, rehearsal, told, served)
    yield from _frozen_points(experiment, rehearsal, rehearsal.calibrated, "llmcache")


def _frozen_points(
    experiment: Trust, rehearsal: Rehearsal, calibrated: CalibratedReuse | Student, name: str
) -> Iterator[dict[str, Any]]:
    """A curve with the sources of a calibration alone."""
    claim = experiment.risk_target(min(experiment.max_drops))
    limits = _some(calibrated.learn(experiment.sources_for(rehearsal, claim)).tolist(), experiment.n_limits)
    frozen = experiment.frozen(rehearsal, calibrated, claim)
    for limit in limits:
        yield named((name, "frozen"), limit, None) | _frozen_figures(experiment, rehearsal, frozen, limit)


def _student(experiment: Trust, rehearsal: Rehearsal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the forecast does alone: a curve and calibrations, replayed, which tests hold to serving."""
    if not experiment.student:
        return [], []
    cache, reuse = rehearsal.beside(experiment.cache)
    student, calibrated = Student(reuse), []
    points = [*_frozen_points(experiment, rehearsal, student, "student")]
    for claim in experiment.frozen_claims:
        found = rehearsal.calibrate(student, experiment.learn, claim)
        counted = _frozen_figures(experiment, rehearsal, experiment.frozen(rehearsal, student, claim), limit_of(found))
        calibrated.append(_calibrated("student", claim, found) | counted)
    cache.unwrap()
    return points, calibrated


def _calibrated(name: str, claim: RiskTarget, found: Calibration) -> dict[str, Any]:
    """What a calibration of llmcache chose, and what it took."""
    return {
        **in_advance(name, claim, found.chosen, found.n_sources, found.n_tested),
        "calibration_s": round(found.seconds, 3),
        "lookup_ms": found.lookup_ms,
    }


def _some(limits: Sequence[float], n: int) -> list[float]:
    """At most `n` of the limits, evenly spread, the first and the last among them."""
    places = np.linspace(0, len(limits) - 1, min(n, len(limits))).round().astype(int)
    return [limits[place] for place in places]


def _frozen_figures(experiment: Trust, rehearsal: Rehearsal, frozen: Frozen, limit: float) -> dict[str, Any]:
    """Figures with the sources of a calibration alone, at one limit."""
    served, sources = frozen.serve(limit)
    return figures(experiment, rehearsal, rehearsal.answers_from(experiment.learn, sources), served)


def _serve_calibrated(experiment: Trust, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Calibrate on the first requests, for each claim anew, and serve the later ones live and in order."""
    for claim in experiment.claims:
        empty(rehearsal.cache, rehearsal.observed)  # what an earlier claim's misses left would serve repeats
        found = rehearsal.calibrate(rehearsal.calibrated, experiment.learn, claim)
        told, served = _serve(rehearsal, experiment.learn, f"Live: {claim.sources}, {claim.max_drop:g}")
        yield _calibrated("llmcache", claim, found) | figures(experiment, rehearsal, told, served)


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
