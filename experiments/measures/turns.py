"""Measure `turns`: times of a conversation's turns, beside those with a ready K/V cache of all that was said before.

| way | what it does with a turn |
|---|---|
| `plain` | computes the whole conversation |
| `llmcache` | looks it up, computes what is new, and keeps the K/V of its answer |
| `limit` | computes what is new on the K/V cache of the turn before, which the caller has kept |

All ways generate greedily, by transformers' own loop, and take each turn in rotating order. Prompts are random tokens.
TTFT and TPOT are those of `llmcache.generation.Latency`.
"""

import copy
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from experiments.measures.base import Experiment, Outcome
from experiments.measures.decode import Marking, greedy
from experiments.measures.harness import interleaved
from experiments.models.architectures import Requests, build
from experiments.models.loading import find
from experiments.support.clock import Clock
from experiments.support.files import Folders
from llmcache import LLMCache
from llmcache.lab import CACHE

WAYS = ("plain", "llmcache", "limit")


class TurnsExperiment(Experiment):
    model: str = Field(min_length=1)  # a causal model: an architecture of the benchmark, a prepared one, or a folder
    conversations: int = Field(default=3, ge=1)  # after one that is not counted
    turns: int = Field(default=8, ge=2)
    first: int = Field(default=100, ge=1)  # new tokens of the first turn: a system prompt and a question
    asked: int = Field(default=30, ge=1)  # new tokens of each later turn
    answered: int = Field(default=24, ge=2)  # tokens of an answer


class _Made(NamedTuple):
    ttft_s: float
    tpot_s: float
    tokens: Tensor  # prompt and answer
    n_computed: int | None  # tokens of the prompt, if known


class _Ways:
    """The ways to answer a turn, each with what it keeps of the conversation."""

    def __init__(self, model: Any, experiment: TurnsExperiment) -> None:
        self._plain, self._n_new, self._clock = model, experiment.answered, Clock(model.device)
        self._wrapped = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        self._cache = LLMCache.wrap(self._wrapped, auto_bypass=False)
        self._requests = Requests(model.config, 1, max(experiment.first, experiment.asked), experiment.seed, "cpu")
        self._experiment, self.said, self._ready = experiment, torch.empty(1, 0, dtype=torch.int64), DynamicCache()

    def draw(self) -> Iterator[int]:
        """Yield the numbers of all turns, each after drawing what is asked."""
        experiment = self._experiment
        for number in range((experiment.conversations + 1) * experiment.turns):
            n_new = experiment.asked
            if number % experiment.turns == 0:
                self.said, self._ready, n_new = self.said[:, :0], DynamicCache(), experiment.first
            self.said = torch.cat([self.said, self._requests.fresh()[:, :n_new]], dim=1)
            yield number

    def call(self, way: str, _: int) -> _Made:
        model = self._wrapped if way == "llmcache" else self._plain
        kept = {CACHE: self._ready} if way == "limit" else {}
        before, marking = self._cache.stats().n_computed_tokens, Marking(self._clock)
        start = self._clock.mark()
        tokens = greedy(model, self.said, self._n_new, streamer=marking, **kept)
        latency = marking.since(start)
        n_computed = self._cache.stats().n_computed_tokens - before if way == "llmcache" else None
        return _Made(latency.ttft_s, latency.tpot_s or 0.0, tokens, n_computed)

    def end(self, made: Mapping[str, _Made]) -> None:
        self.said = made["plain"].tokens

    def close(self) -> None:
        if errors := self._cache.stats().errors:
            raise RuntimeError(f"{errors} errors of the cache: {self._cache.stats().health}")
        self._cache.unwrap()


def run(experiment: TurnsExperiment, folders: Folders) -> Outcome:
    model: Any = build(find(experiment.model, folders.models), experiment.seed, "cpu", head="token").model
    model.config.use_cache = True
    ways = _Ways(model, experiment)
    with torch.inference_mode():
        made = interleaved(list(WAYS), ways.draw(), ways.call, end=ways.end)
    ways.close()
    turns = [dict(zip(WAYS, some, strict=True)) for some in zip(*(made[way] for way in WAYS), strict=True)]
    rows = [_row(number, ways_of, experiment) for number, ways_of in enumerate(turns)][experiment.turns :]
    later = [row for row in rows if row["turn"]]
    figures = {
        "turns": len(later),
        "n_tokens": sum(row["n_tokens"] for row in later),
        "n_computed": sum(row["n_computed"] for row in later),
        "n_new": sum(row["n_new"] for row in later),
        **{f"{way}_ttft_s": median(row[f"{way}_ttft_s"] for row in later) for way in WAYS},
        "of_limit": median(row["limit_ttft_s"] / row["llmcache_ttft_s"] for row in later),
        "tpot_ratio": median(row["llmcache_tpot_s"] / row["plain_tpot_s"] for row in rows),
        "same": sum(row["is_same"] for row in rows),
        "n": len(rows),
    }
    about = {"model": experiment.model, "threads": torch.get_num_threads()}
    return Outcome(rows, {**about, **figures, "summary": [figures]})


def _row(number: int, made: Mapping[str, _Made], experiment: TurnsExperiment) -> dict[str, Any]:
    conversation, turn = divmod(number, experiment.turns)
    n_tokens = made["plain"].tokens.shape[1] - experiment.answered
    return {
        "conversation": conversation,
        "turn": turn,
        "n_tokens": n_tokens,
        # With a ready K/V cache: the question, and the last token of the answer before it.
        "n_new": experiment.asked + 1 if turn else n_tokens,
        "n_computed": made["llmcache"].n_computed,
        **{f"{way}_ttft_s": one.ttft_s for way, one in made.items()},
        **{f"{way}_tpot_s": one.tpot_s for way, one in made.items()},
        "is_same": int(all(torch.equal(one.tokens, made["plain"].tokens) for one in made.values())),
    }
