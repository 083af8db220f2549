"""Lays tensors of blocks out as a batch has them, and puts K/V into caches of transformers.

A cache that grows (`DynamicLayer`) copies all it holds at each update. Were blocks put there at once, they would be
copied to lie side by side, again to be put in, and again when the trunk brings its new columns. So such a layer is only
told how many columns it holds; blocks are joined with the new columns, in one copy, when these are there.

Sizes: B rows, C columns that blocks fill, c of them a block, L layers, H K/V heads, D_h or D width.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    layer = _made(kv_cache, number, keys[0], values[0])
    layer.keys, layer.values = _room(keys), _room(values)
    layer.update = _Joining(layer, keys, values)


def put(kv_cache: Any, number: int, keys: Tensor, values: Tensor) -> None:
    """Fill a layer of an empty K/V cache with all columns of a call (B, H, T, D_h); the tensors are given away."""
    if _takes_at_once(kv_cache, number):
        kv_cache.update(keys, values, number)
        return
    layer = _made(kv_cache, number, keys, values)
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


def _made(kv_cache: Any, number: int, keys: Tensor, values: Tensor) -> Any:
    """A layer that is made, knows its dtype, and holds nothing yet."""
    kv_cache.update(keys[..., :0, :], values[..., :0, :], number)
    return kv_cache.layers[number]


def _room(pieces: Pieces) -> Tensor:
    """A tensor of their joined size that takes no memory, for whoever asks how many columns are held."""
    first = pieces[0]
    return first.new_zeros(()).expand(*first.shape[:-2], sum(piece.shape[-2] for piece in pieces), first.shape[-1])
