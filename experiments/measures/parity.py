"""Measures `parity` and `engine_parity`: whether a cache's answers equal those of the model alone.

`parity`: each prompt is continued twice, greedily, by transformers' own loop with a K/V cache: by the model alone, and
by a wrapped copy. Only the first differing token counts, since later ones follow from it. A prefix hit splits the same
sums differently, so in low precision two nearly equal logits may change places. Such a *near tie* is counted apart: the
reference's two best logits there differ by at most `ulps` roundings of the best one (|best| times the dtype's epsilon
each). Any other difference is wrong. Under a budget, `memory` shows the bytes held and the size of the process at every
tenth of the stream.

`engine_parity`: each request is asked of the model alone and of a copy whose misses an engine computes, one a call.
States are compared at valid tokens: `difference` is the largest, as a share of the largest eager state, or of 1 if that
is smaller. The head then reads both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import CacheExperiment, Outcome
from experiments.measures.bench.memory import resident_bytes
from experiments.measures.decode import greedy
from experiments.methods.base import COMPUTED, twin
from experiments.methods.cached import configure
from experiments.models.loading import Loaded, check_length
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build, prompts
from experiments.tasks.prompts import Prompts
from llmcache import LLMCache, Stats

#: Parts of the stream; memory is read after each.
PARTS = 10


class Parity(CacheExperiment):
    new_tokens: int = Field(default=16, ge=1)  # tokens generated for each prompt, a fixed number
    ulps: float = Field(default=4.0, ge=0.0)  # largest gap of a near tie, in roundings of the best logit


@dataclass(frozen=True, slots=True)
class Difference:
    step: int  # the first new token that differs, from 0
    gap: float  # difference of the reference's two best logits there
    tolerance: float  # largest gap of a near tie

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may explain the difference."""
        return self.gap <= self.tolerance


def run(experiment: Parity, folders: Folders) -> Outcome:
    workload = prompts.of(experiment.task, folders, experiment.seed)
    check_length(Loaded(workload.module, None), workload.facts["n_longest"] + experiment.new_tokens)
    module = twin(workload.module)
    cache = LLMCache.wrap(module, config=configure(workload, experiment.cache), tokenizer=workload.tokenizer)
    rows, memory, n = [], [], len(workload.requests)
    marks = {round(n * part / PARTS) for part in range(1, PARTS + 1)}
    for number in tracked(range(n), f"{experiment.task.title}, {experiment.task.dtype}"):
        rows.append(_row(experiment, workload, number, module, cache))
        if number + 1 in marks:
            memory.append({"n": number + 1, **_held(cache.stats()), "resident_bytes": resident_bytes()})
    stats = cache.stats()
    cache.unwrap()
    figures = _figures(workload, rows, stats)
    metrics = {
        **experiment.about(workload),
        "dtype": experiment.task.dtype,
        "new_tokens": experiment.new_tokens,
        "ulps": experiment.ulps,
        **figures,
        "max_bytes": configure(workload, experiment.cache).max_bytes,
        "memory": memory,
        "summary": [_shown(experiment, figures, memory)],
    }
    return Outcome(rows, metrics)


def _row(experiment: Parity, workload: Prompts, number: int, module: Any, cache: LLMCache) -> dict[str, Any]:
    ids = workload.requests[number].inputs["input_ids"]
    told = greedy(
        workload.module,
        ids,
        experiment.new_tokens,
        use_cache=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    before = cache.stats()
    tokens = greedy(module, ids, experiment.new_tokens, use_cache=True)
    after = cache.stats()
    found = difference(told.sequences, tokens, told.scores, experiment.ulps, workload.module.dtype)
    return {
        "id": workload.requests[number].id,
        "n_tokens": ids.shape[1],
        "n_known": workload.known[number],
        "n_prefix": after.n_prefix_tokens - before.n_prefix_tokens,
        "served": next(iter(Counter(after.hits) - Counter(before.hits)), COMPUTED),
        "is_same": int(found is None),
        "differs_at": None if found is None else found.step,
        "gap": None if found is None else found.gap,
        "tolerance": None if found is None else found.tolerance,
        "is_near_tie": None if found is None else int(found.is_near_tie),
        "held_bytes": _held(after)["held_bytes"],
    }


def difference(
    told: Tensor, tokens: Tensor, scores: Sequence[Tensor], ulps: float, dtype: torch.dtype
) -> Difference | None:
    """Return the first difference from the reference (1, T + n) with its logits, n times (1, V); None if equal."""
    n = len(scores)
    places = (told[0, -n:] != tokens[0, -n:]).nonzero()
    if not len(places):
        return None
    step = int(places[0])
    best, second = scores[step][0].double().topk(2).values.tolist()
    return Difference(step, best - second, ulps * torch.finfo(dtype).eps * abs(best))


def _held(stats: Stats) -> dict[str, int]:
    return {"held_bytes": stats.held_nbytes, "n_evicted": stats.n_evicted_total}


def _figures(workload: Prompts, rows: Sequence[Mapping[str, Any]], stats: Stats) -> dict[str, Any]:
    n_same = sum(row["is_same"] for row in rows)
    n_ties = sum(row["is_near_tie"] or 0 for row in rows)
    return {
        "n_same": n_same,
        "n_near_ties": n_ties,
        "n_wrong": len(rows) - n_same - n_ties,
        "hits": stats.hits,
        "share_reused": stats.n_prefix_tokens / workload.facts["n_tokens"],
        "most_bytes": max(row["held_bytes"] for row in rows),
        "errors": stats.errors,
        **_held(stats),
    }


def _shown(experiment: Parity, figures: Mapping[str, Any], memory: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "dtype": experiment.task.dtype,
        "same": figures["n_same"],
        "near ties": figures["n_near_ties"],
        "wrong": figures["n_wrong"],
        "prefix hits": figures["hits"].get("prefix", 0),
        "exact hits": figures["hits"].get("exact", 0),
        "evicted": figures["n_evicted"],
        "most MB held": figures["most_bytes"] / 1e6,
        "resident MB after a tenth": memory[0]["resident_bytes"] / 1e6,
        "half": memory[len(memory) // 2 - 1]["resident_bytes"] / 1e6,
        "end": memory[-1]["resident_bytes"] / 1e6,
    }


class EngineParity(CacheExperiment):
    tolerance: float = Field(default=1e-4, gt=0)  # largest difference that is none


def run_engine(experiment: EngineParity, folders: Folders) -> Outcome:
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
