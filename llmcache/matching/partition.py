"""One partition of the fingerprint index: an index and the keys of its rows."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from llmcache.arrays import Floats
from llmcache.index import Index
from llmcache.request.rows import Scope


@dataclass(slots=True)
class Neighbour:
    """A stored request that a search found."""

    key: str
    similarity: float  # to the request that was searched for
    answer: Floats | None = None  # signature (S,), where that is known
    ids: bytes = b""  # packed
    is_quarantined: bool = False  # it serves no other request; it may vote


@dataclass(frozen=True, slots=True)
class IndexSlot:
    """Where a request is found."""

    layer: int | None  # the one that is searched; None: all at once
    length: int  # the one that is kept apart; 0: none is
    vector: Floats  # fingerprint (F,)
    slot: int = 0  # number in the partition: searches that are not exact depend on the order in which requests came


class IndexPartition:
    """One index and the keys of its rows. Requests in different partitions never find each other."""

    __slots__ = ("_free", "_index", "_keys", "_leaving", "layer", "length", "scope")

    def __init__(self, scope: Scope, length: int, layer: int | None, index: Index) -> None:
        """Start empty, for requests of one scope, one length (0: not kept apart) and one layer (None: all at once)."""
        self.scope = scope
        self.length = length
        self.layer = layer
        self._index = index
        self._keys: list[str | None] = []
        self._free: list[int] = []
        self._leaving: list[int] = []

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def add(self, key: str, vector: Floats) -> int:
        return self.add_all([key], vector[None])[0]

    def add_all(self, keys: Sequence[str], vectors: Floats) -> list[int]:
        """Add requests at once, by fingerprints (N, F); their slots, in the same order. If it fails, none is added."""
        reused = [self._free.pop() for _ in keys[: len(self._free)]]
        first = len(self._keys)
        slots = [*reused, *range(first, first + len(keys) - len(reused))]
        self._keys += [None] * (len(keys) - len(reused))
        try:
            self._index.add(np.array(slots), vectors)
        except BaseException:  # the index may hold some of the rows all the same
            self._leaving += slots
            with suppress(Exception):  # then they are removed with the next one
                self._remove_leaving()
            raise
        for slot, key in zip(slots, keys, strict=True):
            self._keys[slot] = key
        return slots

    def replace(self, slot: int, vector: Floats) -> None:
        """Put another vector (F,) in a slot that is taken."""
        self._index.add(np.array([slot]), vector[None])

    def remove(self, slot: int) -> None:
        self._keys[slot] = None  # first: a row that the index fails to remove must not be taken for a request
        self._leaving.append(slot)
        self._remove_leaving()

    def _remove_leaving(self) -> None:
        """Remove what is to leave, with what the index failed to remove before."""
        self._index.remove(np.array(self._leaving))
        self._free += self._leaving
        self._leaving.clear()

    def vector(self, slot: int) -> Floats:
        vector: Floats = self._index.vectors(np.array([slot]))[0]
        return vector

    def search(self, vectors: Floats, k: int) -> list[list[Neighbour]]:
        slots, similarity = self._index.search(vectors, k)
        return [
            [
                Neighbour(key, float(s))
                for slot, s in zip(*found, strict=True)
                if slot >= 0 and (key := self._keys[slot])
            ]
            for found in zip(slots, similarity, strict=True)
        ]
