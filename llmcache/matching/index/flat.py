"""Exhaustive search, exact. N: rows, B: queries, F: dimensions."""

from itertools import islice
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llmcache.arrays import Floats, Ids
from llmcache.matching.index.base import Index


class FlatIndex(Index):
    """Inner product with every row: exact, and the time of a search grows with the number of rows.

    Rows are dense. A known id is overwritten in its slot, through a view on faiss's own memory; removing one moves the
    last row into its place. So both are O(1), every slot is live, and no search has to skip any. Memory of removed
    rows is kept for later ones. A search by many threads is safe, a change beside it is not: the bank holds a lock.
    """

    _row_type: ClassVar[type[np.generic]] = np.float32

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self._slot_of: dict[int, int] = {}  # in order of arrival
        self._ids: Ids = np.empty(0, np.int64)  # slot -> id; spare room at the end
        self._faiss = self._open()
        self._view: npt.NDArray[Any] | None = None

    def add(self, ids: Ids, x: Floats) -> None:
        check_rows(x, self.dim)
        check_ids(ids, len(x))
        if not len(x):
            return
        names = ids.tolist()
        # Memory first: if it runs out, no id may already point past the rows held.
        self._resize(len(self) + len({name for name in names if name not in self._slot_of}))
        slots = [self._slot_of.setdefault(name, len(self._slot_of)) for name in names]
        self._ids[slots] = ids
        self._codes()[slots] = self._encode(x)

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_rows(x, self.dim)
        check_k(k)
        return self.nearest(x, k)

    def nearest(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        """As `search`, for arguments that were checked already."""
        width = min(k, len(self))
        if not width or not len(x):
            return np.empty((len(x), width), np.int64), np.empty((len(x), width), np.float32)
        score, slots = search_faiss(self._faiss, self._encode(x), width)
        return self._ids[slots], self._similarity(score)

    def vectors(self, ids: Ids) -> Floats:
        check_ids(ids, len(ids), least=None)
        if not len(ids):
            return np.empty((0, self.dim), np.float32)
        slots = [self._slot_of[name] for name in ids.tolist()]
        return self._decode(self._codes()[slots])

    def remove(self, ids: Ids) -> None:
        check_ids(ids, len(ids), least=None)
        if not self._slot_of:
            return
        codes = self._codes()
        for name in ids.tolist():
            hole = self._slot_of.pop(name, None)
            last = len(self._slot_of)
            if hole is not None and hole != last:
                codes[hole] = codes[last]
                self._ids[hole] = self._ids[last]
                self._slot_of[int(self._ids[last])] = hole
        self._resize(len(self._slot_of))

    def all(self) -> tuple[Ids, Floats]:
        """Everything held, oldest first: ids (N,) and a copy of the rows (N, F)."""
        ids = self.ids()
        return ids, self.vectors(ids)

    def ids(self) -> Ids:
        """Ids held (N,), oldest first."""
        return np.fromiter(self._slot_of, np.int64)

    def take(self, n: int) -> tuple[Ids, npt.NDArray[Any]]:
        """Remove the `n` rows that came first, or all: their ids (n,), and a copy of the rows as they are stored."""
        ids = np.fromiter(islice(self._slot_of, n), np.int64)
        rows = self._codes()[[self._slot_of[name] for name in ids.tolist()]]
        self.remove(ids)
        return ids, rows

    def __contains__(self, name: int) -> bool:
        return name in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def nbytes(self) -> int:
        return len(self) * (int(self._faiss.code_size) + self._ids.itemsize)

    def _resize(self, n: int) -> None:
        if n > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(n - len(self._ids), n // 4 + 64), np.int64)])
        if n != self._faiss.ntotal:
            self._memory().resize(n * self._faiss.code_size)
            self._faiss.ntotal = n
            self._view = None

    def _codes(self) -> npt.NDArray[Any]:
        """The rows inside faiss, writable, (len, -1). Only until the next resize, which may move them; not if empty."""
        if self._view is None:
            import faiss

            memory = self._memory()
            codes = faiss.rev_swig_ptr(memory.data(), memory.size())
            self._view = codes.view(self._row_type).reshape(self._faiss.ntotal, -1)
        return self._view

    # What another kind of row changes.

    def _open(self) -> Any:
        import faiss

        return faiss.IndexFlatIP(self.dim)

    def _memory(self) -> Any:
        """The vector of bytes in which faiss keeps the rows."""
        return self._faiss.codes

    def _encode(self, x: Floats) -> npt.NDArray[Any]:
        return x

    def _decode(self, codes: npt.NDArray[Any]) -> Floats:
        return codes

    def _similarity(self, score: npt.NDArray[Any]) -> Floats:
        return score


def search_faiss(index: Any, x: npt.NDArray[Any], k: int) -> Any:
    """Search a faiss index, for one query in one thread: a team has nothing to share out, and is waited for."""
    import faiss

    if len(x) > 1:
        return index.search(x, k)
    n_threads = faiss.omp_get_max_threads()  # of the calling thread alone
    faiss.omp_set_num_threads(1)
    try:
        return index.search(x, k)
    finally:
        faiss.omp_set_num_threads(n_threads)


def check_ids(ids: Ids, n_rows: int, least: int | None = 0) -> None:
    """Raise `ValueError` unless ids are int64 (n_rows,) and, unless `least` is None, none is smaller than that."""
    if ids.dtype != np.int64 or ids.shape != (n_rows,):
        raise ValueError(f"ids must be int64 of shape ({n_rows},), got {ids.dtype} {ids.shape}")
    if least is not None and n_rows and ids.min() < least:
        raise ValueError(f"ids must be at least {least}, got {ids.min()}")


def check_rows(x: Floats, dim: int) -> None:
    """Raise `ValueError` unless `x` is float32 (N, dim) and finite."""
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != dim:
        raise ValueError(f"x must be float32 of shape (N, {dim}), got {x.dtype} {x.shape}")
    finite = np.isfinite(x)
    if not finite.all():
        raise ValueError(f"x must be finite, got {x[~finite][0]} in row {np.argwhere(~finite)[0, 0]}")


def check_k(k: int) -> None:
    """Raise `ValueError` unless at least one neighbour is asked for."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
