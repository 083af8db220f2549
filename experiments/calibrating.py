"""A cache that is calibrated as an experiment says, to look at or to keep."""

from experiments.folders import Folders
from experiments.measures.base import Experiment
from experiments.measures.learning import LearningExperiment
from experiments.methods.cached import configure
from experiments.progress import tracked
from experiments.tasks import build
from llmcache import LLMCache
from llmcache.calibration import check_size
from llmcache.errors import ConfigError


def calibrate(experiment: Experiment, folders: Folders) -> LLMCache:
    """Wrap the model of an experiment's task, and calibrate on the first requests of its stream.

    Args:
        experiment: One that learns; the settings of its cache say what is asked for.
        folders: Where data and models lie.

    Returns:
        The cache, calibrated on changed answers.

    Raises:
        CalibrationError: The requests cannot carry the claim.
        ConfigError: The experiment does not learn, or data, model and settings do not fit each other.
        FileNotFoundError: A data file is missing.
    """
    if not isinstance(experiment, LearningExperiment):
        raise ConfigError(
            f"measure: {experiment.measure!r} learns from no requests; give the file of one that does: "
            "configs/trust_banking77.yaml, for instance"
        )
    n = min(experiment.learn, experiment.task.limit or experiment.learn)
    check_size(n, experiment.config.max_drop, experiment.config.delta)  # before minutes of computing
    workload = build(experiment.task.model_copy(update={"limit": n}), folders, experiment.seed)
    config = configure(workload, {"step_aside": True, **experiment.cache})  # it may be kept, to serve with
    cache = LLMCache.wrap(workload.module, config=config, tokenizer=workload.tokenizer)
    requests = tracked(workload.requests, len(workload.requests), "Calibrating")
    cache.calibrate((request.inputs for request in requests), seed=experiment.seed)
    return cache
