"""Measure `bound`: how often a calibrated limit exceeds its bound.

    a stream, observed once
      `parts` times   A and B are drawn and learned from; the rest is the population, whose rates are the truth
        `draws` times   C is drawn from the population, with replacement: a calibration chooses a limit on it

With an `arrival`, requests have an order in time, and that order is drawn: a calibration sees the first `learn`
requests of each order and serves the later ones, whose rates are then the truth. If they are unlike the first, no
bound was promised; this measures the outcome. The later requests are a sample, so some orders exceed the target by
chance, including `shuffled` ones, which are the control. `is_beyond_chance` marks orders whose exact interval lies
above the target (for independent requests, which repeats are not).

A calibration errs if, at its limit, more answers of the population change than its target allows. With frozen sources
it may do so with probability delta. Learning, risks and the choice of rungs and limit are the library's own code. With
a draft, every observation has its answer, and each claim is learned apart, since it decides which rungs pay.

Sizes: N requests of the population, M of C.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.data.streams.traffic import Arrival, arrange
from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment
from experiments.metrics.metrics import share_interval
from experiments.replay.rehearsal import Rehearsal
from experiments.replay.replay import choose
from experiments.support.files import Folders
from experiments.support.progress import tracked
from llmcache import ConfigError
from llmcache.lab import Doubles, HoldoutOutcome, Observation, OperatingPoint, RiskTarget, n_tested


class Bound(LearningExperiment):
    """Settings of the measure. Of `learn` requests, a calibration uses as many for C as usual."""

    parts: int = Field(default=10, ge=1)  # number of draws of A and B
    draws: int = Field(default=20, ge=1)  # draws of C for each
    # Order of requests in time, drawn anew for each part; C is then not drawn separately.
    arrival: Arrival | None = None

    def check(self) -> None:
        super().check()
        if self.arrival is not None and self.arrival.n is not None and self.arrival.n <= self.learn:
            raise ConfigError(f"arrival.n={self.arrival.n}: nothing would follow the learn={self.learn} first requests")


def run(experiment: Bound, folders: Folders) -> Outcome:
    rehearsal = _rehearsed(json.dumps(experiment.to_dict() | {"arrival": None}), folders)
    workload = rehearsal.workload
    parts = tracked(range(experiment.parts), "Drawing A and B")
    calibrate = _calibrations if experiment.arrival is None else _in_order
    rows = [row for part in parts for row in calibrate(experiment, rehearsal, part)]
    n_sources = _n_sources(experiment)
    figures = [_of_claim([row for row in rows if row["max_drop"] == drop]) for drop in experiment.max_drops]
    n, arrival = len(workload.requests), experiment.arrival
    metrics = {
        **experiment.about(workload),
        "delta": experiment.config.delta,
        "arrival": None if arrival is None else arrival.name,
        "n_sources": n_sources,
        "n_population": n - n_sources if arrival is None else (arrival.n or n) - experiment.learn,
        "claims": figures,
        "summary": figures,
    }
    return Outcome(rows, metrics)


@lru_cache(maxsize=1)
def _rehearsed(settings: str, folders: Folders) -> Rehearsal:
    return Bound.make(json.loads(settings)).rehearse(folders)


def _n_sources(experiment: Bound) -> int:
    """Return the number of requests outside the largest C: the same for all claims, so learning happens once."""
    return experiment.learn - max(n_tested(experiment.learn, risk_target) for risk_target in experiment.frozen_claims)


def _calibrations(experiment: Bound, rehearsal: Rehearsal, part: int) -> Iterator[dict[str, Any]]:
    """Yield one row per draw of C and claim, for one draw of A and B."""
    rng = np.random.default_rng((experiment.seed, part))
    order = rng.permutation(len(rehearsal.observed))
    sources, population = ([rehearsal.observed[i] for i in half] for half in np.split(order, [_n_sources(experiment)]))
    known = {case.row.key: case for case in sources}
    fits = _fits(experiment, rehearsal, known, population)
    for draw in range(experiment.draws):
        for risk_target, fit in zip(experiment.frozen_claims, fits, strict=True):
            drawn = rng.integers(len(population), size=n_tested(experiment.learn, risk_target))
            (truth,) = fit.outcomes
            found = choose(_some(truth, drawn), fit.limits, risk_target)
            yield {"part": part, "draw": draw, **_held_against(truth, fit.rungs, found, risk_target, len(drawn))}


def _in_order(experiment: Bound, rehearsal: Rehearsal, part: int) -> Iterator[dict[str, Any]]:
    """Yield one row per claim for one order in time: A, B and C come from the first requests, the others are served."""
    assert experiment.arrival is not None
    pool, seed = rehearsal.observed, 1000 * experiment.seed + part
    stream = arrange(pool, lambda case: case.label, experiment.arrival, seed)
    first, later = stream[: experiment.learn], stream[experiment.learn :]
    order = np.random.default_rng((experiment.seed, part)).permutation(len(first))
    learned, rest = np.split(order, [_n_sources(experiment)])
    sources = {first[i].row.key: first[i] for i in sorted(learned.tolist())}
    fits = _fits(experiment, rehearsal, sources, [first[i] for i in rest.tolist()], later)
    for risk_target, fit in zip(experiment.frozen_claims, fits, strict=True):
        trial, truth = fit.outcomes
        n = n_tested(experiment.learn, risk_target)
        found = choose(_some(trial, np.arange(n)), fit.limits, risk_target)
        yield {"part": part, "draw": 0, **_held_against(truth, fit.rungs, found, risk_target, n)}


class _Fit(NamedTuple):
    """What was learned from A and B for a claim."""

    limits: Doubles  # candidates (K,)
    rungs: str  # in use
    outcomes: Sequence[HoldoutOutcome]  # of requests that were not learned from


def _fits(
    experiment: Bound, rehearsal: Rehearsal, sources: Mapping[str, Observation], *later: Sequence[Observation]
) -> list[_Fit]:
    """Learn from sources by key for each claim, and look up later requests. Without a draft, claims learn alike."""
    fitter, claims, fits = rehearsal.calibrated.fitter, experiment.frozen_claims, []
    for claim in claims if fitter.draft is not None else claims[:1]:
        limits = fitter.fit(list(sources.values()), claim)
        outcomes = [fitter.trial(some, sources, "changed") for some in later]
        fits.append(_Fit(limits, " ".join(fitter.shares), outcomes))
    return fits if fitter.draft is not None else fits * len(claims)


def _some(outcome: HoldoutOutcome, numbers: NDArray[np.int64]) -> HoldoutOutcome:
    computed = np.broadcast_to(outcome.computed, outcome.risk.shape[-1:])[numbers]
    return replace(outcome, risk=outcome.risk[..., numbers], loss=outcome.loss[..., numbers], computed=computed)


def _held_against(
    truth: HoldoutOutcome, rungs: str, found: OperatingPoint | None, risk_target: RiskTarget, n: int
) -> dict[str, Any]:
    """Return the limit chosen with `n` requests of C, and the true rates at that limit."""
    by_rung, losses = truth.serve(-np.inf if found is None else found.limit)  # repeats are served at any limit
    served, changed = by_rung.any(axis=0), float(losses.mean())
    return {
        "max_drop": risk_target.max_drop,
        "rungs": rungs,
        "n_tested": n,
        "limit": None if found is None else found.limit,
        "bound": None if found is None else found.bound,
        "hit_rate": float(served.mean()),
        "changed_answers": changed,
        "is_violated": int(changed > risk_target.max_drop),
        "is_beyond_chance": int(share_interval(round(changed * len(served)), len(served))[0] > risk_target.max_drop),
    }


def _of_claim(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all calibrations of one claim; a calibration without a limit serves only repeats."""
    rates: NDArray[np.float64] = np.array([row["hit_rate"] for row in rows])
    return {
        "max_drop": rows[0]["max_drop"],
        "n_tested": rows[0]["n_tested"],
        "n_calibrations": len(rows),
        "n_violated": sum(row["is_violated"] for row in rows),
        "n_beyond_chance": sum(row["is_beyond_chance"] for row in rows),
        "rungs": dict(Counter(row["rungs"] for row in rows)),
        "turned_on": sum(row["limit"] is not None for row in rows) / len(rows),
        "hit_rate_median": float(np.median(rates)),
        "hit_rate_p10": float(np.quantile(rates, 0.1)),
        "hit_rate_p90": float(np.quantile(rates, 0.9)),
        "changed_answers_median": float(np.median([row["changed_answers"] for row in rows])),
        "changed_answers_most": max(row["changed_answers"] for row in rows),
    }
