"""From how many tokens on reading from a store is faster than computing: measured once, when a model is wrapped.

Reading n tokens takes `a + n * bytes / rate`, as values of two sizes tell; computing them n times what a token adds to
a prefill. What a prefill takes whatever its length is left out: what is not read is computed all the same. Files are
read from the memory of the operating system, as they are soon after they were written.
"""

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from llmcache.banks.tier import BreakEven, Tier
from llmcache.models.adapters import CACHE, Trunk, device_of, vocabulary_size
from llmcache.models.hooks import are_hooked, parts_of
from llmcache.models.model_config import setting
from llmcache.request.rows import Scope

_SCOPE = Scope("llmcache: what reading takes", "", "", "")
_SHORT, _LONG = 8, 128  # tokens of the prefills
_SPARE = 4  # positions that a family may not use
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 8 << 20
_TRIES = 3


def measure(trunk: Trunk, tier: Tier, keeps_tokens: bool) -> BreakEven:
    """Time a trunk, which no cache hangs on yet, and the store.

    Nothing is measured, and all is read, of a model that is in training mode or has hooks of others within, or that has
    no room for a prefill of some length; or where the store holds no value of 8 MiB. With `keeps_tokens`, a value grows
    with its tokens.
    """
    n_positions = setting(trunk.config, "max_position_embeddings") or _LONG + _SPARE
    n_long = min(_LONG, n_positions - _SPARE)
    if trunk.module.training or are_hooked([trunk.module, *parts_of(trunk.module)]) or n_long <= _SHORT:
        return BreakEven()
    short_s, _ = _prefill(trunk, _SHORT)
    long_s, nbytes = _prefill(trunk, n_long)
    token_s = max(long_s - short_s, 0.0) / (n_long - _SHORT)
    try:
        reading = {size: _read(tier, size) for size in (_SMALL_BYTES, _LARGE_BYTES)}
    finally:
        tier.discard(_SCOPE.namespace)
    fixed_s, large_s = reading.values()
    if fixed_s is None or large_s is None:
        return BreakEven(token_s=token_s)
    saved_s = token_s - keeps_tokens * nbytes / n_long * max(large_s - fixed_s, 0.0) / (_LARGE_BYTES - _SMALL_BYTES)
    return BreakEven(math.ceil(fixed_s / saved_s) if saved_s > 0 else None, token_s)


def _prefill(trunk: Trunk, n_tokens: int) -> tuple[float, int]:
    """Seconds that so many tokens take, and the bytes of their last states and K/V."""
    ids = torch.arange(n_tokens, device=device_of(trunk.module))[None] % vocabulary_size(trunk)

    def compute() -> Any:
        with torch.no_grad():  # tensors made in inference mode might stay in buffers
            output = trunk.module(input_ids=ids)
        output[0].flatten()[0].item()  # waits for the device
        return output

    output = compute()
    kv_cache = output.get(CACHE)
    pairs = [] if kv_cache is None else [(layer.keys, layer.values) for layer in kv_cache.layers]
    return _least_s(compute), output[0].nbytes + sum(keys.nbytes + values.nbytes for keys, values in pairs)


def _read(tier: Tier, nbytes: int) -> float | None:
    """Seconds that reading a value of a size takes, checked and copied; None where the store does not have it."""
    name = f"{nbytes}"
    tier.put(
        _SCOPE, name, {"x": torch.zeros(nbytes, dtype=torch.uint8, device="cpu")}, {}, tier.generation(_SCOPE.namespace)
    )
    tier.drain()
    if not tier.held(_SCOPE, [name]):
        return None
    return _least_s(lambda: [value and value.tensors["x"].clone() for value in tier.fetch(_SCOPE, [name], 0)])


def _least_s(act: Callable[[], object]) -> float:
    took = []
    for _ in range(_TRIES):
        started = perf_counter()
        act()
        took.append(perf_counter() - started)
    return min(took)
