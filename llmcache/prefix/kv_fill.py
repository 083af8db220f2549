"""Lays tensors of blocks out as a batch has them, and puts K/V into caches of transformers.

A cache that grows (`DynamicLayer`) copies all it holds at each update. Were blocks put there at once, they would be
copied to lie side by side, again to be put in, and again when the trunk brings its new columns. So such a layer is only
told how many columns it holds; blocks are joined with the new columns, in one copy, when these are there.

Sizes: B rows, C columns that blocks fill, c of them a block, L layers, H K/V heads, D_h or D width.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Tensors (B, ..., c, D) that make (B, ..., C, D) if they are joined.
Pieces = Sequence[Tensor]


def lay(
    parts: Mapping[int, Sequence[Tensor]], columns: Mapping[int, slice], shape: tuple[int, int], device: torch.device
) -> Iterator[Pieces]:
    """Layer by layer, the first C columns of a batch: what blocks hold of rows (L, ..., c, D), else zeros."""
    if shape[0] == 1 and columns == {0: slice(0, shape[1])}:  # nothing beside it, so it need not be copied
        yield from zip(*(part[:, None].to(device).unbind(0) for part in parts[0]), strict=True)
        return
    sample = next(iter(parts.values()))[0]
    for layer in range(len(sample)):
        whole = sample.new_zeros((shape[0], *sample.shape[1:-2], shape[1], sample.shape[-1]), device=device)
        for row, tensors in parts.items():
            whole[row, ..., columns[row], :] = join([tensor[layer] for tensor in tensors]).to(device)
        yield [whole]


def fill(kv_cache: Any, number: int, keys: Pieces, values: Pieces) -> None:
    """Fill a layer of an empty K/V cache, one after the other: the next call of the model finds C columns there."""
    if _takes_at_once(kv_cache, number):
        kv_cache.update(join(keys), join(values), number)
        return
    n_columns = sum(piece.shape[-2] for piece in keys)
    layer = _made(kv_cache, number, _room(keys[0], 0), _room(values[0], 0))
    layer.keys, layer.values = _room(keys[0], n_columns), _room(values[0], n_columns)
    layer.update = _Joining(layer, keys, values)


def put(kv_cache: Any, number: int, keys: Tensor, values: Tensor) -> None:
    """Fill a layer of an empty K/V cache with all columns of a call (B, H, T, D_h); the tensors are given away."""
    if _takes_at_once(kv_cache, number):
        kv_cache.update(keys, values, number)
        return
    layer = _made(kv_cache, number, _room(keys, 0), _room(values, 0))
    layer.keys, layer.values = keys, values


def empty(kv_cache: Any) -> None:
    """Make a K/V cache forget what `fill` put there, and what came after."""
    for layer in kv_cache.layers:
        if isinstance(vars(layer).get("update"), _Joining):
            del layer.update
    kv_cache.reset()


def join(pieces: Pieces) -> Tensor:
    """Tensors side by side, (..., C, D); one alone is not copied."""
    return torch.cat(list(pieces), dim=-2) if len(pieces) > 1 else pieces[0]


class _Joining:
    """Stands in for a layer's `update`, once: does what it would, with the blocks in place of what the layer holds.

    No closure, so that a copy of the layer gets one for itself.
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
    """Whether a layer was allocated as a whole, or somebody's own `update` hangs on it, who is to see all columns."""
    layers = kv_cache.layers
    return number < len(layers) and (layers[number].get_max_length() >= 0 or "update" in vars(layers[number]))


def _made(kv_cache: Any, number: int, no_keys: Tensor, no_values: Tensor) -> Any:
    """A layer that is made, knows its dtype, and holds nothing yet."""
    kv_cache.update(no_keys, no_values, number)
    return kv_cache.layers[number]


def _room(like: Tensor, n_columns: int) -> Tensor:
    """A tensor of so many columns that takes no memory, for whoever asks how many are held."""
    return _zeros((*like.shape[:-2], n_columns, like.shape[-1]), like.dtype, like.device)


@lru_cache(maxsize=8)  # that of one layer does for all of a call
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the memory of one, which nobody writes to."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
