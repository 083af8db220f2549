"""A cache that is calibrated as an experiment says, to look at or to keep."""

from experiments.measures.base import Experiment
from experiments.measures.learning import LearningExperiment
from experiments.methods.cached import configure
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from llmcache import LLMCache
from llmcache.calibration.calibration import Calibration, check_size
from llmcache.errors import ConfigError


def calibrate(experiment: Experiment, folders: Folders) -> tuple[LLMCache, list[Calibration]]:
    """Wrap the model of an experiment's task, and calibrate on the first requests of its stream, once for each loss.

    Args:
        experiment: One that learns: its `max_drops` are asked for, the other settings of a claim are its cache's.
        folders: Where data and models lie.

    Returns:
        The cache, which serves as it was calibrated last, and what was found for each of `max_drops`, in their order,
        on changed answers.

    Raises:
        CalibrationError: The requests cannot carry one of the claims.
        ConfigError: The experiment does not learn, or data, model and settings do not fit each other.
        FileNotFoundError: A data file is missing.
    """
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
