"""Rotary positions whose frequencies depend on the length of a call.

RoPE of the kinds `dynamic` and `longrope` (transformers' `rope_type`) turns keys by other frequencies once a call
reaches beyond the length that the model was first trained on. The same tokens in the same places then have other states
in a longer call, or beside a longer row of a batch. Below that length all calls are alike.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn


def steady_length(trunk: nn.Module) -> int | None:
    """The length from which a call's positions may be encoded otherwise than a shorter one's; None: there is none."""
    lengths = (_original_length(part, layer_type) for part in trunk.modules() for layer_type in _layer_types(part))
    return min(lengths, default=None)


def changes_with_length(part: nn.Module) -> bool:
    """Whether a module encodes positions by frequencies that depend on the length of a call."""
    return bool(_layer_types(part))


def _layer_types(part: nn.Module) -> list[str | None]:
    """Types of layers whose frequencies change with the length; None stands for all layers."""
    kinds = part.__dict__.get("rope_type")
    by_layer_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
    return [
        layer_type
        for layer_type, kind in by_layer_type.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    ]


def _original_length(rope: Any, layer_type: str | None) -> int:
    """The length at which its frequencies change; 0 where it does not say."""
    told = getattr(rope.config, "rope_parameters", None) or {}
    told = told if layer_type is None else told.get(layer_type, {})
    lengths = (told.get("original_max_position_embeddings"), getattr(rope, "original_max_seq_len", None))
    return min((int(length) for length in lengths if length is not None), default=0)
