"""Measure `bound`: how often a calibrated limit is worse than its bound said.

    a stream, observed once
      `parts` times   A and B are drawn and learned from; the rest is the population, its rates are the truth
        `draws` times   C is drawn from the population, with replacement: a calibration chooses a limit by it

A calibration errs if more answers change in the population, at the limit that it chose, than it was asked to leave.
With sources that stay, it may do so with probability delta. Learning, doubts and choice are the library's own.

Sizes: N requests of the population, M of C.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.folders import Folders
from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment
from experiments.progress import tracked
from experiments.rehearsal import Rehearsal
from llmcache.calibration import Trial, chosen, n_tested, try_settings


class Bound(LearningExperiment):
    """Settings of the measure. Of `learn` requests a calibration takes as many for C as it usually does.

    Attributes:
        parts: How often A and B are drawn.
        draws: How often C is drawn for each.
    """

    parts: int = Field(default=10, ge=1)
    draws: int = Field(default=20, ge=1)


def run(experiment: Bound, folders: Folders) -> Outcome:
    """Calibrate many times, and count how often the truth is worse.

    Raises:
        ConfigError: The data or the model does not fit the settings.
        FileNotFoundError: A data file is missing.
    """
    rehearsal = experiment.rehearse(folders)
    workload = rehearsal.workload
    parts = tracked(range(experiment.parts), experiment.parts, "Drawing A and B")
    rows = [row for part in parts for row in _calibrations(experiment, rehearsal, part)]
    n_sources = _n_sources(experiment)
    figures = [_of_claim([row for row in rows if row["max_drop"] == drop]) for drop in experiment.max_drops]
    metrics = {
        **experiment.about(workload),
        "delta": experiment.config.delta,
        "n_sources": n_sources,
        "n_population": len(workload.requests) - n_sources,
        "claims": figures,
        "summary": figures,
    }
    return Outcome(rows, metrics)


def _n_sources(experiment: Bound) -> int:
    """As many as the claim with the largest C leaves: the same for all, so that they are learned from once."""
    return experiment.learn - max(n_tested(experiment.learn, claim) for claim in experiment.frozen_claims)


def _calibrations(experiment: Bound, rehearsal: Rehearsal, part: int) -> Iterator[dict[str, Any]]:
    """One row a draw of C and claim, for one draw of A and B."""
    rng = np.random.default_rng((experiment.seed, part))
    order = rng.permutation(len(rehearsal.observed))
    sources, population = ([rehearsal.observed[i] for i in half] for half in np.split(order, [_n_sources(experiment)]))
    limits, claims = rehearsal.trust.learn(sources), experiment.frozen_claims
    truth = rehearsal.trust.teacher.trial(population, {case.row.key: case for case in sources}, "changed")
    for draw in range(experiment.draws):
        for claim in claims:
            drawn = rng.integers(len(population), size=n_tested(experiment.learn, claim))
            seen = Trial(truth.doubt[drawn], truth.loss[drawn])
            found = chosen(try_settings(seen, limits, claim.max_drop, claim.delta), claim.max_drop)
            served = np.isneginf(truth.doubt) if found is None else truth.doubt <= found.limit
            changed = float(np.where(served, truth.loss, 0.0).mean())
            yield {
                "part": part,
                "draw": draw,
                "max_drop": claim.max_drop,
                "n_tested": len(drawn),
                "limit": None if found is None else found.limit,
                "bound": None if found is None else found.bound,
                "hit_rate": float(served.mean()),
                "changed_answers": changed,
                "is_violated": int(changed > claim.max_drop),
            }


def _of_claim(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What became of all calibrations with one claim; where none was turned on, only repeats were hits."""
    rates: NDArray[np.float64] = np.array([row["hit_rate"] for row in rows])
    return {
        "max_drop": rows[0]["max_drop"],
        "n_tested": rows[0]["n_tested"],
        "n_calibrations": len(rows),
        "n_violated": sum(row["is_violated"] for row in rows),
        "turned_on": sum(row["limit"] is not None for row in rows) / len(rows),
        "hit_rate_median": float(np.median(rates)),
        "hit_rate_p10": float(np.quantile(rates, 0.1)),
        "hit_rate_p90": float(np.quantile(rates, 0.9)),
        "changed_answers_median": float(np.median([row["changed_answers"] for row in rows])),
        "changed_answers_most": max(row["changed_answers"] for row in rows),
    }
