"""Greedy generation of a few tokens, in each of the ways that one would serve it.

| way | what it keeps |
|---|---|
| `Recompute` | nothing: each step runs the whole sequence |
| `KVCache` | keys and values within a generation: transformers' `DynamicCache` |
| `Remembering` | those, and with llmcache the prefill of prompts across generations |

Each round makes one generation of each kind (the third for a prompt that is new, `miss`, for one seen before,
`exact_hit`, and, where it is asked for, for one that begins as that one did, `prefix_hit`), the order rotating; a hit's
tokens are checked, outside the timer, to be those of `KVCache`.

Times are named as in vLLM's benchmark of serving: TTFT, from the tokens of the prompt to the first new one; ITL, from
one new token to the next; TPOT, their mean over a generation; E2EL, from the prompt to the last token. On a GPU they
are taken by events in its stream.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.measures.bench.latency import BANKS
from experiments.measures.bench.rounds import ratios, rotated
from experiments.metrics.metrics import percentiles
from experiments.models.architectures import Requests, build, check, check_target
from experiments.models.loading import find
from experiments.support.clock import Clock, Mark
from llmcache import LLMCache
from llmcache.generation import Latency

MAX_ENTRIES = 64

#: Hits that a generation of each kind counts; none of the others.
HITS = {"exact_hit": 1, "prefix_hit": 1}


class Marking:
    """Marks when each new token is there. A streamer of transformers, which is given the prompt first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Mark] = []

    def put(self, value: Tensor) -> None:
        """Tokens that are on the host now."""
        self._marks.append(self._clock.mark())

    def end(self) -> None:
        """No more come."""

    def since(self, start: Mark) -> list[float]:
        """When each new token was there, seconds after the start."""
        return [self._clock.ms(start, mark) / 1e3 for mark in self._marks[1:]]


def greedy(model: Any, ids: Tensor, new_tokens: int, **more: Any) -> Any:
    """Prompt (1, T) and greedy continuation, int64 (1, T + new_tokens), by transformers' own loop."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **more,
    )


class Recompute:
    """Runs the whole sequence for every token. A model stays as it is; `n_hits` counts prompts served from memory."""

    n_hits = 0
    uses_kv = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: Tensor, new_tokens: int, marking: Marking | None = None) -> Tensor:
        tokens: Tensor = greedy(self._model, ids, new_tokens, use_cache=self.uses_kv, streamer=marking)
        return tokens


class KVCache(Recompute):
    """Runs the prompt once and then one token a step."""

    uses_kv = True


class Remembering(KVCache):
    """As `KVCache`, on a copy of the model that is wrapped."""

    def __init__(self, model: Any, banks: str) -> None:
        super().__init__(copy.deepcopy(model))
        self._cache = LLMCache.wrap(self._model, max_entries=MAX_ENTRIES, auto_bypass=False, device=BANKS[banks])

    @property
    def n_hits(self) -> int:  # type: ignore[override]
        """Prompts that were served from memory so far."""
        return self._cache.stats().n_hits


@dataclass(slots=True)
class Times:
    """Generations of one kind, milliseconds."""

    ttft: list[float] = field(default_factory=list)  # to the first token, one a generation
    itl: list[float] = field(default_factory=list)  # from each token to the next, of all generations
    # Mean of those of a generation, one each; none where one token is generated
    tpot: list[float] = field(default_factory=list)
    e2el: list[float] = field(default_factory=list)  # to the last token, one a generation

    def add(self, tokens_at: Sequence[float]) -> None:
        """Count a generation that gave each token so many seconds after its beginning."""
        latency = Latency(tuple(tokens_at))
        self.ttft.append(latency.ttft_s * 1e3)
        self.itl += [gap_s * 1e3 for gap_s in latency.itl_s]
        self.tpot += [] if latency.tpot_s is None else [latency.tpot_s * 1e3]
        self.e2el.append(latency.e2el_s * 1e3)

    def percentiles(self) -> dict[str, Any]:
        """Of each, as `experiments.metrics.metrics.percentiles` gives them."""
        return {f"{name}_ms": percentiles(getattr(self, name)) for name in ("ttft", "tpot", "itl", "e2el")}


def measure_each(
    models: Sequence[str], dtypes: Sequence[str], banks: Sequence[str], models_dir: Path | None, **settings: Any
) -> list[dict[str, Any]]:
    """Run `measure` on each model with each dtype and kind of banks; figures name models as they are given here."""
    return [
        {**measure(find(model, models_dir), dtype=dtype, banks=place, **settings), "model": model}
        for model in models
        for dtype in dtypes
        for place in banks
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
    """Times of generations and of tokens by kind, milliseconds, and ratios to `kv_cache` round by round."""
    # The first round is not measured. Of `shared_tokens` a `prefix_hit` begins with so many tokens of a known prompt;
    # a block of the prefix rung (16) at least, and fewer than the prompt has; 0: there is none of this kind.
    check_target(device, dtype)
    check(model, prompt_tokens + new_tokens, head="token")
    pair = build(model, seed, device, head="token", dtype=dtype)
    ways, clock = _ways(pair.model, banks, has_prefix=shared_tokens > 0), Clock(device)
    requests = Requests(pair.model.config, 1, prompt_tokens, seed, device)
    times = {kind: Times() for kind in ways}
    with torch.inference_mode():
        for number in range(rounds + 1):
            new, known = (requests.fresh().to(device) for _ in range(2))
            prompts = dict.fromkeys(ways, new) | {"exact_hit": known}
            if shared_tokens:
                prompts["prefix_hit"] = torch.cat([known[:, :shared_tokens], new[:, shared_tokens:]], dim=1)
            ways["exact_hit"](known, new_tokens)  # made known before the clock runs
            _round(ways, prompts, new_tokens, number, times if number else {kind: Times() for kind in ways}, clock)
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


def _ways(model: Any, banks: str, has_prefix: bool) -> dict[str, Recompute]:
    """The way that each kind of generation is made in; all with llmcache are made by one cache."""
    remembering = Remembering(model, banks)
    ways: dict[str, Recompute] = {
        "nocache": Recompute(model),
        "kv_cache": KVCache(model),
        "miss": remembering,
        "exact_hit": remembering,
    }
    return ways | {"prefix_hit": remembering} if has_prefix else ways


def _round(
    ways: Mapping[str, Recompute],
    prompts: Mapping[str, Tensor],
    new_tokens: int,
    number: int,
    times: Mapping[str, Times],
    clock: Clock,
) -> None:
    """One generation of each kind, in an order that hangs on the round's number; its times are put with its kind's."""
    made, hits = {}, {}
    for kind in rotated(list(ways), number):
        made[kind], hits[kind] = _timed(ways[kind], prompts[kind], new_tokens, times[kind], clock)
    for kind, n_hits in hits.items():
        is_same = not n_hits or torch.equal(made[kind], ways["kv_cache"](prompts[kind], new_tokens))
        if n_hits != HITS.get(kind, 0) or not is_same:
            raise RuntimeError(f"a generation counted as {kind} had {n_hits} hits, or other tokens")


def _timed(way: Recompute, ids: Tensor, new_tokens: int, times: Times, clock: Clock) -> tuple[Tensor, int]:
    """Tokens of one generation, and the hits it counted; its times are put with the others."""
    before, marking = way.n_hits, Marking(clock)
    clock.wait()
    start = clock.mark()
    tokens = way(ids, new_tokens, marking)
    times.add(marking.since(start))
    return tokens, way.n_hits - before
