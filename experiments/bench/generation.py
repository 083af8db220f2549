"""Greedy generation of a few tokens: recomputing everything, with a K/V cache, and with llmcache around the prefill.

Kinds: `nocache` (each step runs the whole sequence), `kv_cache` (transformers' `DynamicCache`), `miss` and `exact_hit`
(K/V cache and llmcache, the prompt new or seen before). Each round makes one generation of each kind, the order
rotating; a hit's tokens are checked, outside the timer, to be those of `kv_cache`.
"""

import copy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experiments.bench.latency import rotated, summarise
from experiments.bench.models import Requests, build, check, check_target, synchronise
from llmcache import LLMCache

MAX_ENTRIES = 64


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
        Times of whole generations in milliseconds by kind, medians and percentiles.

    Raises:
        ConfigError: The model is no causal language model or takes fewer tokens, or device or dtype cannot be measured.
        RuntimeError: A hit gave other tokens than the model alone.
    """
    check_target(device, dtype)
    check(model, prompt_tokens + new_tokens, head="token")
    pair = build(model, seed, device, head="token", dtype=dtype)
    plain, wrapped = pair.model, copy.deepcopy(pair.model)
    requests = Requests(plain.config, 1, prompt_tokens, seed, device)
    times: dict[str, list[float]] = {kind: [] for kind in ("nocache", "kv_cache", "miss", "exact_hit")}
    with LLMCache.wrap(wrapped, max_entries=MAX_ENTRIES) as cache, torch.inference_mode():
        for number in range(rounds + 1):
            prompt = requests.fresh().to(device)
            seen = requests.fresh().to(device)
            expected = _generate(plain, seen, new_tokens)
            _generate(wrapped, seen, new_tokens)
            for kind in rotated(list(times), number):
                spent, tokens, n_hits = _timed(cache, plain, wrapped, kind, prompt, seen, new_tokens)
                if n_hits != (kind == "exact_hit") or (kind == "exact_hit" and not torch.equal(tokens, expected)):
                    raise RuntimeError(f"a generation counted as {kind} had {n_hits} hits, or other tokens")
                if number:
                    times[kind].append(spent * 1e3)
    return {
        "model": model,
        "weights": pair.weights,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        **{f"{kind}_ms": summarise(values) for kind, values in times.items()},
    }


def _timed(
    cache: LLMCache, plain: Any, wrapped: Any, kind: str, prompt: Tensor, seen: Tensor, new_tokens: int
) -> tuple[float, Tensor, int]:
    """Seconds of one generation, its tokens, and the hits it counted."""
    model = wrapped if kind in ("miss", "exact_hit") else plain
    ids = seen if kind == "exact_hit" else prompt
    before = cache.stats().n_hits
    synchronise(ids.device)
    started = perf_counter()
    tokens = _generate(model, ids, new_tokens, use_cache=kind != "nocache")
    synchronise(ids.device)
    return perf_counter() - started, tokens, cache.stats().n_hits - before


def _generate(model: Any, ids: Tensor, new_tokens: int, use_cache: bool = True) -> Tensor:
    tokens: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        use_cache=use_cache,
        pad_token_id=0,
    )
    return tokens
