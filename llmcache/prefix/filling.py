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
    """Layer by layer, the first columns of a batch.

    Args:
        parts: By row, what its blocks hold: (L, ..., c, D) each.
        columns: By row, those that its blocks fill; others, and those of other rows, get zeros.
        shape: (B, C).
        device: Of the batch.
    """
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
    """Fill a layer of an empty K/V cache: the next call of the model finds C columns there.

    Args:
        kv_cache: A `DynamicCache` or `StaticCache`.
        number: Of the layer, as many as the cache has layers with columns already.
        keys: Of the layer.
        values: Of the layer.
    """
    none = (keys[0][..., :0, :], values[0][..., :0, :])
    kv_cache.update(*none, number)  # makes the layer, where caches make them as they are used
    layer = kv_cache.layers[number]
    if layer.get_max_length() >= 0:  # it was allocated as a whole, so nothing is copied again
        kv_cache.update(join(keys), join(values), number)
        return

    def update(new_keys: Tensor, new_values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What the layer's own would do, with the blocks in place of what it holds; this once."""
        del layer.update
        layer.keys, layer.values = join([*keys, new_keys]), join([*values, new_values])
        return layer.keys, layer.values

    layer.keys, layer.values = _room(keys), _room(values)
    layer.update = update


def empty(kv_cache: Any) -> None:
    """Make a K/V cache forget what `fill` put there, and what came after."""
    for layer in kv_cache.layers:
        layer.__dict__.pop("update", None)
    kv_cache.reset()


def join(pieces: Pieces) -> Tensor:
    """Tensors side by side, (..., C, D); one alone is not copied."""
    return torch.cat(list(pieces), dim=-2) if len(pieces) > 1 else pieces[0]


def _room(pieces: Pieces) -> Tensor:
    """A tensor of their joined size that takes no memory, for whoever asks how many columns are held."""
    first = pieces[0]
    return first.new_zeros(()).expand(*first.shape[:-2], sum(piece.shape[-2] for piece in pieces), first.shape[-1])
