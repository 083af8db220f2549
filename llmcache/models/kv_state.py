"""Takes a K/V cache apart into tensors and a description of all else, and puts it back: whatever its layers keep."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from llmcache.models.adapters import Trunk

_PLAIN = (type(None), bool, int, float, str)


def new_cache(trunk: Trunk) -> DynamicCache:
    """Return the K/V cache that transformers makes for a trunk's config, empty."""
    return DynamicCache(config=trunk.config)


def is_new(kv_cache: Any, trunk: Trunk) -> bool:
    """Whether a K/V cache is as `new_cache` returns it: of the same kinds of layers, and empty."""
    if type(kv_cache) is not DynamicCache or getattr(kv_cache, "offloading", False):
        return False
    try:
        layers, wanted = kv_cache.layers, new_cache(trunk).layers
        return [*map(type, layers)] == [*map(type, wanted)] and describe(layers) == describe(wanted)
    except (TypeError, RuntimeError):  # something that cannot be described or compared
        return False


def describe(layers: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return what layers keep: a description, as JSON values, and the tensors that it numbers, which are not copied.

    Raises:
        TypeError: A layer keeps something else than tensors, plain values and containers of these.
    """
    tensors: list[Tensor] = []
    return [_take_apart(vars(layer), tensors) for layer in layers], tensors


def restore(kv_cache: Any, described: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Have the layers of a new K/V cache keep what `describe` returned; tensors are copied to where they were."""
    for layer, own in zip(kv_cache.layers, described, strict=True):
        vars(layer).update(_put_together(own, tensors))


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1, str(value.device)]
    if type(value) is dict:
        return ["dict", [[_take_apart(name, tensors), _take_apart(one, tensors)] for name, one in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_take_apart(one, tensors) for one in value]]
    if isinstance(value, torch.dtype | torch.device):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    if type(value) in _PLAIN:
        return value
    raise TypeError(f"a K/V cache keeps a {type(value).__name__}, which is not copied")


def _put_together(described: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(described, list):
        return described
    kind, value, *device = described
    if kind == "tensor":
        return tensors[value].to(device[0], copy=True)
    if kind == "dict":
        return {_put_together(name, tensors): _put_together(one, tensors) for name, one in value}
    if kind in ("list", "tuple"):
        parts = [_put_together(one, tensors) for one in value]
        return parts if kind == "list" else tuple(parts)
    return torch.device(value) if kind == "device" else getattr(torch, value)
