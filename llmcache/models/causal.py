"""Runs segments of several texts in one row of a causal trunk, and turns keys to other positions.

Sizes: N tokens that are run, P columns of the K/V cache, n tokens, D_h width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcache.models.adapters import Trunk
from llmcache.models.model_config import setting


@dataclass(frozen=True, slots=True)
class Causal:
    """What a causal trunk allows."""

    cuts: bool = False
    packs: bool = False
    rotates: str = ""


def look_at(trunk: Trunk) -> Causal:
    cuts = trunk.adapter.is_causal and not trunk.adapter.is_guess
    packs = cuts and trunk.adapter.family in ("llama", "gpt2")
    return Causal(cuts, packs, "half" if cuts and trunk.adapter.family == "llama" else "")


def run_segments(
    run: Callable[..., Any], ids: Tensor, positions: Tensor, kv_cache: Any, sees: Tensor, trunk: Trunk
) -> Any:
    mask = sees[None, None]
    if setting(trunk.config, "_attn_implementation") == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return run(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=kv_cache)


def rotate(keys: Tensor, offsets: Tensor, trunk: Trunk, layout: str) -> Tensor:
    """Return keys (B, H, n, D_h) turned by offsets (B, n) in positions."""
    module: Any = trunk.module.rotary_emb
    cos, sin = module(keys.float(), offsets)
    cos, sin = (one[:, None] / module.attention_scaling for one in (cos, sin))
    width = cos.shape[-1]
    own, rest = keys[..., :width], keys[..., width:]
    half = width // 2
    turned = torch.cat([-own[..., half:], own[..., :half]], dim=-1)
    return torch.cat([(own * cos + turned * sin).to(keys.dtype), rest], dim=-1)
