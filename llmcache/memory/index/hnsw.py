"""Approximate search in a graph (Malkov and Yashunin, 2016). N: rows, B: queries, F: dimensions."""

from typing import Any

import numpy as np

from llmcache.memory.index.base import Index, check_ids, check_least, check_query, no_rows
from llmcache.memory.index.flat import in_one_thread, load_faiss
from llmcache.support.arrays import Floats, Ids


class HNSWIndex(Index):
    """FAISS's `IndexHNSWFlat`, with tombstones.

    HNSW cannot remove: a removed or overwritten row stays in the graph as a tombstone, which searches traverse but do
    not return. When more rows are dead than alive, the graph is rebuilt from the live rows. That call takes as long as
    inserting them all again (some 10,000 rows per second and core).
    """

    def __init__(self, dim: int, M: int = 16, ef_construction: int = 40, ef_search: int = 64) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            M: Links per row and level, at least 2 (twice as many on the lowest level).
            ef_construction: Candidates of an insertion, at least 1.
            ef_search: Candidates of a search, at least 1. More candidates find more and take longer.
        """
        check_least(dim=dim, ef_construction=ef_construction, ef_search=ef_search)
        check_least(2, M=M)
        self.dim, self._ef_search = dim, ef_search
        self._faiss: Any = load_faiss().IndexHNSWFlat(dim, M, load_faiss().METRIC_INNER_PRODUCT)
        self._faiss.hnsw.efConstruction = ef_construction
        self._slot_of: dict[int, int] = {}
        self._ids: Ids = np.empty(0, np.int64)  # by slot, -1 for dead rows, with spare room at the end

    def add(self, ids: Ids, x: Floats) -> None:
        check_ids(ids, x, self.dim)
        self.remove(ids)
        last = {name: i for i, name in enumerate(ids.tolist())}
        first = self._faiss.ntotal
        if not last:
            return
        self._faiss.add(x[[*last.values()]])
        n = self._faiss.ntotal
        if n > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(n + n // 4 + 64 - len(self._ids), np.int64)])
        self._ids[first:n] = [*last]
        self._slot_of.update(zip(last, range(first, n), strict=True))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_query(x, self.dim, k)
        width, total = min(k, len(self)), self._faiss.ntotal
        if not width or not len(x):
            return no_rows(len(x), width)
        options = load_faiss().SearchParametersHNSW()
        if total > len(self):
            is_alive = np.packbits(self._ids[:total] >= 0, bitorder="little")
            options.sel = load_faiss().IDSelectorBitmap(is_alive)
        # Tombstones use up candidates, so their number is scaled by all rows over live rows.
        options.efSearch = max(width, self._ef_search) * total // len(self)
        while True:
            similarity, slots = in_one_thread(lambda x: self._faiss.search(x, width, params=options), x)
            if total == len(self) or options.efSearch >= total or (slots >= 0).all():
                break
            options.efSearch *= 4  # too many rows near the query are dead
        ids = np.where(slots < 0, -1, self._ids[slots])
        return ids, np.where(ids < 0, np.float32(-np.inf), similarity)

    def vectors(self, ids: Ids) -> Floats:
        slots = np.array([self._slot_of[name] for name in ids.tolist()], np.int64)
        return self._faiss.reconstruct_batch(slots) if len(slots) else np.empty((0, self.dim), np.float32)

    def remove(self, ids: Ids) -> None:
        for name in ids.tolist():
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._ids[slot] = -1
        if self._faiss.ntotal > 2 * len(self):
            living = np.array([*self._slot_of], np.int64)
            rows = self.vectors(living)
            self._faiss.reset()
            self._slot_of.clear()
            self.add(living, rows)

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def nbytes(self) -> int:
        n, n_links = int(self._faiss.ntotal), int(self._faiss.hnsw.neighbors.size())
        return 4 * n_links + n * (4 * self.dim + 12 + self._ids.itemsize)
