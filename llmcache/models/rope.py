"""Rotary position encodings: those whose frequencies depend on the length of a call, and keys at other positions.

RoPE of type `dynamic` and `longrope` (transformers' `rope_type`) changes its frequencies once a call exceeds the length
of the original training: the same tokens at the same positions then have other states in a longer call.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_INTERLEAVED, _AT_END = "interleaved", " at end"
#: How a key's dimensions form the pairs that are rotated, and whether they are its last dimensions.
LAYOUTS = ("half", _INTERLEAVED, f"half{_AT_END}", f"{_INTERLEAVED}{_AT_END}")


def steady_length(trunk: nn.Module) -> int | None:
    """Return the length in tokens from which frequencies may depend on a call's length; None if they never do."""
    lengths = (_original_length(part, layer_type) for part in trunk.modules() for layer_type in _layer_types(part))
    return min(lengths, default=None)


def changes_with_length(part: nn.Module) -> bool:
    """Whether a module is a RoPE whose frequencies depend on the length of a call."""
    return bool(_layer_types(part))


def _layer_types(part: nn.Module) -> list[str | None]:
    """Return the layer types whose frequencies change with the length; None stands for all layers."""
    kinds = part.__dict__.get("rope_type")
    by_layer_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
    return [
        layer_type
        for layer_type, kind in by_layer_type.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    ]


def _original_length(rope: Any, layer_type: str | None) -> int:
    """Return the length in tokens at which its frequencies change; 0 if unknown."""
    settings = getattr(rope.config, "rope_parameters", None) or {}
    settings = settings if layer_type is None else settings.get(layer_type, {})
    lengths = (settings.get("original_max_position_embeddings"), getattr(rope, "original_max_seq_len", None))
    return min((int(length) for length in lengths if length is not None), default=0)


def rotate(keys: Tensor, offsets: Tensor, trunk: nn.Module, layout: str) -> Tensor:
    """Return keys as they are at other positions.

    Args:
        keys: (B, H, n, D_h).
        offsets: How many positions later (B, n), int64; negative: earlier.
        trunk: The trunk whose layers made the keys; `rotary_emb` holds the frequencies of all layers.
        layout: One of `LAYOUTS`.
    """
    rope: Any = trunk.rotary_emb
    angles = (offsets[..., None] * rope.inv_freq.float())[:, None]
    cos, sin = angles.cos(), angles.sin()
    width, is_interleaved = 2 * angles.shape[-1], layout.startswith(_INTERLEAVED)
    first = keys.shape[-1] - width if layout.endswith(_AT_END) else 0
    before, own, after = torch.tensor_split(keys, (first, first + width), dim=-1)
    one, other = (own[..., ::2], own[..., 1::2]) if is_interleaved else own.chunk(2, dim=-1)
    one, other = one.float(), other.float()
    rotated = one * cos - other * sin, other * cos + one * sin
    whole = torch.stack(rotated, dim=-1).flatten(-2) if is_interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([before, whole.to(keys.dtype), after], dim=-1)
