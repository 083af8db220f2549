"""Base of the measures of calibrated reuse: the first requests are learned from, the later ones are counted."""

from typing import Annotated

from pydantic import Field

from experiments.measures.base import CacheExperiment
from experiments.replay.rehearsal import Rehearsal
from experiments.support.files import Folders
from experiments.support.section import ONE_OR_MORE
from experiments.tasks import build
from experiments.tasks.workload import Workload
from llmcache import CacheConfig, CalibrationError, ConfigError
from llmcache.lab import Growth, RiskTarget, check_size


class LearningExperiment(CacheExperiment):
    """Settings of such a measure. Settings in `cache` for the bound, such as `delta`, apply to its calibrations."""

    learn: int = Field(default=2500, ge=1)  # first requests, which are computed and learned from
    # Losses that calibrations may allow, fractions of 1.
    max_drops: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.005, 0.01, 0.02), min_length=1)

    def check(self) -> None:
        super().check()
        try:
            if self.learn:  # 0: there is no claim; else the smallest loss needs most requests
                check_size(self.learn, min(self.max_drops), self.config.delta)
        except CalibrationError as error:
            raise ConfigError(f"learn={self.learn}: {error}") from error

    @property
    def config(self) -> CacheConfig:
        return CacheConfig.make(self.cache)

    def risk_target(self, max_drop: float, sources: Growth = "frozen") -> RiskTarget:
        return RiskTarget(max_drop, self.config.delta, "changed", sources, self.seed)

    @property
    def frozen_claims(self) -> list[RiskTarget]:
        """Targets of calibrations with frozen sources, one per loss."""
        return [self.risk_target(drop) for drop in self.max_drops]

    def stream(self, folders: Folders) -> Workload:
        """Build the task; raise if no requests would be left to serve."""
        workload = build(self.task, folders, self.seed)
        if (n := len(workload.requests)) <= self.learn:
            raise ConfigError(f"learn={self.learn}: the stream has {n} requests; learn from fewer, or raise task.limit")
        return workload

    def rehearse(self, folders: Folders) -> Rehearsal:
        """Build the task and observe it once; see `stream`."""
        return Rehearsal(self.stream(folders), self.cache)
