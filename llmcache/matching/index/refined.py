"""Search in two stages: sign bits, then exact products of the best. N: rows, B: queries, F: dimensions."""

import numpy as np

from llmcache.arrays import Floats, Ids, product
from llmcache.matching.index.base import Index
from llmcache.matching.index.binary import BinaryIndex
from llmcache.matching.index.flat import FlatIndex, check_k, check_rows


class RefinedIndex(Index):
    """Exhaustive over one bit a dimension, exact over the `candidates` that differ least in them.

    Up to `exact` rows every row is compared in full. Beyond that the signs of the rows, centred on the mean of those
    that were there when the number was first passed, are compared first: 32 times less memory to read, which is what a
    search costs when it runs between two forwards of a model and finds no row in the processor's cache. Similarities
    are exact; a neighbour is overlooked only if `candidates` other rows have nearer signs. Adding, overwriting and
    removing are O(1): nothing is ever rebuilt. Time still grows with the number of rows; past some 30,000 take `auto`.
    No call is safe beside another one: the caller holds a lock.
    """

    def __init__(self, dim: int, exact: int = 2048, candidates: int = 64) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            exact: Most rows that are all compared in full, at least 1.
            candidates: Rows a query that the second stage compares, at least 1. More overlook less.
        """
        for name, value in {"exact": exact, "candidates": candidates}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.dim = dim
        self._rows = FlatIndex(dim)
        self._bits = BinaryIndex(-(-dim // 8) * 8)
        self._centre: Floats | None = None
        self._exact = exact
        self._candidates = candidates

    def add(self, ids: Ids, x: Floats) -> None:
        self._rows.add(ids, x)
        if self._centre is not None:
            self._bits.add(ids, self._signs(x))
        elif len(self._rows) > self._exact:
            held, rows = self._rows.all()
            self._centre = rows.mean(axis=0)
            self._bits.add(held, self._signs(rows))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_rows(x, self.dim)
        check_k(k)
        width = min(k, len(self))
        if self._centre is None or len(self) <= max(self._exact, width):
            return self._rows.nearest(x, k)
        found, _ = self._bits.nearest(self._signs(x), max(width, self._candidates))
        ids, similarity = np.empty((len(x), width), np.int64), np.empty((len(x), width), np.float32)
        for i, candidates in enumerate(found):
            exactly = product(self._rows.vectors(candidates), x[i])
            best = np.argsort(-exactly, kind="stable")[:width]
            ids[i], similarity[i] = candidates[best], exactly[best]
        return ids, similarity

    def vectors(self, ids: Ids) -> Floats:
        return self._rows.vectors(ids)

    def remove(self, ids: Ids) -> None:
        self._bits.remove(ids)
        self._rows.remove(ids)

    def ids(self) -> Ids:
        """Ids held (N,), oldest first."""
        return self._rows.ids()

    def __contains__(self, name: int) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._bits.nbytes

    def _signs(self, x: Floats) -> Floats:
        """Centred rows, filled up with zeros to a whole number of bytes of bits."""
        assert self._centre is not None
        centred: Floats = x - self._centre
        missing = self._bits.dim - self.dim
        return np.pad(centred, ((0, 0), (0, missing))) if missing else centred
