"""Measure `engine_parity`: whether misses that an engine computes equal those of the eager model, one request a call.

Each request is asked of the model alone and of a wrapped copy. States are compared at valid tokens: `difference` is the
largest, as a share of the largest eager state, or of 1 if that is smaller. The head then reads both.

Sizes: T tokens, D hidden width.
"""

from typing import Any

import torch
from pydantic import Field

from experiments.measures.base import CacheExperiment, Outcome
from experiments.methods.base import twin
from experiments.methods.cached import configure
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from llmcache import LLMCache


class EngineParity(CacheExperiment):
    tolerance: float = Field(default=1e-4, gt=0)  # largest difference that is none


def run(experiment: EngineParity, folders: Folders) -> Outcome:
    workload = build(experiment.task, folders, experiment.seed)
    module: Any = twin(workload.module)  # its head is read apart: a repeat's states are what the cache keeps of them
    cache = LLMCache.wrap(
        module, config=configure(workload, {**experiment.cache, "audit": 0}), tokenizer=workload.tokenizer
    )
    eager: Any = workload.module
    rows = []
    with torch.inference_mode():
        for number, request in enumerate(tracked(workload.requests, experiment.task.title)):
            mask = request.inputs["attention_mask"]
            own, other = (one.trunk(**request.inputs).last_hidden_state for one in (eager, module))
            answers = [workload.answer(eager.linear(eager.pool(one, mask)), number) for one in (own, other)]
            outcome = cache.last[0]
            difference = (own - other)[mask.bool()].abs().max() / own[mask.bool()].abs().max().clamp(min=1)
            rows.append(
                {
                    "id": request.id,
                    "n_tokens": int(mask.sum()),
                    "is_miss": int(outcome.rung is None and not outcome.bypassed),
                    "difference": float(difference),
                    "is_changed": int(workload.is_changed(*answers)),
                }
            )
    engine = cache.stats().engine
    cache.unwrap()
    misses = [row for row in rows if row["is_miss"]]  # repeats are served what the cache keeps
    figures = {
        "engine": None if engine is None else engine.name,
        "n_by_engine": 0 if engine is None else engine.n_requests,
        "n_misses": len(misses),
        "n_beyond": sum(row["difference"] > experiment.tolerance for row in misses),
        "difference_most": max((row["difference"] for row in misses), default=None),
        "n_changed": sum(row["is_changed"] for row in rows),
    }
    return Outcome(
        rows, {**experiment.about(workload), "tolerance": experiment.tolerance, **figures, "summary": [figures]}
    )
