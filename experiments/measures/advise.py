"""Measure `advise`: what `LLMCache.advise` finds on a stream, as `llmcache advise` prints it for a log."""

from pydantic import Field

from experiments.measures.base import CacheExperiment, Outcome
from experiments.measures.harness import on_threads
from experiments.methods.cached import configure
from experiments.support.files import Folders
from experiments.tasks import build
from llmcache import LLMCache


class Advise(CacheExperiment):
    max_drop: float = Field(default=0.005, gt=0.0, lt=1.0)  # of the recommendation
    seconds: float = Field(default=20.0, gt=0.0)  # of the model alone, which limits the requests served
    threads: int = Field(default=1, ge=1)


def run(experiment: Advise, folders: Folders) -> Outcome:
    workload = build(experiment.task, folders, experiment.seed)
    config = configure(workload, {"auto_bypass": True, **experiment.cache}, audits_in_background=True)
    requests = [request.inputs for request in workload.requests]
    with (
        on_threads(experiment.threads),
        LLMCache.wrap(workload.module, config=config, tokenizer=workload.tokenizer) as cache,
    ):
        advice = cache.advise(requests, max_drop=experiment.max_drop, seconds=experiment.seconds)
    found = advice.to_dict()
    ways = [{"threads": experiment.threads, **way} for way in found.pop("ways")]
    summary = [{name: value for name, value in way.items() if name not in ("code", "problem")} for way in ways]
    return Outcome(ways, {**experiment.about(workload), **found, "ways": ways, "summary": summary})
