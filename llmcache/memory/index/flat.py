"""Exact, exhaustive search over floats or bits; for many rows, FAISS's inverted file.

N: rows, B: queries, F: dimensions, k: neighbours per query.
"""

from contextlib import suppress
from functools import cache
from math import isfinite
from threading import Thread
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcache.memory.index.base import Index, check_ids, check_least, check_query, no_rows
from llmcache.support.arrays import Floats, Ids

_READ = 16  # a search reads one in 16 lists
_GROWTH = 4  # an inverted file is rebuilt once it has 4 times the rows it was made from


@cache
def load_faiss() -> Any:
    """Return the faiss module, untyped since its stubs are incomplete. Imported on first use, since that is slow."""
    import faiss

    return faiss


def in_one_thread(search: Any, x: NDArray[Any], *arguments: Any) -> Any:
    """Call a FAISS search; for a single query on one thread, which avoids waiting for idle OpenMP threads."""
    faiss = load_faiss()
    if len(x) > 1:
        return search(x, *arguments)
    n_threads = faiss.omp_get_max_threads()  # a setting of the calling thread
    faiss.omp_set_num_threads(1)
    try:
        return search(x, *arguments)
    finally:
        faiss.omp_set_num_threads(n_threads)


class FlatIndex(Index):
    """Inner product with every row: exact, in time proportional to the number of rows.

    Rows are dense in one array, which FAISS searches in place. A known id is overwritten in its slot; removing an id
    moves the last row into its slot. So both are O(1), and no search skips a slot.
    """

    _dtype: ClassVar[type[np.generic]] = np.float32

    def __init__(self, dim: int) -> None:
        check_least(dim=dim)
        self.dim = dim
        self._slot_of: dict[int, int] = {}
        self._ids: Ids = np.empty(0, np.int64)  # by slot, with spare room at the end
        self._rows: NDArray[Any] = self._encode(np.empty((0, dim), np.float32))

    def add(self, ids: Ids, x: Floats) -> None:
        check_ids(ids, x, self.dim)
        names = ids.tolist()
        n = len(self._slot_of) + len({*names} - self._slot_of.keys())
        if n > len(self._ids):  # first: if memory runs out, no id points beyond the rows
            room = max(64, n + n // 4) - len(self._ids)
            rows = np.concatenate([self._rows, np.empty((room, self._rows.shape[1]), self._dtype)])
            self._ids, self._rows = np.concatenate([self._ids, np.empty(room, np.int64)]), rows
        for name, row in zip(names, self._encode(x), strict=True):
            slot = self._slot_of.setdefault(name, len(self._slot_of))
            self._ids[slot], self._rows[slot] = name, row

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        if x.dtype != np.float32 or x.shape[1:] != (self.dim,) or k < 1 or not isfinite(np.add.reduce(x, axis=None)):
            check_query(x, self.dim, k)  # raises with the cause
        n = len(self._slot_of)
        if not n or not len(x):
            return no_rows(len(x), min(k, n))
        similarity, slots = self._find(x, self._rows[:n], min(k, n))
        return self._ids[slots], similarity

    def vectors(self, ids: Ids) -> Floats:
        return self._decode(self._rows[[self._slot_of[name] for name in ids.tolist()]])

    def remove(self, ids: Ids) -> None:
        for name in ids.tolist():
            hole = self._slot_of.pop(name, None)
            last = len(self._slot_of)
            if hole is not None and hole != last:
                self._rows[hole], self._ids[hole] = self._rows[last], self._ids[last]
                self._slot_of[int(self._ids[last])] = hole

    def ids(self) -> Ids:
        return self._ids[: len(self)].copy()

    def __contains__(self, name: int) -> bool:
        return name in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def nbytes(self) -> int:
        return len(self) * int(self._rows.shape[1] * self._rows.itemsize + self._ids.itemsize)

    # Overridden for other kinds of rows.

    def _encode(self, x: Floats) -> NDArray[Any]:
        return x

    def _decode(self, rows: NDArray[Any]) -> Floats:
        return rows.reshape(-1, self.dim)

    def _find(self, x: NDArray[Any], rows: NDArray[Any], k: int) -> tuple[Floats, Ids]:
        faiss = load_faiss()
        nearest: tuple[Floats, Ids] = in_one_thread(faiss.knn, x, rows, k, faiss.METRIC_INNER_PRODUCT)
        return nearest


class BinaryIndex(FlatIndex):
    """One bit per dimension, for fingerprints whose entries are +1/sqrt(F) or -1/sqrt(F), such as SimHash.

    Exact for these: the similarity, 1 - 2 * (differing bits) / F, is their inner product. For other rows only the signs
    count (zero as negative). 32 times smaller than `FlatIndex` and otherwise the same.
    """

    _dtype: ClassVar[type[np.generic]] = np.uint8

    def __init__(self, dim: int) -> None:
        if dim < 1 or dim % 8:
            raise ValueError(f"dim must be a positive multiple of 8, got {dim}")
        super().__init__(dim)

    def _encode(self, x: Floats) -> NDArray[Any]:
        return np.packbits(x > 0, axis=1)

    def _decode(self, rows: NDArray[Any]) -> Floats:
        bits = np.unpackbits(rows.reshape(-1, self.dim // 8), axis=1)
        signs: Floats = ((2 * bits.astype(np.float32) - 1) / np.sqrt(self.dim)).astype(np.float32)
        return signs

    def _find(self, x: NDArray[Any], rows: NDArray[Any], k: int) -> tuple[Floats, Ids]:
        n_different, slots = in_one_thread(load_faiss().knn_hamming, self._encode(x), rows, k)
        return (1 - 2 * n_different / self.dim).astype(np.float32), slots


class AutoIndex(Index):
    """`flat` up to `switch` rows; beyond, an inverted file: time grows with the square root of the rows.

    A thread builds the file from a copy of the rows. Until it is built and updated with later changes, searches use the
    old structure, so no call waits. Below an eighth of `switch` rows the index is flat again. Similarities are exact; a
    search misses neighbours in lists that it does not read.
    """

    def __init__(self, dim: int, switch: int = 32768, probes: int = 16) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            switch: Most rows that are searched exhaustively, at least 1.
            probes: Fewest lists that a search reads, at least 1. More lists miss fewer neighbours and take longer.
        """
        check_least(dim=dim, switch=switch, probes=probes)
        self.dim, self._switch, self._probes = dim, switch, probes
        self._rows: FlatIndex | InvertedFile = FlatIndex(dim)
        self._most = switch  # rows beyond which a new structure is built
        self._build: Thread | None = None
        self._built: InvertedFile | None = None  # by that thread
        self._missed: set[int] = set()  # ids added or removed since its copy was made

    def add(self, ids: Ids, x: Floats) -> None:
        check_ids(ids, x, self.dim)
        self._adopt_build()
        self._rows.add(ids, x)
        if self._build is not None:
            self._missed.update(ids.tolist())
        elif len(self) > self._most:
            held = self._rows.ids()
            self._build = Thread(target=self._make_file, args=(held, self._rows.vectors(held)), name="llmcache-index")
            self._build.start()

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        self._adopt_build()
        return self._rows.search(x, k)

    def vectors(self, ids: Ids) -> Floats:
        return self._rows.vectors(ids)

    def remove(self, ids: Ids) -> None:
        self._adopt_build()
        self._rows.remove(ids)
        if self._build is not None:
            self._missed.update(ids.tolist())
        elif isinstance(self._rows, InvertedFile) and len(self) < self._switch // 8:
            flat, held = FlatIndex(self.dim), self._rows.ids()
            flat.add(held, self._rows.vectors(held))
            self._rows, self._most = flat, self._switch

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def _adopt_build(self) -> None:
        """If the thread has built a file, apply later changes to it and use it."""
        if self._build is None or self._build.is_alive():
            return
        self._build, self._most = None, _GROWTH * len(self)
        file, missed = self._built, np.array([*self._missed], np.int64)
        self._built, self._missed = None, set()
        if file is not None:  # None: memory ran out, or the process was forked
            file.remove(missed)
            again = missed[[name in self._rows for name in missed.tolist()]]
            file.add(again, self._rows.vectors(again))
            self._rows = file

    def _make_file(self, ids: Ids, x: Floats) -> None:
        """Build an inverted file of rows (N, F), in a thread."""
        load_faiss().omp_set_num_threads(1)  # for this thread only: other cores compute the model
        with suppress(MemoryError, RuntimeError):  # FAISS raises RuntimeError; searches keep the old structure
            self._built = InvertedFile(ids, x, self._probes)


class InvertedFile(Index):
    """FAISS's `IndexIVFFlat`: lists of similar rows, each with a k-means centroid."""

    def __init__(self, ids: Ids, x: Floats, probes: int) -> None:
        """Cluster rows (N, F) and add them."""
        faiss = load_faiss()
        self.dim = int(x.shape[1])
        n_lists, metric = max(1, int(4 * len(x) ** 0.5)), faiss.METRIC_INNER_PRODUCT
        self._faiss: Any = faiss.IndexIVFFlat(faiss.IndexFlatIP(self.dim), self.dim, n_lists, metric)
        self._faiss.cp.min_points_per_centroid = 1  # no warning on stderr
        self._faiss.cp.max_points_per_centroid = 40
        self._faiss.nprobe = max(probes, n_lists // _READ)
        self._faiss.train(x)
        self._faiss.set_direct_map_type(faiss.DirectMap.Hashtable)
        self._held: set[int] = set()
        self.add(ids, x)

    def add(self, ids: Ids, x: Floats) -> None:
        self.remove(ids)
        last = {name: i for i, name in enumerate(ids.tolist())}
        if len(last) < len(ids):
            ids, x = ids[[*last.values()]], x[[*last.values()]]
        if len(ids):
            self._faiss.add_with_ids(x, ids)
            self._held.update(ids.tolist())

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_query(x, self.dim, k)
        width = min(k, len(self))
        if not width or not len(x):
            return no_rows(len(x), width)
        similarity, ids = in_one_thread(self._faiss.search, x, width)
        return ids, np.where(ids < 0, np.float32(-np.inf), similarity)

    def vectors(self, ids: Ids) -> Floats:
        rows = np.empty((len(ids), self.dim), np.float32)
        for row, name in zip(rows, ids.tolist(), strict=True):
            if name not in self._held:
                raise KeyError(name)
            self._faiss.reconstruct(name, row)
        return rows

    def remove(self, ids: Ids) -> None:
        gone = self._held.intersection(ids.tolist())
        if gone:
            self._faiss.remove_ids(load_faiss().IDSelectorArray(np.array([*gone], np.int64)))
            self._held -= gone

    def ids(self) -> Ids:
        return np.array([*self._held], np.int64)

    def __contains__(self, name: int) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        return len(self) * (4 * self.dim + 24) + 4 * self.dim * int(self._faiss.nlist)
