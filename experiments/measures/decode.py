"""Measure `decode`: greedy generation of a few tokens, served in several ways.

| kind | prompt | what is kept |
|---|---|---|
| `nocache` | new | nothing: each step runs the whole sequence |
| `kv_cache` | new | K/V within a generation: transformers' `DynamicCache` |
| `miss` | new | the same, and with llmcache the prefill of prompts across generations |
| `exact_hit` | seen before | as `miss` |
| `prefix_hit`, if `shared_tokens` is set | begins like a known prompt | as `miss` |

Each round makes one generation of each kind, in rotating order. Outside the timer, the tokens of a hit are compared
with those of `kv_cache`. Times are named as in vLLM's serving benchmark: TTFT, from the prompt's tokens to the first
new token; ITL, from one new token to the next; TPOT, the mean ITL of a generation; E2EL, from the prompt to the last.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import DeviceExperiment, Outcome
from experiments.measures.bench.latency import BANKS
from experiments.measures.harness import interleaved, ratios
from experiments.metrics.metrics import percentiles
from experiments.models.architectures import Requests, build, check, check_target
from experiments.models.loading import find
from experiments.support.clock import Clock, Mark
from experiments.support.files import Folders
from llmcache import LLMCache
from llmcache.generation import Latency
from llmcache.lab import PrefixOptions

MAX_ENTRIES = 64
HITS = ("exact_hit", "prefix_hit")


class Marking:
    """A transformers streamer that marks the time of each new token. The first value it gets is the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Mark] = []

    def put(self, value: Tensor) -> None:
        self._marks.append(self._clock.mark())

    def end(self) -> None:
        """Do nothing: the generation has ended."""

    def since(self, start: Mark) -> Latency:
        return Latency(tuple(self._clock.ms(start, mark) / 1e3 for mark in self._marks[1:]))


def greedy(model: Any, ids: Tensor, new_tokens: int, **more: Any) -> Any:
    """Return prompts (B, T) and greedy continuations, int64 (B, T + new_tokens), from transformers' own loop."""
    return model.generate(
        ids,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **{"attention_mask": torch.ones_like(ids), **more},
    )


def _percentiles(latencies: Sequence[Latency]) -> dict[str, Any]:
    """Return percentiles in ms over generations; of ITL over all their tokens."""
    seconds = {
        "ttft": [one.ttft_s for one in latencies],
        "tpot": [one.tpot_s for one in latencies if one.tpot_s is not None],
        "itl": [gap_s for one in latencies for gap_s in one.itl_s],
        "e2el": [one.e2el_s for one in latencies],
    }
    return {f"{name}_ms": percentiles([1e3 * one for one in some]) for name, some in seconds.items()}


def measure_each(
    experiment: DeviceExperiment, models: Sequence[str], folders: Folders, **settings: Any
) -> list[dict[str, Any]]:
    """Run `measure` on each model, dtype and kind of banks; figures name models as given in `models`."""
    on = {"device": experiment.device, "seed": experiment.seed, **settings}
    each = product(models, experiment.dtypes, experiment.banks)
    return [
        {**measure(find(model, folders.models), dtype=dtype, banks=banks, **on), "model": model}
        for model, dtype, banks in each
    ]


def measure(
    model: str,
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    shared_tokens: int = 0,
    device: str = "cpu",
    banks: str = "host",
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:
    """Return times of generations and tokens by kind, ms, and ratios to `kv_cache` by round."""
    # The first round is not measured. A `prefix_hit` begins with `shared_tokens` tokens of a known prompt: at least one
    # block of the prefix rung (16), and fewer than the prompt has. 0: no `prefix_hit`.
    check_target(device, dtype)
    check(model, prompt_tokens + new_tokens, head="token")
    pair = build(model, seed, device, head="token", dtype=dtype)
    clock, requests = Clock(device), Requests(pair.model.config, 1, prompt_tokens, seed, device)
    kinds = ["nocache", "kv_cache", "miss", "exact_hit", *(["prefix_hit"] if shared_tokens else [])]
    ways = _Ways(pair.model, BANKS[banks], new_tokens, clock)
    with torch.inference_mode():
        drawn = ways.draw(rounds + 1, lambda: requests.fresh().to(device), shared_tokens)
        made = interleaved(kinds, drawn, ways.call, end=ways.check)
    latencies = {kind: [one.latency for one in some[1:]] for kind, some in made.items()}
    times = {kind: _percentiles(some) for kind, some in latencies.items()}
    return {
        "model": model,
        "weights": pair.weights,
        "dtype": dtype,
        "banks": banks,
        "clock": clock.name,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "shared_tokens": shared_tokens,
        **{f"{kind}_ms": some["e2el_ms"] for kind, some in times.items()},
        "ratios": ratios({kind: [one.e2el_s for one in some] for kind, some in latencies.items()}, "kv_cache"),
        "times": times,
    }


class _Made(NamedTuple):
    latency: Latency
    tokens: Tensor
    n_hits: int


class _Ways:
    def __init__(self, model: Any, device: str, new_tokens: int, clock: Clock) -> None:
        self._plain, self._wrapped, self._new_tokens, self._clock = model, copy.deepcopy(model), new_tokens, clock
        self._cache = LLMCache.wrap(self._wrapped, max_entries=MAX_ENTRIES, auto_bypass=False, device=device)
        self._prompts: dict[str, Tensor] = {}  # of the present round, by kind; others are new

    def draw(self, n: int, fresh: Callable[[], Tensor], shared_tokens: int) -> Iterator[int]:
        """Yield the numbers of `n` rounds, after drawing the prompts of each and storing the known one."""
        for number in range(n):
            new, known = fresh(), fresh()
            shared = torch.cat([known[:, :shared_tokens], new[:, shared_tokens:]], dim=1)
            self._prompts = {"new": new, "exact_hit": known, "prefix_hit": shared}
            self.generate("exact_hit", known)
            yield number

    def generate(self, kind: str, ids: Tensor, streamer: Marking | None = None) -> Tensor:
        model = self._wrapped if kind in ("miss", *HITS) else self._plain
        tokens: Tensor = greedy(model, ids, self._new_tokens, use_cache=kind != "nocache", streamer=streamer)
        return tokens

    def call(self, kind: str, number: int) -> _Made:
        before, marking = self._cache.stats().n_hits, Marking(self._clock)
        self._clock.wait()
        start = self._clock.mark()
        tokens = self.generate(kind, self._prompts.get(kind, self._prompts["new"]), marking)
        return _Made(marking.since(start), tokens, self._cache.stats().n_hits - before)

    def check(self, made: Mapping[str, _Made]) -> None:
        for kind, one in made.items():
            is_same = not one.n_hits or torch.equal(one.tokens, self.generate("kv_cache", self._prompts[kind]))
            if one.n_hits != (kind in HITS) or not is_same:
                raise RuntimeError(f"a generation counted as {kind} had {one.n_hits} hits, or other tokens")


#: Kinds, with their titles.
KINDS = {
    "nocache": "no cache",
    "kv_cache": "K/V cache",
    "miss": "K/V cache and llmcache, new prompt",
    "prefix_hit": "K/V cache and llmcache, known beginning",
    "exact_hit": "K/V cache and llmcache, known prompt",
}

#: Columns of the table on the screen; the files have all.
SHOWN = ("model", "generation", "dtype", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "kv_cache_ratio")


class Decode(DeviceExperiment):
    prompt_tokens: int = Field(default=128, ge=2)  # tokens per prompt
    new_tokens: int = Field(default=64, ge=2)  # tokens generated, a fixed number
    # Length of the known prefix of a `prefix_hit` prompt, in tokens.
    shared_tokens: int = Field(default=96, ge=PrefixOptions().block)
    rounds: int = Field(default=20, ge=3)  # generations of each kind

    def check(self) -> None:
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(f"shared_tokens: fewer than the prompt's {self.prompt_tokens} (got {self.shared_tokens})")


def run(experiment: Decode, folders: Folders) -> Outcome:
    lengths = {name: getattr(experiment, name) for name in ("prompt_tokens", "new_tokens", "shared_tokens", "rounds")}
    measured = measure_each(experiment, experiment.models, folders, **lengths)
    rows = [row for figures in measured for row in _rows(figures)]
    shown = [{name: row[name] for name in SHOWN} for row in rows]
    return Outcome(rows, {"generation": measured, "summary": shown, "threads": torch.get_num_threads()})


def _rows(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return medians, one row per kind; `kv_cache_ratio`: a generation's time over that with a K/V cache, by round."""
    return [
        {
            **{name: figures[name] for name in ("model", "weights", "dtype", "banks", "clock")},
            **{name: figures[name] for name in ("prompt_tokens", "new_tokens", "shared_tokens")},
            "generation": shown,
            **{name: value["median"] for name, value in figures["times"][kind].items()},
            "kv_cache_ratio": figures["ratios"].get(f"{kind}/kv_cache", {"median": 1.0})["median"],
        }
        for kind, shown in KINDS.items()
    ]
