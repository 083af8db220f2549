"""Runs tokens of several texts in one row of a causal trunk: each token attends to its own text alone.

Sizes: N tokens that are run, P columns of the K/V cache.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.model_config import setting

_SLIDING, _CHUNKED, _FULL = "sliding_attention", "chunked_attention", "full_attention"


def run_segments(
    run: Callable[..., Any], ids: Tensor, positions: Tensor, kv_cache: Any, sees: Tensor, trunk: Trunk
) -> Any:
    """Run tokens of several texts in one row; return the trunk's output, and add their K/V to the cache.

    Args:
        run: Runs the trunk with named arguments.
        ids: Token ids (1, N), int64.
        positions: Position of each token in its own text (1, N), int64.
        kv_cache: K/V of earlier tokens, P columns.
        sees: Whether a column holds the token itself or a token before it in its text, bool (N, P + N). The columns of
            a text are in the order of its tokens, from the first on.
        trunk: A trunk with `Causal.packs`.
    """
    mask = segment_mask(sees, trunk)
    return run(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: kv_cache})


def segment_mask(sees: Tensor, trunk: Trunk) -> Tensor | dict[str, Tensor]:
    """Return `sees` (N, P + N) as the trunk's 4-D mask (1, 1, N, P + N): bool, or for eager attention added to scores.

    Windows are applied. If layers differ in kind, a dict has one mask per kind.
    """
    masks = {}
    for kind, window in dict(windows(trunk.config, trunk.depth)).items():
        mask = _within(sees, kind, window)[None, None]
        if setting(trunk.config, "_attn_implementation") == "eager":
            dtype: torch.dtype = getattr(trunk.module, "dtype", torch.float32)
            nothing = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            mask = nothing.masked_fill(~mask, torch.finfo(dtype).min)
        masks[kind] = mask
    return masks if len(masks) > 1 else masks.popitem()[1]


def _within(sees: Tensor, kind: str, window: int | None) -> Tensor:
    """Return the columns of `sees` (N, P + N) that a layer's window leaves."""
    if window is None:
        return sees
    n_later = sees.flip(-1).cumsum(-1).flip(-1) - 1  # tokens of the text after each column
    if kind == _CHUNKED:
        own = sees.sum(-1, keepdim=True) - 1
        return sees & ((own - n_later) // window == own // window)
    return sees & (n_later < window)


def windows(config: Any, depth: int) -> Iterator[tuple[str, int | None]]:
    """Yield the kind of each layer, and to how many tokens a token attends, itself included; None: to all."""
    window, chunk = setting(config, "sliding_window"), setting(config, "attention_chunk_size")
    usual = _SLIDING if window else _CHUNKED if chunk else _FULL
    for kind in setting(config, "layer_types") or [usual] * depth:
        yield kind, {_SLIDING: window, _CHUNKED: chunk}.get(kind)
