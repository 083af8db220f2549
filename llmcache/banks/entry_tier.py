"""Entries as values of a store: one a request and layer, under the request's exact key; and who else may find them.

A request that others may find is announced: its fingerprint, its answer, and by which fingerprint these are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from llmcache.banks.entry import Entry
from llmcache.banks.kv import is_held
from llmcache.banks.records import SavedRequest, StoredRequest
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.matching.partition import IndexSlot
from llmcache.request.rows import Scope


class Wanted(NamedTuple):
    """A request whose entries are asked for."""

    key: str
    ids: bytes  # packed
    n_tokens: int  # of computing that its entries save


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
            "dtype": _dtype_name(request.dtype),
            "layout": request.layout.hex(),
        }
        for layer, entry in entries.items():
            self._tier.put(request.scope, _name(key, layer, is_held(entry)), entry.tensors, about, generation)

    def offer_again(self, key: str, request: StoredRequest, entries: Mapping[int, Entry]) -> bool:
        """Have entries written that were dropped when they were put; whether there were any."""
        if not self._tier.has_dropped:
            return False
        scope = request.scope
        lacking = {n: one for n, one in entries.items() if self._tier.lacks(scope, _name(key, n, is_held(one)))}
        if lacking:
            self.put(key, request, lacking, self.generation(scope))
        return bool(lacking)

    def fetch(
        self, scope: Scope, wanted: Sequence[Wanted], layers: Sequence[int], with_kv: bool
    ) -> Iterator[SavedRequest]:
        """What the store has of requests."""
        names = [_name(one.key, layer, with_kv) for one in wanted for layer in layers]
        values = self._tier.fetch(scope, names, sum(one.n_tokens for one in wanted))
        for one in wanted:
            found = {layer: value for layer, value in ((layer, next(values)) for layer in layers) if value is not None}
            about = [value.about for value in found.values()]
            if not found or about[-1]["ids"] != one.ids.hex():
                continue
            layout, dtype = about[-1]["layout"], getattr(torch, about[-1]["dtype"])
            # Padding of two layouts must not be taken for one: of each layer the store keeps the first that came.
            entries = {n: Entry(value.tensors) for n, value in found.items() if value.about["layout"] == layout}
            yield SavedRequest(one.key, scope, one.ids, dtype, entries, (), layout=bytes.fromhex(layout))

    def paying(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those of requests whose entries it pays to read for one request."""
        return [one for one in wanted if self._tier.break_even.pays(one.n_tokens)]

    @property
    def is_answering(self) -> bool:
        """Whether what was not fetched just now is not there."""
        return self._tier.is_answering

    def announce(self, key: str, request: StoredRequest, slot: IndexSlot, compared_by: str, generation: int) -> None:
        """Have others find a request, whose entries were put before, by its place in the index."""
        arrays = {"vector": slot.vector, "answer": request.answer}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if array is not None}
        tensors["ids"] = torch.frombuffer(bytearray(request.ids), dtype=torch.uint8)
        scope = request.scope
        about = {
            "scope": [scope.weights, scope.dtype, scope.attention],
            "dtype": _dtype_name(request.dtype),
            "length": slot.length,
            "compared_by": compared_by,
        }
        self._tier.announce(scope, _found_name(key, compared_by), tensors, about, generation)

    def heard(self, at: StoreKey, note: Bytes, compared_by: str) -> SavedRequest | None:
        """A request that was announced, without its entries; None where it cannot be found here, or is no request."""
        key = request_of(at)
        if at.name != _found_name(key, compared_by) or (told := self._tier.opened(at, note)) is None:
            return None
        about, tensors = told.about, told.tensors
        try:
            scope, vector, answer = Scope(at.namespace, *about["scope"]), tensors["vector"], tensors.get("answer")
            if about["compared_by"] != compared_by or not (self._tier.is_of(scope, at) and vector.isfinite().all()):
                return None
            slots = (IndexSlot(None, int(about["length"]), vector.numpy().copy()),)
            ids, dtype = tensors["ids"].numpy().tobytes(), getattr(torch, about["dtype"])
        except (AttributeError, KeyError, TypeError, ValueError):  # without a secret, anybody may have made it
            return None
        return SavedRequest(key, scope, ids, dtype, {}, slots, None if answer is None else answer.numpy().copy())

    def hear_again(self) -> None:
        self._tier.hear_again()


def request_of(at: StoreKey) -> str:
    """The request that a value or announcement is about."""
    return at.name.rpartition(".")[2]


def _found_name(key: str, compared_by: str) -> str:
    return f"f{compared_by[:16]}.{key}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(key: str, layer: int, with_kv: bool) -> str:
    """Those that came without K/V are values of their own: calls that need it have no use for them."""
    return f"e{layer}{'k' * with_kv}.{key}"
