"""Approximate search in a graph (Malkov and Yashunin, 2016). N: rows, B: queries, F: dimensions."""

from typing import Any

import numpy as np

from llmcache.arrays import Floats, Ids
from llmcache.matching.index.base import Index
from llmcache.matching.index.flat import FlatIndex


class HNSWIndex(Index):
    """A graph for the many, and beside it a flat buffer for the new.

    New rows wait in the buffer, which is searched exhaustively; once it holds more than `buffer` rows, the oldest
    move to the graph in blocks. Until then the search is exact. HNSW cannot remove:
    a row that was removed or overwritten stays in the graph as a tombstone, which searches skip, and when more than
    half are dead the graph is built anew from the living. That call takes as long as inserting them all again
    (some 10,000 rows a second and core); spread over the removals before it, each pays for one insertion.
    No call is safe beside another one: the caller holds a lock.
    """

    def __init__(
        self,
        dim: int,
        M: int = 16,
        ef_construction: int = 40,
        ef_search: int = 64,
        buffer: int = 2048,
        block: int = 100,
    ) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            M: Links a row and level, at least 2 (twice as many on the lowest level).
            ef_construction: Candidates looked at when a row is inserted.
            ef_search: Candidates looked at by a search: more find more, and take longer.
            buffer: Most rows that wait outside the graph.
            block: Rows that enter the graph at a time. faiss inserts up to 100 in one thread, more in all: faster on
                idle cores, but several times slower on busy ones, where its threads wait for each other.
        """
        options = {"M": (M, 2), "ef_construction": (ef_construction, 1), "ef_search": (ef_search, 1)}
        options |= {"buffer": (buffer, 0), "block": (block, 1)}
        for name, (value, least) in options.items():
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.dim = dim
        self._buffer = FlatIndex(dim)
        self._graph = Graph(dim, M, ef_construction, ef_search)
        self._max_waiting = buffer
        self._block = block

    def add(self, ids: Ids, x: Floats) -> None:
        self._buffer.add(ids, x)
        self._bury(ids)
        while len(self._buffer) > self._max_waiting:
            self._graph.add(*self._buffer.take(self._block))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        both = self._buffer.search(x, k), self._graph.search(x, k)
        ids = np.concatenate([found for found, _ in both], axis=1)
        similarity = np.concatenate([scores for _, scores in both], axis=1)
        best = np.argsort(-similarity, axis=1, kind="stable")[:, : min(k, len(self))]
        return np.take_along_axis(ids, best, 1), np.take_along_axis(similarity, best, 1)

    def vectors(self, ids: Ids) -> Floats:
        rows = [self._graph.row(name) if name in self._graph else self._buffer.vectors(ids[i : i + 1])[0]
                for i, name in enumerate(ids.tolist())]  # fmt: skip
        return np.array(rows, np.float32).reshape(len(ids), self.dim)

    def remove(self, ids: Ids) -> None:
        self._buffer.remove(ids)
        self._bury(ids)

    def __len__(self) -> int:
        return len(self._buffer) + len(self._graph)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes + self._graph.nbytes

    def _bury(self, ids: Ids) -> None:
        self._graph.bury(ids)
        if self._graph.n_dead > len(self._graph):
            living, rows = self._graph.drain()
            fits = len(living) + len(self._buffer) <= self._max_waiting
            (self._buffer if fits else self._graph).add(living, rows)


class Graph:
    """A faiss HNSW graph in which rows can die. Its slots are numbered as they come and never used again."""

    def __init__(self, dim: int, M: int, ef_construction: int, ef_search: int) -> None:
        """Take the options of `HNSWIndex`, which has checked them."""
        import faiss

        self._ef_search = ef_search
        self._faiss: Any = faiss.IndexHNSWFlat(dim, M, faiss.METRIC_INNER_PRODUCT)
        self._faiss.hnsw.efConstruction = ef_construction
        self._slot_of: dict[int, int] = {}
        self._ids: Ids = np.empty(0, np.int64)  # slot -> id, -1 where dead

    def add(self, ids: Ids, x: Floats) -> None:
        """Insert rows (N, F) whose ids (N,) are new here."""
        first = len(self._ids)
        self._faiss.add(x)
        self._ids = np.concatenate([self._ids, ids])
        self._slot_of.update(zip(ids.tolist(), range(first, len(self._ids)), strict=True))

    def bury(self, ids: Ids) -> None:
        """Leave a tombstone for each id (N,) that is here."""
        for name in ids.tolist():
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._ids[slot] = -1

    def __contains__(self, name: int) -> bool:
        return name in self._slot_of

    def row(self, name: int) -> Floats:
        row: Floats = self._faiss.reconstruct(self._slot_of[name])
        return row

    def drain(self) -> tuple[Ids, Floats]:
        """Empty the graph, and return the ids (N,) and rows (N, F) that lived in it."""
        slots = np.flatnonzero(self._ids >= 0)
        ids, rows = self._ids[slots], self._faiss.reconstruct_batch(slots)
        self._faiss.reset()
        self._slot_of.clear()
        self._ids = np.empty(0, np.int64)
        return ids, rows

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        """Find at least `k` living rows a query, if they can be reached; tombstones are id -1, similarity -inf."""
        k, total = min(k, len(self)), len(self._ids)
        if not k or not len(x):
            return np.empty((len(x), k), np.int64), np.empty((len(x), k), np.float32)
        # Tombstones take the place of candidates, so as many more are looked at as there are dead to the living.
        candidates = -(-self._ef_search * total // len(self))
        width = min(max(2 * k, self._ef_search), total) if self.n_dead else k
        while True:
            self._faiss.hnsw.efSearch = max(candidates, width)
            similarity, slots = self._faiss.search(x, width)
            ids = np.where(slots < 0, -1, self._ids[slots])
            is_full = (ids >= 0).sum(axis=1) >= k
            has_seen_all = (slots < 0).any(axis=1)  # all it can reach: asking for more would not help
            if width == total or (is_full | has_seen_all).all():
                return ids, np.where(ids < 0, np.float32(-np.inf), similarity)
            width = min(2 * width, total)

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def n_dead(self) -> int:
        return len(self._ids) - len(self._slot_of)

    @property
    def nbytes(self) -> int:
        links = 4 * int(self._faiss.hnsw.neighbors.size())
        return len(self._ids) * (4 * int(self._faiss.d) + 12 + self._ids.itemsize) + links
