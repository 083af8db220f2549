"""Measures `parity` and `engine_parity`: whether a cache's answers equal those of the model alone.

`parity`: each prompt is continued twice, greedily, with a K/V cache: by the model alone, and by a wrapped copy, one
prompt a call or a padded batch. Only the first differing token counts, since later ones follow from it. A prefix hit
splits the same sums differently, so in low precision two nearly equal logits may change places. Such a *near tie* is
counted apart: the reference's two best logits there differ by at most `ulps` roundings of the best one (|best| times
the dtype's epsilon each). Any other difference is wrong. That tokens are equal says little where all prompts are
continued alike, so different first tokens are counted. Under a budget, `memory` shows the bytes held and the size of
the process at every tenth of the stream.

`engine_parity`: each request is asked of the model alone and of a copy whose misses an engine computes, one a call.
States are compared at valid tokens: `difference` is the largest, as a share of the largest eager state, or of 1 if that
is smaller. The head then reads both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from experiments.measures.base import CacheExperiment, Outcome
from experiments.measures.bench.memory import resident_bytes
from experiments.measures.decode import greedy
from experiments.methods.base import BYPASSED, COMPUTED, twin
from experiments.methods.cached import configure
from experiments.models.loading import Loaded, check_length
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build, prompts
from experiments.tasks.prompts import Prompts
from llmcache import LLMCache, Stats
from llmcache.lab import CACHE

#: Parts of the stream; memory is read after each.
PARTS = 10


class Parity(CacheExperiment):
    new_tokens: int = Field(default=16, ge=1)  # tokens generated for each prompt, a fixed number
    ulps: float = Field(default=4.0, ge=0.0)  # largest gap of a near tie, in roundings of the best logit
    batch: int = Field(default=1, ge=1)  # prompts per call
    padding: Literal["left", "right"] = "left"  # side on which the shorter prompts of a call are padded
    # Whether calls of several prompts pass position ids that count from each prompt's first token, as transformers' own
    # loop does; else positions are columns.
    positions: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    step: int  # the first new token that differs, from 0
    gap: float  # difference of the reference's two best logits there
    tolerance: float  # largest gap of a near tie

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may explain the difference."""
        return self.gap <= self.tolerance


class Continued(NamedTuple):
    tokens: Tensor  # new tokens (B, n)
    logits: Sequence[Tensor]  # that each was chosen by, n times (B, V)

    def row(self, number: int) -> "Continued":
        """Return one row, as a batch of one."""
        return Continued(self.tokens[number : number + 1], [one[number : number + 1] for one in self.logits])


def run(experiment: Parity, folders: Folders) -> Outcome:
    workload = prompts.of(experiment.task, folders, experiment.seed)
    check_length(Loaded(workload.module, None), workload.facts["n_longest"] + experiment.new_tokens)
    module = twin(workload.module)
    cache = LLMCache.wrap(module, config=configure(workload, experiment.cache), tokenizer=workload.tokenizer)
    rows, memory, n = [], [], len(workload.requests)
    calls = [range(first, min(first + experiment.batch, n)) for first in range(0, n, experiment.batch)]
    marks = {round(len(calls) * part / PARTS) for part in range(1, PARTS + 1)}
    for number, call in enumerate(tracked(calls, f"{experiment.task.title}, {experiment.task.dtype}")):
        rows += _rows(experiment, workload, call, module, cache)
        if number + 1 in marks:
            memory.append({"n": call.stop, **_held(cache.stats()), "resident_bytes": resident_bytes()})
    stats = cache.stats()
    cache.unwrap()
    figures = _figures(workload, rows, stats)
    metrics = {
        **experiment.about(workload),
        "dtype": experiment.task.dtype,
        **{name: getattr(experiment, name) for name in ("new_tokens", "ulps", "batch", "padding", "positions")},
        **figures,
        "max_bytes": configure(workload, experiment.cache).max_bytes,
        "memory": memory,
        "summary": [_shown(experiment, figures, memory)],
    }
    return Outcome(rows, metrics)


def _rows(
    experiment: Parity, workload: Prompts, numbers: Sequence[int], module: Any, cache: LLMCache
) -> list[dict[str, Any]]:
    """Continue the prompts of one call by both models; return a row for each prompt."""
    asked = [workload.requests[number].inputs["input_ids"][0] for number in numbers]
    inputs = _padded(asked, experiment.padding, experiment.positions)
    told = _continue(workload.module, inputs, experiment)
    made = _continue(module, inputs, experiment)
    rows, held_bytes = [], _held(cache.stats())["held_bytes"]
    for place, (number, outcome) in enumerate(zip(numbers, cache.last, strict=True)):
        own, other = told.row(place), made.row(place)
        found = difference(own.tokens, other.tokens, own.logits, experiment.ulps, workload.module.dtype)
        n_alike = experiment.new_tokens if found is None else found.step + 1  # steps that follow the same tokens
        rows.append(
            {
                "id": workload.requests[number].id,
                "n_tokens": len(asked[place]),
                "n_known": workload.known[number],
                "n_prefix": outcome.n_prefix,
                "served": BYPASSED if outcome.bypassed else outcome.rung or COMPUTED,
                "tokens": " ".join(map(str, own.tokens[0].tolist())),
                "is_same": int(found is None),
                "differs_at": None if found is None else found.step,
                "gap": None if found is None else found.gap,
                "tolerance": None if found is None else found.tolerance,
                "is_near_tie": None if found is None else int(found.is_near_tie),
                "logprob_difference": _apart(own.logits[:n_alike], other.logits[:n_alike]),
                "held_bytes": held_bytes,
            }
        )
    return rows


def _padded(asked: Sequence[Tensor], side: str, has_positions: bool) -> dict[str, Tensor]:
    """Return the arguments of a call with these prompts (T,), padded to the longest."""
    ids = pad_sequence(asked, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(one) for one in asked], batch_first=True, padding_side=side)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, **({"position_ids": positions} if has_positions else {})}


def _continue(model: Any, inputs: Mapping[str, Tensor], experiment: Parity) -> Continued:
    """Continue the rows of a call, each after its own last token.

    Transformers' own loop does so with padding on the left, and passes position ids.
    """
    n, mask = experiment.new_tokens, inputs["attention_mask"]
    if experiment.padding == "left" and (experiment.positions or experiment.batch == 1):
        more: dict[str, Any] = {**inputs, "use_cache": True, "output_scores": True, "return_dict_in_generate": True}
        made = greedy(model, more.pop("input_ids"), n, **more)
        return Continued(made.sequences[:, -n:], made.scores)
    fed, ends = dict[str, Any](inputs), mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)  # columns of last own tokens
    tokens, logits, rows = list[Tensor](), list[Tensor](), torch.arange(len(mask))
    with torch.inference_mode():
        for step in range(n):
            output = model(**fed)
            logits.append(output.logits[rows, -1 if step else ends])
            tokens.append(logits[-1].argmax(dim=1, keepdim=True))
            mask = torch.cat([mask, torch.ones_like(tokens[-1])], dim=1)
            fed = {"input_ids": tokens[-1], "attention_mask": mask, CACHE: output[CACHE]}
            if experiment.positions:
                fed["position_ids"] = mask.sum(dim=1, keepdim=True) - 1
    return Continued(torch.cat(tokens, dim=1), logits)


def _apart(told: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """Return the largest difference of a log-probability; tokens that both exclude (-inf) do not count."""
    own, other = (torch.cat([*logits]).float().log_softmax(dim=-1) for logits in (told, made))
    return float((own - other).masked_fill(own.isneginf() & other.isneginf(), 0.0).abs().max())


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
    continued = [row["tokens"] for row in rows]
    return {
        "n_same": n_same,
        "n_near_ties": n_ties,
        "n_wrong": len(rows) - n_same - n_ties,
        "n_prompts": len({request.text for request in workload.requests}),
        "n_first_tokens": len({tokens.partition(" ")[0] for tokens in continued}),
        "n_continuations": len(set(continued)),
        "logprob_difference": max(row["logprob_difference"] for row in rows),
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
        "first tokens": figures["n_first_tokens"],
        "log-probability": figures["logprob_difference"],
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
