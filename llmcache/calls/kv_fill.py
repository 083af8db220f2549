"""Lays out the tensors of blocks as a batch, and puts K/V into transformers' caches.

A growing cache (`DynamicLayer`) copies all its content at each update. Filling it at once would copy blocks three
times: to join them, to put them in, and when the trunk adds its new columns. So such a layer gets placeholders with the
right number of columns, and the first update joins blocks and new columns in one copy.

Sizes: B rows, C columns filled from blocks, c columns per block, L layers, H K/V heads, D_h or D width.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from llmcache.models.adapters import CACHE
from llmcache.models.packing import STATES

#: Tensors (B, ..., c, D), to be joined to (B, ..., C, D).
Pieces = Sequence[Tensor]


def fill(kv_cache: Any, number: int, keys: Pieces, values: Pieces) -> None:
    """Fill a layer of an empty K/V cache with C columns. Call it for the layers in order."""
    if _takes_at_once(kv_cache, number):
        kv_cache.update(join(keys), join(values), number)
        return
    n_columns = sum(piece.shape[-2] for piece in keys)
    layer = _new_layer(kv_cache, number, keys[0], values[0])
    layer.keys, layer.values = _placeholder(keys[0], n_columns), _placeholder(values[0], n_columns)
    layer.update = _Joining(layer, keys, values)


def put(kv_cache: Any, number: int, keys: Tensor, values: Tensor) -> None:
    """Fill a layer of an empty K/V cache with all columns of a call (B, H, T, D_h); it takes over the tensors."""
    if _takes_at_once(kv_cache, number):
        kv_cache.update(keys, values, number)
        return
    layer = _new_layer(kv_cache, number, keys, values)
    layer.keys, layer.values = keys, values


def is_by_column(kv_cache: Any, states: Tensor, n_layers: int) -> bool:
    """Whether a K/V cache holds, in each layer, one column for each of the states (B, T, D), and layers are alike."""
    layers = kv_cache.layers
    if len(layers) != n_layers or any(layer.keys is None for layer in layers):
        return False
    shapes = {(layer.keys.shape, layer.values.shape) for layer in layers}
    has_rows = len(shapes) == 1 and len(layers[0].keys) == len(states)
    return has_rows and all(layer.get_seq_length() == states.shape[1] for layer in layers)


def empty(kv_cache: Any) -> None:
    """Empty a K/V cache that `fill` may have filled."""
    for layer in kv_cache.layers:
        if isinstance(vars(layer).get("update"), _Joining):
            del layer.update
    kv_cache.reset()


def join(pieces: Pieces) -> Tensor:
    """Concatenate tensors to (..., C, D). A single tensor is not copied."""
    return torch.cat(list(pieces), dim=-2) if len(pieces) > 1 else pieces[0]


class _Joining:
    """Replaces a layer's `update` for one call, which joins the blocks and the new columns.

    A class rather than a closure, so that copying the layer copies it too.
    """

    def __init__(self, layer: Any, keys: Pieces, values: Pieces) -> None:
        self._layer = layer
        self._keys = keys
        self._values = values

    def __call__(self, new_keys: Tensor, new_values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = self._layer
        layer.keys, layer.values = join([*self._keys, new_keys]), join([*self._values, new_values])
        del layer.update
        return layer.keys, layer.values


def _takes_at_once(kv_cache: Any, number: int) -> bool:
    """Whether a layer must be filled at once: it is preallocated, or the caller replaced its `update`."""
    layers = kv_cache.layers
    return number < len(layers) and (layers[number].get_max_length() >= 0 or "update" in vars(layers[number]))


def _new_layer(kv_cache: Any, number: int, keys: Tensor, values: Tensor) -> Any:
    """Create an empty layer for K/V like these, with its dtype set, and return it."""
    kv_cache.update(_placeholder(keys, 0), _placeholder(values, 0), number)
    return kv_cache.layers[number]


def _placeholder(like: Tensor, n_columns: int) -> Tensor:
    """Return a tensor of `n_columns` columns that takes no memory; it only shows the length."""
    return _zeros((*like.shape[:-2], n_columns, like.shape[-1]), like.dtype, like.device)


@lru_cache(maxsize=8)  # shared by all layers of a call
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros expanded from one element; never modified."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


def last_states(output: Any) -> Tensor | None:
    """Return the last states (B, T, D) of an output that has only these and K/V; None for other outputs."""
    if isinstance(output, Mapping):
        return output[STATES] if STATES in output and set(output) <= {STATES, CACHE} else None
    return output[0] if isinstance(output, tuple) and 1 <= len(output) <= 2 else None


def with_states(output: Any, states: Tensor) -> Any:
    """Return the output with other last states (B, T, D)."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output[STATES] = states
    return output


def with_cache(output: Any, kv_cache: Any) -> Any:
    """Return an output of states and K/V with another K/V cache."""
    if isinstance(output, tuple):
        return (output[0], kv_cache)
    output[CACHE] = kv_cache
    return output


def names_of(output: Any) -> tuple[str, ...]:
    """Return the names of what an output of states and K/V has, in order."""
    return (STATES, CACHE)[: len(output)] if isinstance(output, tuple) else tuple(output)


def make_output(of: type, names: Sequence[str], states: Tensor, kv_cache: Any) -> Any:
    """Return an output of a class, with these names, of states and a K/V cache."""
    made = {STATES: states}
    if len(names) > 1:  # in a save of another version of transformers, the K/V cache may have another name
        made[CACHE] = kv_cache
    return tuple(made.values()) if of is tuple else of(**made)
