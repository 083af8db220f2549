"""Base of the measures of calibrated reuse: the first requests are learned from, the later ones are counted."""

from typing import Annotated

from pydantic import Field

from experiments.measures.base import CacheExperiment, Experiment
from experiments.methods.cached import configure
from experiments.replay.rehearsal import Rehearsal
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.section import ONE_OR_MORE
from experiments.tasks import build
from experiments.tasks.workload import Workload
from llmcache import CacheConfig, Calibration, CalibrationError, ConfigError, LLMCache
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


def calibrate(experiment: Experiment, folders: Folders) -> tuple[LLMCache, list[Calibration]]:
    """Wrap the model of an experiment that learns, and calibrate it for each of `max_drops`, in order."""
    # The returned cache serves with the last calibration.
    if not isinstance(experiment, LearningExperiment):
        raise ConfigError(
            f"measure: {experiment.measure!r} learns from no requests; give the file of one that does: "
            "configs/trust_banking77.yaml, for instance"
        )
    if "max_drop" in experiment.cache:
        raise ConfigError(
            f"cache.max_drop={experiment.cache['max_drop']}: an experiment asks for the losses in max_drops; give "
            f"max_drops=[{experiment.cache['max_drop']}] in its place"
        )
    drops, settings = experiment.max_drops, experiment.config
    n = min(experiment.learn, experiment.task.limit or experiment.learn)
    check_size(n, min(drops), settings.delta)  # before minutes of computing
    workload = build(experiment.task.model_copy(update={"limit": n}), folders, experiment.seed)
    # The cache may be saved for serving, so its settings name the target of its calibration.
    config = configure(workload, {"auto_bypass": True, **experiment.cache, "max_drop": drops[-1]})
    cache = LLMCache.wrap(workload.module, config=config, tokenizer=workload.tokenizer)
    requests = tracked(workload.requests, "Calibrating")
    observed = cache.observe(request.inputs for request in requests)
    assert cache.calibrated is not None
    claims = [experiment.risk_target(drop, settings.sources) for drop in drops]
    return cache, [cache.calibrated.calibrate(observed, claim) for claim in claims]
