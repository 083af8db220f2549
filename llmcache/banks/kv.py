"""K/V that an entry brings along: of the stored layer and of those below it down to the next stored one.

A reuse skips layers, and a decoder that is to go on needs the K/V of each of them. As the entries of one request take
up where the one below ends, those of all stored layers up to the one reused hold each layer's K/V once.

Sizes: S layers of an entry, H K/V heads, n valid tokens, D_h width of a head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcache.arrays import Positions
from llmcache.banks.compression.packer import Packer
from llmcache.banks.entry import Entry
from llmcache.banks.records import KV
from llmcache.request.rows import Row

PADDING = "padding_"  # begins the names of tensors of places that are not valid


def capture(
    kv_cache: Any, row: Row, layer: int, stored: Sequence[int], padding: Positions | None = None
) -> dict[str, Tensor]:
    """Copy `keys` and `values` (S, H, n, D_h) for the entry of a row at a layer, of the places of `padding` as well."""
    below = max((other for other in stored if other < layer), default=-1)
    skipped = kv_cache.layers[below + 1 : layer + 1]
    places = {"": row.valid} if padding is None else {"": row.valid, PADDING: padding}
    return {
        f"{what}{name}": torch.stack([getattr(each, name)[row.number][:, where] for each in skipped])
        for what, where in places.items()
        for name in ("keys", "values")
    }


def without_padding(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PADDING)}


def is_held(entry: Entry, what: str = "") -> bool:
    """Whether an entry came with K/V; with `PADDING`, with that of places that are not valid."""
    return f"{what}keys" in entry.tensors


def read(entries: Mapping[int, Entry], packers: Mapping[int, Packer], dtype: torch.dtype, what: str = "") -> KV:
    """K and V (H, n, D_h) by layer, put together from entries of one request; empty when one of them came without."""
    kv: KV = {}
    if not all(is_held(entry, what) for entry in entries.values()):
        return kv
    for stored, entry in entries.items():
        keys, values = (packers[stored].unpack_kv(f"{what}{name}", entry, dtype) for name in ("keys", "values"))
        first = stored + 1 - len(keys)
        kv |= {first + i: pair for i, pair in enumerate(zip(keys, values, strict=True))}
    return kv
