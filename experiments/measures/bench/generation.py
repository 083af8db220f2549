"""Greedy generation of a few tokens, served in several ways.

| kind | prompt | what is kept |
|---|---|---|
| `nocache` | new | nothing: each step runs the whole sequence |
| `kv_cache` | new | K/V within a generation: transformers' `DynamicCache` |
| `miss` | new | the same, and with llmcache the prefill of prompts across generations |
| `exact_hit` | seen before | as `miss` |
| `prefix_hit`, if `shared_tokens` is set | begins like a known prompt | as `miss` |

Each round makes one generation of each kind, in rotating order. Outside the timer, the tokens of a hit are compared
with those of `kv_cache`.

Times are named as in vLLM's serving benchmark: TTFT, from the prompt's tokens to the first new token; ITL, from one
new token to the next; TPOT, the mean ITL of a generation; E2EL, from the prompt to the last token. On a GPU, CUDA
events in its stream take the times.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from experiments.measures.base import DeviceExperiment
from experiments.measures.bench.latency import BANKS
from experiments.measures.bench.rounds import ratios, rotated
from experiments.metrics.metrics import percentiles
from experiments.models.architectures import Requests, build, check, check_target
from experiments.models.loading import find
from experiments.support.clock import Clock, Mark
from experiments.support.files import Folders
from llmcache import LLMCache
from llmcache.generation import Latency

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

    def since(self, start: Mark) -> list[float]:
        """Return the time of each new token, seconds after the start."""
        return [self._clock.ms(start, mark) / 1e3 for mark in self._marks[1:]]


def greedy(model: Any, ids: Tensor, new_tokens: int, **more: Any) -> Any:
    """Return prompt and greedy continuation, int64 (1, T + new_tokens), from transformers' own loop; ids are (1, T)."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **more,
    )


@dataclass(slots=True)
class Times:
    """Times of generations of one kind, ms."""

    ttft: list[float] = field(default_factory=list)  # to the first token, one per generation
    itl: list[float] = field(default_factory=list)  # from each token to the next, over all generations
    # Mean ITL, one per generation; none if one token is generated
    tpot: list[float] = field(default_factory=list)
    e2el: list[float] = field(default_factory=list)  # to the last token, one per generation

    def add(self, tokens_at: Sequence[float]) -> None:
        """Add a generation, given the time of each token in seconds from its start."""
        latency = Latency(tuple(tokens_at))
        self.ttft.append(latency.ttft_s * 1e3)
        self.itl += [gap_s * 1e3 for gap_s in latency.itl_s]
        self.tpot += [] if latency.tpot_s is None else [latency.tpot_s * 1e3]
        self.e2el.append(latency.e2el_s * 1e3)

    def percentiles(self) -> dict[str, Any]:
        """Return percentiles of each list, in the format of `experiments.metrics.metrics.percentiles`."""
        return {f"{name}_ms": percentiles(getattr(self, name)) for name in ("ttft", "tpot", "itl", "e2el")}


def measure_each(
    experiment: DeviceExperiment, models: Sequence[str], folders: Folders, **settings: Any
) -> list[dict[str, Any]]:
    """Run `measure` on each model, dtype and kind of banks; figures name models as given in `models`."""
    on = {"device": experiment.device, "seed": experiment.seed, **settings}
    return [
        {**measure(find(model, folders.models), dtype=dtype, banks=banks, **on), "model": model}
        for model, dtype, banks in product(models, experiment.dtypes, experiment.banks)
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
    ways, clock = _Ways(pair.model, banks, new_tokens), Clock(device)
    requests = Requests(pair.model.config, 1, prompt_tokens, seed, device)
    kinds = ["nocache", "kv_cache", "miss", "exact_hit", *(["prefix_hit"] if shared_tokens else [])]
    times = {kind: Times() for kind in kinds}
    with torch.inference_mode():
        for number in range(rounds + 1):
            new, known = (requests.fresh().to(device) for _ in range(2))
            prompts = dict.fromkeys(kinds, new) | {"exact_hit": known}
            if shared_tokens:
                prompts["prefix_hit"] = torch.cat([known[:, :shared_tokens], new[:, shared_tokens:]], dim=1)
            ways.generate("exact_hit", known)  # stored before timing starts
            for kind, tokens_at in ways.round(rotated(kinds, number), prompts, clock).items():
                if number:
                    times[kind].add(tokens_at)
    whole = {kind: spent.e2el for kind, spent in times.items()}
    return {
        "model": model,
        "weights": pair.weights,
        "dtype": dtype,
        "banks": banks,
        "clock": clock.name,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "shared_tokens": shared_tokens,
        **{f"{kind}_ms": percentiles(values) for kind, values in whole.items()},
        "ratios": ratios(whole, "kv_cache"),
        "times": {kind: spent.percentiles() for kind, spent in times.items()},
    }


class _Ways:
    """A plain model, and a wrapped copy of it."""

    def __init__(self, model: Any, banks: str, new_tokens: int) -> None:
        self._plain, self._wrapped, self._new_tokens = model, copy.deepcopy(model), new_tokens
        self._cache = LLMCache.wrap(self._wrapped, max_entries=MAX_ENTRIES, auto_bypass=False, device=BANKS[banks])

    def generate(self, kind: str, ids: Tensor, streamer: Marking | None = None) -> Tensor:
        model = self._wrapped if kind in ("miss", *HITS) else self._plain
        tokens: Tensor = greedy(model, ids, self._new_tokens, use_cache=kind != "nocache", streamer=streamer)
        return tokens

    def round(self, kinds: Iterable[str], prompts: Mapping[str, Tensor], clock: Clock) -> dict[str, list[float]]:
        """Return the token times of one generation of each kind, after checking that it was of that kind."""
        tokens_at, made, hits = {}, {}, {}
        for kind in kinds:
            before, marking = self._cache.stats().n_hits, Marking(clock)
            clock.wait()
            start = clock.mark()
            made[kind] = self.generate(kind, prompts[kind], marking)
            tokens_at[kind] = marking.since(start)
            hits[kind] = self._cache.stats().n_hits - before
        for kind, n_hits in hits.items():
            is_same = not n_hits or torch.equal(made[kind], self.generate("kv_cache", prompts[kind]))
            if n_hits != (kind in HITS) or not is_same:
                raise RuntimeError(f"a generation counted as {kind} had {n_hits} hits, or other tokens")
        return tokens_at
