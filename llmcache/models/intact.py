"""Checks that the trunk still runs the layers that were wrapped."""

from functools import reduce
from typing import Any

from llmcache.models.adapters import Trunk


def find_reason_of_layers(trunk: Trunk) -> str | None:
    """Return why a call bypasses the wrapped layers, a key of `bypass.CURES`; None if the trunk runs them in order."""
    if any(layer._compiled_call_impl for layer in trunk.layers):
        return "compiled_layers"
    try:
        held: Any = reduce(getattr, trunk.adapter.layers.split("."), trunk.module)
        is_intact = tuple(held) == trunk.layers and all("forward" in vars(layer) for layer in trunk.layers)
    except (AttributeError, TypeError):
        is_intact = False
    return None if is_intact else "other_layers"
