"""Entries as values of a store: one a request and layer, under the request's exact key."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from llmcache.banks.entry import Entry
from llmcache.banks.kv import is_held
from llmcache.banks.memory import copy_owned
from llmcache.banks.records import SavedRequest, StoredRequest
from llmcache.banks.stores.seal import Opened
from llmcache.banks.tier import Tier
from llmcache.request.rows import Row, Scope


class EntryTier:
    """What banks ask of a tier. Thread-safe."""

    def __init__(self, tier: Tier) -> None:
        """Keep entries of one cache beyond its memory."""
        self._tier = tier

    def generation(self, scope: Scope) -> int:
        return self._tier.generation(scope.namespace)

    def put(self, key: str, request: StoredRequest, entries: Mapping[int, Entry], generation: int) -> None:
        """Have entries of a request written, by layer."""
        about = {
            "ids": request.ids.hex(),
            "dtype": str(request.dtype).removeprefix("torch."),
            "layout": request.layout.hex(),
        }
        for layer, entry in entries.items():
            self._tier.put(request.scope, _name(key, layer, is_held(entry)), entry.tensors, about, generation)

    def fetch(self, scope: Scope, rows: Sequence[Row], layers: Sequence[int], with_kv: bool) -> Iterator[SavedRequest]:
        """What the store has of requests that it pays to read."""
        paying = [row for row in rows if self._tier.break_even.pays(row.n_valid)]
        names = [_name(row.key, layer, with_kv) for row in paying for layer in layers]
        values = self._tier.fetch(scope, names, sum(row.n_valid for row in paying))
        for row in paying:
            found = {layer: value for layer, value in ((layer, next(values)) for layer in layers) if value is not None}
            about = [value.about for value in found.values()]
            if not found or about[-1]["ids"] != row.ids.hex():
                continue
            layout, dtype = about[-1]["layout"], getattr(torch, about[-1]["dtype"])
            # Padding of two layouts must not be taken for one: of each layer the store keeps the first that came.
            entries = {n: _copied(value) for n, value in found.items() if value.about["layout"] == layout}
            yield SavedRequest(row.key, scope, row.ids, dtype, entries, (), layout=bytes.fromhex(layout))


def _copied(value: Opened) -> Entry:
    """An entry that hangs on no file."""
    return Entry({name: copy_owned(tensor, tensor.device) for name, tensor in value.tensors.items()})


def _name(key: str, layer: int, with_kv: bool) -> str:
    """Those that came without K/V are values of their own: calls that need it have no use for them."""
    return f"e{layer}{'k' * with_kv}.{key}"
