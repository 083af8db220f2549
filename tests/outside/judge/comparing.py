"""Compares two outputs of a model tensor by tensor, K/V included."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Largest difference, relative to the largest value, that another order of additions causes.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one tensor of two outputs differs."""

    field: str  # its place in the output, `past_key_values.0.keys` for instance
    most: float  # relative to the largest value (at least 1); infinite for another shape or type
    is_close: bool  # within what another order of additions causes


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of an output with its place, through mappings, sequences, and K/V caches of any kind."""
    if isinstance(output, Mapping):
        children = list(output.items())
    elif isinstance(output, (list, tuple)):
        children = list(enumerate(output))
    elif hasattr(output, "self_attention_cache"):
        children = [("self", output.self_attention_cache), ("cross", output.cross_attention_cache)]
    elif hasattr(output, "layers") and hasattr(output, "get_seq_length"):
        children = [
            (f"{number}.{name}", getattr(layer, name, None))
            for number, layer in enumerate(output.layers)
            for name in ("keys", "values")
        ]
    else:
        yield path, output
        return
    for name, child in children:
        yield from leaves(child, f"{path}.{name}" if path else str(name))


def compare(mine: Any, other: Any) -> list[Difference]:
    """Return tensors that are not bit-equal, and places that only one output has."""
    ours, theirs = dict(leaves(mine)), dict(leaves(other))
    found = [_unlike(name) for name in ours.keys() ^ theirs.keys()]
    both = [_compare_leaf(name, ours[name], theirs[name]) for name in ours.keys() & theirs.keys()]
    return sorted([*found, *filter(None, both)], key=lambda one: one.field)


def _unlike(name: str) -> Difference:
    return Difference(name, float("inf"), False)


def _compare_leaf(name: str, mine: Any, other: Any) -> Difference | None:
    if not (isinstance(mine, Tensor) and isinstance(other, Tensor)):
        is_same = type(mine) is type(other) and (isinstance(mine, Tensor) or mine is other or _is_equal(mine, other))
        return None if is_same else _unlike(name)
    if mine.shape != other.shape or mine.dtype != other.dtype or mine.device != other.device:
        return _unlike(name)
    if mine.device.type == "meta" or torch.equal(mine, other):
        return None
    most = float(_distance(mine, other).max())
    if most == 0.0:  # NaN at the same places
        return None
    return Difference(name, most, most <= TOLERANCE.get(mine.dtype, 0.0))


def _is_equal(mine: Any, other: Any) -> bool:
    try:
        return bool(mine == other)
    except (RuntimeError, TypeError, ValueError):
        return True  # objects that cannot be compared are no answers


def _distance(mine: Tensor, other: Tensor) -> Tensor:
    """Return differences relative to the largest finite value; NaN equals NaN, an infinity itself."""
    a, b = mine.detach().to(torch.float64), other.detach().to(torch.float64)
    finite = b[torch.isfinite(b)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    apart = torch.nan_to_num((a - b).abs() / scale, nan=float("inf"), posinf=float("inf"))
    return apart.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
