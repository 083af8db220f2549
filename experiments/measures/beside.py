"""Measure `beside`: times of calls while a background thread learns from earlier ones (`learn` in the settings).

    before   calls up to the last request that is learned from, computed
    beside   calls while the thread fits and chooses
    after    calls with the calibration

Calls run back to back, on the number of threads given: a service with pauses between calls has more room.
"""

from time import perf_counter
from typing import Any

import numpy as np
import torch
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.harness import on_threads
from experiments.measures.learning import LearningExperiment
from experiments.methods.base import twin
from experiments.methods.cached import configure
from experiments.support.files import Folders
from experiments.support.progress import tracked
from llmcache import LLMCache

BEFORE, BESIDE, AFTER = "before", "beside", "after"


class Beside(LearningExperiment):
    """Settings of the measure; of `max_drops` the first counts."""

    threads: int = Field(default=2, ge=1)


def run(experiment: Beside, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    learning = {"learn": experiment.learn, "max_drop": experiment.max_drops[0]}
    config = configure(workload, {"auto_bypass": True, **experiment.cache, **learning}, audits_in_background=True)
    rows: list[dict[str, Any]] = []
    with (
        on_threads(experiment.threads),
        LLMCache.wrap(twin(workload.module), config=config, tokenizer=workload.tokenizer) as cache,
        torch.inference_mode(),
    ):
        n_computed = 0
        for number, request in enumerate(tracked(workload.requests, "Learning beside calls")):
            started = perf_counter()
            cache.model(**request.inputs)
            ms = 1e3 * (perf_counter() - started)
            n_computed += cache.last[0].rung is None
            when = AFTER if cache.calibration is not None else BESIDE if n_computed > experiment.learn else BEFORE
            rows.append({"number": number, "when": when, "ms": ms, "rung": cache.last[0].rung or ""})
    phases = [_phase(when, [row["ms"] for row in rows if row["when"] == when]) for when in (BEFORE, BESIDE, AFTER)]
    metrics = {**experiment.about(workload), "threads": experiment.threads, "learn": experiment.learn}
    return Outcome(rows, {**metrics, "summary": [one for one in phases if one["n"]]})


def _phase(when: str, ms: list[float]) -> dict[str, Any]:
    quantiles = np.quantile(ms, (0.5, 0.99)).tolist() if ms else (None, None)
    return {"when": when, "n": len(ms), **dict(zip(("p50_ms", "p99_ms"), quantiles, strict=True))}
