"""(3) Matching: the index of fingerprints, partitioned, and where each request is found in it.

Sizes: B rows, F0 features, F fingerprint width.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np

from llmcache.arrays import Floats
from llmcache.fingerprint import Fingerprint
from llmcache.index import Index
from llmcache.matching.partition import IndexPartition, IndexSlot, Neighbour
from llmcache.request.rows import Row, Scope

_AT_ONCE = 4096  # vectors that are copied at a time while a saved cache is read


class FingerprintIndex(dict[tuple[Scope, int, int | None], IndexPartition]):
    """Partitions by scope, length (0: not kept apart) and layer (None: all at once). The caller holds a lock."""

    def __init__(
        self,
        fingerprint: Fingerprint | None,
        make_index: Callable[[int], Index] | None,
        held: Callable[[str], Collection[int]],
        by_length: bool,
        by_layer: bool,
    ) -> None:
        """Start empty; `held` tells the layers whose bank holds a state of a request. See `CacheBanks` for the rest."""
        super().__init__()
        self.fingerprint = fingerprint
        self.make_index = make_index
        self.by_layer = by_layer
        self._held = held
        self._by_length = by_length
        self._waiting: dict[str, tuple[Scope, Row, Floats]] = {}  # until the fingerprint is fitted
        # By key: partition and slot, in turn. Flat, since a pair of its own would take 70 bytes a request.
        self._found_at: dict[str, tuple[Any, ...]] = {}

    def search(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, k: int, layer: int | None
    ) -> list[list[Neighbour]]:
        """The k nearest requests of the scope for each row, best first, by fingerprints (B, F)."""
        lengths = [self._length(row) for row in rows]
        found: list[list[Neighbour]] = [[] for _ in rows]
        for length in set(lengths):  # one search unless lengths are kept apart
            partition = self.get((scope, length, layer))
            if partition is None or len(partition) == 0:
                continue
            members = [i for i, other in enumerate(lengths) if other == length]
            for i, near in zip(members, partition.search(vectors[members], k), strict=True):
                found[i] = near
        return found

    def put(
        self,
        scope: Scope,
        row: Row,
        features: Floats | None,
        vectors: Mapping[int, Floats] | None,
        layers: Collection[int],
    ) -> None:
        """Make a request findable, at once or when the fingerprint was fitted; see `CacheBanks.put`."""
        if not vectors:
            if features is None:
                return
            assert self.fingerprint is not None
            if needed := self.fingerprint.n_fit:
                self._waiting[row.key] = (scope, row, features)
                if len(self._waiting) >= needed:
                    self._fit()
                return
            vectors = dict.fromkeys(layers, self.fingerprint.project(features[None])[0])
        length = self._length(row)
        slots = [IndexSlot(layer, length, vectors[layer]) for layer in layers if layer in vectors]
        for slot in slots if self.by_layer else [IndexSlot(None, length, next(iter(vectors.values())))]:
            self.insert(row.key, scope, slot)

    def insert(self, key: str, scope: Scope, slot: IndexSlot) -> None:
        """Put a request into its partition; where it is there already, its fingerprint is replaced."""
        for partition, number in self._pairs(key):
            if partition.layer == slot.layer:
                partition.replace(number, slot.vector)
                return
        into = self._open((scope, slot.length, slot.layer), len(slot.vector))
        self._found_at[key] = (*self._found_at.get(key, ()), into, into.add(key, slot.vector))

    def insert_all(self, requests: Iterable[tuple[str, Scope, IndexSlot]]) -> None:
        """Put requests that are found nowhere yet into their partitions, each in the order given: many at a time."""
        by_name: dict[tuple[Scope, int, int | None], list[tuple[str, Floats]]] = {}
        for key, scope, slot in requests:
            by_name.setdefault((scope, slot.length, slot.layer), []).append((key, slot.vector))
        for name, some in by_name.items():
            for start in range(0, len(some), _AT_ONCE):
                keys, vectors = zip(*some[start : start + _AT_ONCE], strict=True)
                into = self._open(name, len(vectors[0]))
                for key, number in zip(keys, into.add_all(keys, np.stack(vectors)), strict=True):
                    self._found_at[key] = (*self._found_at.get(key, ()), into, number)

    def finds(self, key: str) -> bool:
        """Whether a request is found anywhere."""
        return bool(self._found_at.get(key))

    def slots(self, key: str) -> tuple[IndexSlot, ...]:
        """Where a request is found, for saving; empty while it waits for the fingerprint to be fitted."""
        return tuple(
            IndexSlot(partition.layer, partition.length, partition.vector(number), number)
            for partition, number in self._pairs(key)
        )

    def leave(self, key: str, layer: int) -> None:
        """Remove a request where this layer is searched by itself."""
        pairs = self._pairs(key)
        gone = [(partition, number) for partition, number in pairs if partition.layer == layer]
        if gone:
            self._found_at[key] = tuple(chain.from_iterable(pair for pair in pairs if pair not in gone))
        for partition, number in gone:
            self._remove(partition, number)

    def forget(self, key: str) -> None:
        """Remove a request everywhere. If one partition fails, the others let go all the same."""
        self._waiting.pop(key, None)
        pairs = self._pairs(key)
        self._found_at.pop(key, None)
        with ExitStack() as stack:
            for partition, number in pairs:
                stack.callback(self._remove, partition, number)

    def use(self, fingerprint: Fingerprint | None) -> None:
        """Begin again, empty, with another fingerprint."""
        self.clear()
        self._waiting.clear()
        self._found_at.clear()
        self.fingerprint = fingerprint

    def purge(self, namespace: str) -> None:
        for name in [name for name in self if name[0].namespace == namespace]:
            del self[name]

    def _open(self, name: tuple[Scope, int, int | None], width: int) -> IndexPartition:
        """A partition, which is opened if need be."""
        assert self.make_index is not None
        if (partition := self.get(name)) is None:
            partition = self[name] = IndexPartition(*name, self.make_index(width))
        return partition

    def _fit(self) -> None:
        assert self.fingerprint is not None
        waiting, self._waiting = self._waiting, {}
        self.fingerprint.fit([features for _, _, features in waiting.values()])
        for scope, row, features in waiting.values():
            self.put(scope, row, features, None, self._held(row.key))

    def _length(self, row: Row) -> int:
        return row.n_valid if self._by_length else 0

    def _pairs(self, key: str) -> list[tuple[IndexPartition, int]]:
        flat = self._found_at.get(key, ())
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _remove(self, partition: IndexPartition, number: int) -> None:
        """Free a slot, and drop a partition that is empty then: scopes come and go with weights and tenants."""
        partition.remove(number)
        if len(partition) == 0:
            self.pop((partition.scope, partition.length, partition.layer), None)
