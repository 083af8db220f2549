"""K/V that an entry brings along: of the stored layer and of those below it down to the next stored one.

A reuse skips layers, and a decoder that is to go on needs the K/V of each of them. As the entries of one request take
up where the one below ends, those of all stored layers up to the one reused hold each layer's K/V once.

Sizes: S layers of an entry, H K/V heads, n valid tokens, D_h width of a head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcache.compression.packer import Packer
from llmcache.records import KV
from llmcache.rows import Row
from llmcache.stores import Entry


def capture(kv_cache: Any, row: Row, layer: int, stored: Sequence[int]) -> dict[str, Tensor]:
    """Copy `keys` and `values` (S, H, n, D_h) for the entry of a row at a layer.

    Args:
        kv_cache: The caller's K/V cache, filled up to this layer.
        row: The request.
        layer: The stored layer.
        stored: All stored layers.
    """
    below = max((other for other in stored if other < layer), default=-1)
    skipped = kv_cache.layers[below + 1 : layer + 1]
    return {
        "keys": torch.stack([each.keys[row.number][:, row.valid] for each in skipped]),
        "values": torch.stack([each.values[row.number][:, row.valid] for each in skipped]),
    }


def read(entries: Mapping[int, Entry | None], packers: Mapping[int, Packer], dtype: torch.dtype) -> KV | None:
    """K and V (H, n, D_h) by layer, put together from entries of one request.

    Args:
        entries: By stored layer; all that are needed.
        packers: What they were packed with, by layer.
        dtype: Of the states as the model made them.

    Returns:
        None when one of them is not held, or came without K/V.
    """
    kv: KV = {}
    for stored, entry in entries.items():
        if entry is None or "keys" not in entry.tensors:
            return None
        keys, values = (packers[stored].unpack(name, entry, dtype) for name in ("keys", "values"))
        first = stored + 1 - len(keys)
        kv |= {first + i: pair for i, pair in enumerate(zip(keys, values, strict=True))}
    return kv
