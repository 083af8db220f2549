"""Greedy generation of a few tokens, in each of the ways that one would serve it.

| way | what it keeps |
|---|---|
| `Recompute` | nothing: each step runs the whole sequence |
| `KVCache` | keys and values within a generation: transformers' `DynamicCache` |
| `Remembering` | those, and with llmcache the prefill of prompts across generations |

Each round makes one generation of each kind (the third for a prompt that is new, `miss`, and for one seen before,
`exact_hit`), the order rotating; a hit's tokens are checked, outside the timer, to be those of `KVCache`.
"""

import copy
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.bench.latency import ratios, rotated
from experiments.bench.models import Requests, build, check, check_target, synchronise
from experiments.metrics import percentiles
from llmcache import LLMCache

MAX_ENTRIES = 64


class Way(Protocol):
    """One way to generate; made of a model that is in eval mode and stays as it is."""

    @property
    def n_hits(self) -> int:
        """Prompts that were served from memory so far."""

    def __call__(self, ids: Tensor, new_tokens: int) -> Tensor:
        """The prompt (1, T) and as many tokens more, int64 (1, T + new_tokens)."""


class Recompute:
    """Runs the whole sequence for every token."""

    n_hits = 0
    uses_kv = False

    def __init__(self, model: Any) -> None:
        """Generate with `model`."""
        self._model = model

    def __call__(self, ids: Tensor, new_tokens: int) -> Tensor:
        """Prompt and continuation."""
        tokens: Tensor = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            use_cache=self.uses_kv,
            pad_token_id=0,
        )
        return tokens


class KVCache(Recompute):
    """Runs the prompt once and then one token a step."""

    uses_kv = True


class Remembering(KVCache):
    """As `KVCache`, on a copy of the model that is wrapped."""

    def __init__(self, model: Any) -> None:
        """Copy and wrap `model`."""
        super().__init__(copy.deepcopy(model))
        self._cache = LLMCache.wrap(self._model, max_entries=MAX_ENTRIES, step_aside=False)

    @property
    def n_hits(self) -> int:  # type: ignore[override]
        """Prompts that were served from memory so far."""
        return self._cache.stats().n_hits


def measure(
    model: str,
    *,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: A causal architecture of the benchmark, or a folder.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens generated, always as many.
        rounds: Generations of each kind, after one unmeasured.
        device: Torch device.
        dtype: Of weights and states.
        seed: Of random weights and prompts.

    Returns:
        Times of whole generations in milliseconds by kind, as `experiments.metrics.percentiles` gives them; and in
        `ratios` each kind against `kv_cache`, round by round.

    Raises:
        ConfigError: The model is no causal language model or takes fewer tokens, or device or dtype cannot be measured.
        RuntimeError: A hit gave other tokens than the model alone.
    """
    check_target(device, dtype)
    check(model, prompt_tokens + new_tokens, head="token")
    pair = build(model, seed, device, head="token", dtype=dtype)
    ways = _ways(pair.model)
    requests = Requests(pair.model.config, 1, prompt_tokens, seed, device)
    times: dict[str, list[float]] = {kind: [] for kind in ways}
    with torch.inference_mode():
        for number in range(rounds + 1):
            new, known = (requests.fresh().to(device) for _ in range(2))
            for kind, ms in _round(ways, new, known, new_tokens, number).items():
                if number:
                    times[kind].append(ms)
    return {
        "model": model,
        "weights": pair.weights,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        **{f"{kind}_ms": percentiles(values) for kind, values in times.items()},
        "ratios": ratios(times, "kv_cache"),
    }


def _ways(model: Any) -> dict[str, Way]:
    """The way that each kind of generation is made in; both with llmcache are made by one cache."""
    remembering = Remembering(model)
    return {
        "nocache": Recompute(model),
        "kv_cache": KVCache(model),
        "miss": remembering,
        "exact_hit": remembering,
    }


def _round(ways: Mapping[str, Way], new: Tensor, known: Tensor, new_tokens: int, number: int) -> dict[str, float]:
    """Milliseconds of one generation of each kind.

    Args:
        ways: By kind.
        new: A prompt (1, T) for every kind but the hit.
        known: The hit's; it is made known here, before the clock runs.
        new_tokens: Tokens generated.
        number: Of the round, which decides the order.
    """
    expected = ways["kv_cache"](known, new_tokens)
    ways["exact_hit"](known, new_tokens)
    spent = {}
    for kind in rotated(list(ways), number):
        is_hit = kind == "exact_hit"
        seconds, tokens, n_hits = _timed(ways[kind], known if is_hit else new, new_tokens)
        if n_hits != is_hit or (is_hit and not torch.equal(tokens, expected)):
            raise RuntimeError(f"a generation counted as {kind} had {n_hits} hits, or other tokens")
        spent[kind] = seconds * 1e3
    return spent


def _timed(way: Way, ids: Tensor, new_tokens: int) -> tuple[float, Tensor, int]:
    """Seconds of one generation, its tokens, and the hits it counted."""
    before = way.n_hits
    synchronise(ids.device)
    started = perf_counter()
    tokens = way(ids, new_tokens)
    synchronise(ids.device)
    return perf_counter() - started, tokens, way.n_hits - before
