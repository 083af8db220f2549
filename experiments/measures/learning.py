"""What measures of calibrated reuse have in common: the first requests are learned from, the later ones are counted."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import CacheExperiment
from experiments.metrics.metrics import alone, figures_of
from experiments.replay.rehearsal import Frozen, Rehearsal
from experiments.support.folders import Folders
from experiments.support.section import ONE_OR_MORE
from experiments.tasks import build
from experiments.tasks.workload import Answer, Workload
from llmcache import CacheConfig, Calibration, CalibrationError, ConfigError
from llmcache.lab import CalibratedReuse, MetricName, Observation, RiskTarget, Sources, check_size, split


class LearningExperiment(CacheExperiment):
    """Settings of such a measure. Those of `cache` for the bound, `delta` for instance, are what calibrations go by."""

    learn: int = Field(default=2500, ge=1)  # requests that are learned from, the first ones; all of them are computed
    # Losses that calibrations may leave, a fraction of 1.
    max_drops: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.005, 0.01, 0.02), min_length=1)

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings, and that the first requests can carry the claims; see `Section.make`."""
        made = super().make(values, name)
        check_learn(made.learn, made.max_drops, made.config.delta)
        return made

    @property
    def config(self) -> CacheConfig:
        """Settings of llmcache, checked."""
        return CacheConfig.make(self.cache)

    def risk_target(self, max_drop: float, sources: Sources = "frozen", metric: MetricName = "changed") -> RiskTarget:
        """What a calibration is to show."""
        return RiskTarget(max_drop, self.config.delta, metric, sources, self.seed)

    @property
    def frozen_claims(self) -> list[RiskTarget]:
        """What calibrations with frozen sources are to show, one for each loss."""
        return [self.risk_target(drop) for drop in self.max_drops]

    def sources_for(self, rehearsal: Rehearsal, claim: RiskTarget) -> list[Observation]:
        """A and B of a calibration: the requests that it learns from."""
        return [rehearsal.observed[i] for i in split(self.learn, claim)[0]]

    def frozen(self, rehearsal: Rehearsal, calibrated: CalibratedReuse, claim: RiskTarget) -> Frozen:
        """The later requests, served from what a calibration learned from."""
        return Frozen(calibrated, self.sources_for(rehearsal, claim), rehearsal.observed[self.learn :])

    def figures(self, rehearsal: Rehearsal, told: Sequence[Answer], served: NDArray[np.str_]) -> dict[str, Any]:
        """Hits and quality of the later requests; see `figures_of`."""
        base = rehearsal.answers[self.learn :]
        return figures_of(later(rehearsal.workload, self.learn), base, told, served, self.seed)

    def alone(self, rehearsal: Rehearsal) -> dict[str, Any]:
        """Quality of the model alone on the later requests."""
        return alone(later(rehearsal.workload, self.learn), rehearsal.answers[self.learn :], self.seed)

    def stream(self, folders: Folders) -> Workload:
        """The task's requests, unless they are over before anything could be served."""
        workload = build(self.task, folders, self.seed)
        if (n := len(workload.requests)) <= self.learn:
            raise ConfigError(f"learn={self.learn}: the stream has {n} requests; learn from fewer, or raise task.limit")
        return workload

    def rehearse(self, folders: Folders) -> Rehearsal:
        """The same, observed once; see `stream`."""
        return Rehearsal(self.stream(folders), self.cache)


def check_learn(learn: int, max_drops: Sequence[float], delta: float) -> None:
    """Refuse to learn from fewer requests than the least loss takes, which is the one that takes most; 0: no claim."""
    if not learn:
        return
    try:
        check_size(learn, min(max_drops), delta)
    except CalibrationError as error:
        raise ConfigError(f"learn={learn}: {error}") from error


def limit_of(found: Calibration) -> float:
    """The largest risk that was chosen; where none was, nothing but repeats is less risky."""
    return -math.inf if found.chosen is None else found.chosen.limit


def later(workload: Workload, learn: int) -> Workload:
    """The workload without the requests that are learned from."""
    rest = copy(workload)
    rest.requests = workload.requests[learn:]
    return rest
