"""A cache that is calibrated as an experiment says, to look at or to keep."""

from experiments.measures.base import Experiment
from experiments.measures.learning import LearningExperiment
from experiments.methods.cached import configure
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from llmcache import Calibration, ConfigError, LLMCache
from llmcache.lab import check_size


def calibrate(experiment: Experiment, folders: Folders) -> tuple[LLMCache, list[Calibration]]:
    """Wrap the model of an experiment that learns, and calibrate it for each of `max_drops`, in their order."""
    # The cache that is returned serves as it was calibrated last.
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
    # It may be kept, to serve with: then its settings say what it was calibrated for.
    config = configure(workload, {"auto_bypass": True, **experiment.cache, "max_drop": drops[-1]})
    cache = LLMCache.wrap(workload.module, config=config, tokenizer=workload.tokenizer)
    requests = tracked(workload.requests, len(workload.requests), "Calibrating")
    observed = cache.observe(request.inputs for request in requests)
    assert cache.calibrated is not None
    claims = [experiment.risk_target(drop, settings.sources) for drop in drops]
    return cache, [cache.calibrated.calibrate(observed, claim) for claim in claims]
