"""Takes a K/V cache apart into tensors and a description of all else, and puts it back: whatever it keeps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.packing import parts_of

_USUAL = frozenset(vars(DynamicCache()))
_PLAIN = (type(None), bool, int, float, str)


def new_cache(trunk: Trunk, kind: type[DynamicCache] = DynamicCache) -> DynamicCache:
    """Return an empty K/V cache: the one that transformers makes for a trunk's config, or one of another class."""
    return DynamicCache(config=trunk.config) if kind is DynamicCache else kind()


def is_new(kv_cache: Any, wanted: DynamicCache) -> bool:
    """Whether a K/V cache is like `wanted`, which is empty: of the same class, with the same kinds of layers."""
    if type(kv_cache) is not type(wanted) or getattr(kv_cache, "offloading", False):
        return False
    try:
        is_alike = [*map(type, kv_cache.layers)] == [*map(type, wanted.layers)]
        return is_alike and describe(kv_cache.layers, own_of(kv_cache)) == describe(wanted.layers, own_of(wanted))
    except (TypeError, RuntimeError):  # something that cannot be described or compared
        return False


def cache_in(output: Any, default: Any = None) -> Any:
    """Return the K/V cache in a trunk's output, by name or in second place; `default` if it has none."""
    parts = parts_of(output)
    return parts.get(CACHE, parts.get(1, default))


def own_of(kv_cache: Any) -> dict[str, Any]:
    """Return the public attributes of a K/V cache, by name, that no `DynamicCache` has."""
    return {name: value for name, value in vars(kv_cache).items() if not (name in _USUAL or name.startswith("_"))}


def describe(layers: Sequence[Any], own: Mapping[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """Return what a K/V cache keeps: a description, as JSON values, and the tensors that it numbers.

    The tensors are not copied.

    Args:
        layers: Its layers.
        own: Its other attributes; see `own_of`.

    Raises:
        TypeError: It keeps something else than tensors, plain values and containers of these.
    """
    tensors: list[Tensor] = []
    of_layers = [_take_apart(vars(layer), tensors) for layer in layers]
    return [of_layers, _take_apart(dict(own), tensors)], tensors


def restore(kv_cache: Any, described: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Have a new K/V cache keep what `describe` returned; tensors are copied to where they were."""
    of_layers, own = described
    while len(kv_cache.layers) < len(of_layers):  # it makes them as they are needed
        kv_cache.layers.append(kv_cache.layer_class_to_replicate())
    for layer, of_layer in zip(kv_cache.layers, of_layers, strict=True):
        vars(layer).update(_put_together(of_layer, tensors))
    vars(kv_cache).update(_put_together(own, tensors))


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
