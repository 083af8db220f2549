"""What the measure `trust` tells of a way at one limit."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.measures.learning import LearningExperiment, later
from experiments.methods.base import is_hit
from experiments.metrics.metrics import share_interval
from experiments.replay.rehearsal import Rehearsal
from experiments.tasks.workload import Answer, Workload
from llmcache.lab import OperatingPoint, RiskTarget


def named(curve: tuple[str, str | None], limit: float | None, tau: float | None) -> dict[str, Any]:
    """Which curve a point is of, and where it lies."""
    return {"method": curve[0], "fingerprint": curve[1], "limit": limit, "tau": tau}


def in_advance(
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


def figures(
    experiment: LearningExperiment, rehearsal: Rehearsal, told: Sequence[Answer], served: NDArray[np.str_]
) -> dict[str, Any]:
    """Hits, quality and changed answers by intent of the later requests."""
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
