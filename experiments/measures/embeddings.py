"""Measure `embeddings`: how like the true ones reused sentence embeddings are, and what they still find.

    first `learn` requests   learned from; those of a calibration serve
    the later ones           counted: at limits from strict to none, in hindsight, and at calibrated ones

An answer counts as changed if its cosine with the true one is under 0.98, which is strict: few sentences are that near.
What retrieval loses, and the cosine itself, say more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment, choice_of, limit_of
from experiments.methods.base import is_hit
from experiments.replay.rehearsal import Frozen, Rehearsal
from experiments.support.folders import Folders
from experiments.support.progress import tracked


class Embeddings(LearningExperiment):
    """Settings of the measure."""

    # Limits of risk in hindsight: as many shares of later requests that would be served, evenly spread.
    n_limits: int = Field(default=10, ge=1)


def run(experiment: Embeddings, folders: Folders) -> Outcome:
    """Replay at every limit, and at the calibrated ones."""
    rehearsal = experiment.rehearse(folders)
    calibrated = list(_calibrated(experiment, rehearsal))
    points = [*_in_hindsight(experiment, rehearsal), *calibrated]
    metrics = {
        **experiment.about(rehearsal.workload),
        "learn": experiment.learn,
        "n_counted": len(rehearsal.observed) - experiment.learn,
        "nocache": experiment.alone(rehearsal),
        "points": points,
        "summary": [_shown(point) for point in points],
    }
    return Outcome([_flat(point) for point in points], metrics)


def _calibrated(experiment: Embeddings, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Limits that were chosen on the first requests."""
    for claim in tracked(experiment.frozen_claims, len(experiment.max_drops), "Calibrating"):
        found = rehearsal.calibrated.calibrate(rehearsal.observed[: experiment.learn], claim)
        frozen = experiment.frozen(rehearsal, rehearsal.calibrated, claim)
        figures = _figures(experiment, rehearsal, frozen, limit_of(found))
        yield {"max_drop": claim.max_drop, **choice_of(found), **figures}


def _in_hindsight(experiment: Embeddings, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Limits that let evenly spread shares of the later requests be served, of those that can be."""
    claim = experiment.risk_target(min(experiment.max_drops))
    rehearsal.calibrated.learn(experiment.sources_for(rehearsal, claim))
    frozen = experiment.frozen(rehearsal, rehearsal.calibrated, claim)
    for limit in np.quantile(frozen.risks, np.linspace(0, 1, experiment.n_limits + 1)[1:]).tolist():
        named = {"max_drop": None, "limit": limit, "bound": None}
        yield named | _figures(experiment, rehearsal, frozen, limit)


def _figures(experiment: Embeddings, rehearsal: Rehearsal, frozen: Frozen, limit: float) -> dict[str, Any]:
    """Hits, quality and cosines at one limit."""
    served, sources = frozen.serve(limit)
    told, base = rehearsal.answers_from(experiment.learn, sources), rehearsal.answers[experiment.learn :]
    is_approximate = is_hit(served) & (served != "exact")
    return {**experiment.figures(rehearsal, told, served), **_cosines(base, told, is_approximate)}


def _cosines(base: Sequence[Any], told: Sequence[Any], hits: NDArray[np.bool_]) -> dict[str, float | None]:
    """Of true and reused embeddings of length 1: mean and 5th percentile over approximate hits; None without any."""
    cosines = np.array([one @ other for one, other, is_one in zip(base, told, hits, strict=True) if is_one])
    if not len(cosines):
        return {"cosine_mean": None, "cosine_p5": None}
    return {"cosine_mean": float(cosines.mean()), "cosine_p5": float(np.percentile(cosines, 5))}


def _flat(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point's figures in single cells, without intervals, which some points have and some have not."""
    nested = ("extras", "hits_by_rung")
    return {key: value for key, value in point.items() if key not in nested and not key.endswith("_ci")} | point[
        "extras"
    ]


def _shown(point: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "asked: changed": point["max_drop"],
        "limit": point["limit"],
        "hit rate": point["hit_rate"],
        "changed": point["changed_answers"],
        "cosine of hits": point["cosine_mean"],
        "5th percentile": point["cosine_p5"],
        "recall@1": point["extras"]["recall_at_1"],
        "recall@5": point["extras"]["recall_at_5"],
        "nDCG@10": point["accuracy"],
        "lost": point["accuracy_drop"],
    }
