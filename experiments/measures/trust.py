"""Measure `trust`: hits and changed answers of calibrated reuse on one stream, in hindsight and with a bound.

    first `learn` requests   computed and learned from; every method under comparison stores them
    later requests           counted: replayed at many limits (hindsight), and served live at a limit chosen in advance

Curves: llmcache with growing and with frozen sources, its forecast without neighbours (`student`), the paper's method
(mean embedding, nearest neighbour above tau), DocCache, and the response caches. They are compared by `precision` (the
share of hits that keep the answer) against hit rate. Every method with a threshold is also calibrated, by the same
tests on the same requests.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment
from experiments.measures.sweep import SAME
from experiments.methods.base import COMPUTED, is_hit
from experiments.methods.cached import serve_from
from experiments.methods.responses import Encoder
from experiments.metrics.frontier import best, curves
from experiments.metrics.metrics import alone, figures_of, share_interval
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.rehearsal import Frozen, empty, grow
from experiments.replay.replay import Replay, Units, by_request, choose_threshold, replay, serve
from experiments.replay.student import Student
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import Calibration
from llmcache.lab import CalibratedReuse, Doubles, Growth, Observation, OperatingPoint, RiskTarget, split

Baseline = Literal["paper", "doccache", "exact_response", "semantic_response"]
#: Losses at which a frontier is reported.
LOSSES = {"accuracy_drop": "0.5 points", "changed_answers": "0.5 % changed"}
N_TIMED = 200  # lookups of the semantic response cache that are timed

Reading = Callable[[Units, Replay], list[Answer]]
Figures = dict[str, Any]


class Trust(LearningExperiment):
    # Sources after calibration: the calibration's requests only, or later misses as well.
    sources: tuple[Growth, ...] = ("frozen", "growing")
    n_limits: int = Field(default=16, ge=2)  # risk limits at which reuse is replayed
    student: bool = True  # also measure the forecast alone, without neighbours, with frozen sources
    taus: tuple[float, ...] = Field(min_length=1)  # thresholds of the other methods
    # Other methods to compare with.
    baselines: tuple[Baseline, ...] = get_args(Baseline)
    encoder: str = "minilm"  # sentence encoder of the semantic response cache

    @property
    def claims(self) -> list[RiskTarget]:
        return [self.risk_target(drop, kind) for kind in self.sources for drop in self.max_drops]


def run(experiment: Trust, folders: Folders) -> Outcome:
    ways = _Ways(experiment, folders)
    ways.add_llmcache()
    if experiment.student:
        ways.add_student()
    ways.add_others()
    rehearsal = ways.rehearsal
    metrics = {
        **experiment.about(rehearsal.workload),
        "learn": experiment.learn,
        "n_counted": len(rehearsal.observed) - experiment.learn,
        "nocache": alone(ways.counted, ways.base, experiment.seed),
        "model_ms": rehearsal.model_ms,
        "points": ways.points,
        "calibrated": ways.calibrated,
        "summary": [*_hindsight(ways.points), *map(_told_in_advance, ways.calibrated)],
    }
    return Outcome(ways.points, metrics)


class _Ways:
    """Runs each method on the later requests of one observed stream, and collects the figures."""

    def __init__(self, experiment: Trust, folders: Folders) -> None:
        self.rehearsal = experiment.rehearse(folders)
        self.counted = self.rehearsal.workload.after(experiment.learn)
        self.base = self.rehearsal.answers[experiment.learn :]
        self.points: list[Figures] = []  # points of the curves
        self.calibrated: list[Figures] = []  # figures at limits chosen in advance
        self._experiment, self._learn = experiment, experiment.learn

    def add_llmcache(self) -> None:
        """Add curves for both kinds of sources; for each claim, calibrate again and serve the later requests live."""
        rehearsal, learn = self.rehearsal, self._learn
        if "growing" in self._experiment.sources:  # growing sources start with everything that was learned from
            first, rest = rehearsal.observed[:learn], rehearsal.observed[learn:]
            limits = self._some(rehearsal.calibrated.learn(first))
            for limit in tracked(limits, "Replaying growing sources"):
                served, sources = grow(rehearsal.calibrated, first, rest, limit)
                self._add_point("llmcache", "growing", rehearsal.answers_from(learn, sources), served, limit=limit)
        self._add_frozen_points("llmcache", rehearsal.calibrated)
        for claim in self._experiment.claims:
            empty(rehearsal.cache, rehearsal.observed)  # misses stored under an earlier claim would serve repeats
            found = rehearsal.calibrated.calibrate(rehearsal.observed[:learn], claim)
            live = serve_from(rehearsal.cache, rehearsal.workload, learn, f"Live: {claim.sources}, {claim.max_drop:g}")
            told, outcomes = zip(*live, strict=True)
            served = np.array([outcome.rung or COMPUTED for outcome in outcomes])
            self._add_calibration("llmcache", claim, found, told, served)

    def add_student(self) -> None:
        """Add the forecast alone: a curve and calibrations, replayed. Tests check that replay equals serving."""
        cache, reuse = self.rehearsal.beside(self._experiment.cache)
        student = Student(reuse)
        self._add_frozen_points("student", student)
        for claim in self._experiment.frozen_claims:
            found = student.calibrate(self.rehearsal.observed[: self._learn], claim)
            limit = -math.inf if found.chosen is None else found.chosen.limit  # no limit: only exact repeats are served
            served, sources = self._frozen(student, claim).serve(limit)
            told = self.rehearsal.answers_from(self._learn, sources)
            self._add_calibration("student", claim, found, told, served)
        cache.unwrap()

    def add_others(self) -> None:
        """Add the other methods, storing the requests llmcache learns from: curves, and a calibrated threshold each."""
        recording = Recording(self.rehearsal.workload, self.rehearsal.outputs)
        for name in self._experiment.baselines:
            units, answers_of = _way(name, self._experiment.encoder, recording)
            units = replace(units, first_searched=self._learn)
            taus = (math.inf,) if name == "exact_response" else (SAME, *self._experiment.taus)
            for tau, again in zip(taus, replay(units, taus), strict=True):
                told, served = answers_of(units, again)[self._learn :], by_request(units, again)[self._learn :]
                self._add_point(name, None, told, served, tau=None if math.isinf(tau) else tau)
            if name != "exact_response":
                self._calibrate_other(name, units, answers_of)

    def _calibrate_other(self, name: str, units: Units, answers_of: Reading) -> None:
        """Choose the threshold by the tests that choose llmcache's limit, and serve the later requests."""
        answers, is_changed, learn = self.rehearsal.answers, self.rehearsal.workload.is_changed, self._learn
        lookup_ms = self._encoder_ms() if name == "semantic_response" else None
        for claim in self._experiment.claims:
            setting, stored = choose_threshold(
                units, learn, claim, lambda one, other: is_changed(answers[one], answers[other])
            )
            again = serve(units, learn, setting, stored, grows=claim.sources == "growing")
            row = _in_advance(name, claim, setting, len(stored), learn - len(stored)) | {"lookup_ms": lookup_ms}
            told, served = answers_of(units, again)[learn:], by_request(units, again)[learn:]
            self.calibrated.append(row | self._figures(told, served))

    def _add_frozen_points(self, name: str, calibrated: CalibratedReuse | Student) -> None:
        """Add a curve with frozen sources: parts A and B of the requests that are learned from."""
        claim = self._experiment.risk_target(min(self._experiment.max_drops))
        limits = self._some(calibrated.learn(self._sources(claim)))
        frozen = self._frozen(calibrated, claim)
        for limit in limits:
            served, sources = frozen.serve(limit)
            self._add_point(name, "frozen", self.rehearsal.answers_from(self._learn, sources), served, limit=limit)

    def _frozen(self, calibrated: CalibratedReuse | Student, claim: RiskTarget) -> Frozen:
        return Frozen(calibrated, self._sources(claim), self.rehearsal.observed[self._learn :])

    def _sources(self, claim: RiskTarget) -> list[Observation]:
        return [self.rehearsal.observed[i] for i in split(self._learn, claim)[0]]

    def _some(self, limits: Doubles) -> list[float]:
        """Return at most `n_limits` of the limits, evenly spaced, including the first and the last."""
        n = min(self._experiment.n_limits, len(limits))
        places = np.linspace(0, len(limits) - 1, n).round().astype(int)
        return [float(limit) for limit in limits[places]]

    def _encoder_ms(self) -> float:
        """Return the median time to embed one text, ms: the cost of each lookup in the semantic response cache."""
        encode, times = Encoder(self._experiment.encoder), []
        with torch.inference_mode():
            for request in self.rehearsal.workload.requests[:N_TIMED]:
                started = perf_counter()
                encode(request.text)
                times.append(perf_counter() - started)
        return float(np.median(times)) * 1e3

    def _add_point(self, method: str, fingerprint: str | None, told: Any, served: Any, **at: float | None) -> None:
        named = {"method": method, "fingerprint": fingerprint, "limit": None, "tau": None, **at}
        self.points.append(named | self._figures(told, served))

    def _add_calibration(
        self, name: str, claim: RiskTarget, found: Calibration, told: Sequence[Answer], served: NDArray[np.str_]
    ) -> None:
        taken = {"calibration_s": round(found.seconds, 3), "lookup_ms": found.lookup_ms}
        chosen = _in_advance(name, claim, found.chosen, found.n_sources, found.n_tested)
        self.calibrated.append(chosen | taken | self._figures(told, served))

    def _figures(self, told: Sequence[Answer], served: NDArray[np.str_]) -> Figures:
        figures = figures_of(self.counted, self.base, told, served, self._experiment.seed)
        return figures | {"by_intent": by_intent(self.counted, self.base, told, served)}


def _way(name: str, encoder: str, recording: Recording) -> tuple[Units, Reading]:
    """Return the lookup units of a method, and the function that reads its answers."""
    if name == "doccache":
        return recording.documents(), recording.handed
    if name == "semantic_response":
        return recording.texts(encoder), recording.borrowed
    mean = recording.rows(make_fingerprint("mean"), fits_any_length=True)
    return mean, recording.reread if name == "paper" else recording.borrowed


def _in_advance(name: str, claim: RiskTarget, setting: OperatingPoint | None, n_sources: int, n_tested: int) -> Figures:
    """Return the operating point chosen in advance; every method uses the same tests."""
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


def by_intent(
    counted: Workload, base: Sequence[Answer], told: Sequence[Answer], served: NDArray[np.str_]
) -> dict[str, Any] | None:
    """Return the share of changed answers by intent: the median, and the worst intent with its interval."""
    # The intent is the request's reference. `n_over` counts intents with more than twice the overall rate. The interval
    # covers the worst intent by itself: among many intents, one is bad by chance.
    if not all(isinstance(request.reference, int) for request in counted.requests):
        return None  # the task has no intents
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


def _hindsight(points: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the most hits of each curve within each loss. Hindsight: it could not have been chosen in advance."""
    for loss, within in LOSSES.items():
        for curve in curves(points):
            point = best(points, curve, loss)
            yield _shown(" ".join(name for name in curve if name), within, "hindsight hits", point)


def _told_in_advance(row: Mapping[str, Any]) -> dict[str, Any]:
    within = f"{100 * row['max_drop']:g} % changed"
    return _shown(f"{row['method']} {row['sources']}", within, "calibrated hits", row) | {"bound": row["bound"]}


def _shown(way: str, within: str, column: str, figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one row of the screen's table. Hindsight and figures chosen in advance never share a column."""
    got = figures or {}
    row = {"way": way, "at most": within, "hindsight hits": None, "calibrated hits": None}
    row[column] = got.get("hit_rate")
    return row | {"changed": got.get("changed_answers"), "drop": got.get("accuracy_drop"), "bound": None}
