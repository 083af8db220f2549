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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.measures.base import DeviceExperiment
from experiments.measures.bench.latency import BANKS
from experiments.measures.harness import interleaved, ratios
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
    clock, requests = Clock(device), Requests(pair.model.config, 1, prompt_tokens, seed, device)
    kinds = ["nocache", "kv_cache", "miss", "exact_hit", *(["prefix_hit"] if shared_tokens else [])]
    ways = _Ways(pair.model, BANKS[banks], new_tokens, clock)
    times = {kind: Times() for kind in kinds}
    with torch.inference_mode():
        drawn = ways.draw(rounds + 1, lambda: requests.fresh().to(device), shared_tokens)
        for kind, some in interleaved(kinds, drawn, ways.call, end=ways.check).items():
            for one in some[1:]:
                times[kind].add(one.tokens_at)
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


class _Made(NamedTuple):
    """One generation."""

    tokens_at: list[float]  # time of each new token, seconds from the start
    tokens: Tensor
    n_hits: int


class _Ways:
    """A plain model, and a wrapped copy of it."""

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
        """Make one generation of the present round."""
        before, marking = self._cache.stats().n_hits, Marking(self._clock)
        self._clock.wait()
        start = self._clock.mark()
        tokens = self.generate(kind, self._prompts.get(kind, self._prompts["new"]), marking)
        return _Made(marking.since(start), tokens, self._cache.stats().n_hits - before)

    def check(self, made: Mapping[str, _Made]) -> None:
        """Raise if a generation was not of its kind."""
        for kind, one in made.items():
            is_same = not one.n_hits or torch.equal(one.tokens, self.generate("kv_cache", self._prompts[kind]))
            if one.n_hits != (kind in HITS) or not is_same:
                raise RuntimeError(f"a generation counted as {kind} had {one.n_hits} hits, or other tokens")
