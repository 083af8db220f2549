"""Rotary position encodings whose frequencies depend on the length of a call.

RoPE of type `dynamic` and `longrope` (transformers' `rope_type`) changes its frequencies once a call exceeds the length
of the original training: the same tokens at the same positions then have other states in a longer call.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn


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
