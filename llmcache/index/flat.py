"""Exhaustive search, exact, over floats or bits; where rows are many, FAISS's inverted file.

N: rows, B: queries, F: dimensions, k: neighbours asked for.
"""

from functools import cache
from threading import Thread
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Ids
from llmcache.index.base import Index, check_ids, check_positive, check_query, no_rows

_READ = 16  # one in so many lists is read by a search
_GROWTH = 4  # an inverted file with so many times the rows it was made from is made anew


@cache
def load_faiss() -> Any:
    """FAISS, whose types know half of it. It takes a while to import, so only what uses it does."""
    import faiss

    return faiss


def in_one_thread(search: Any, x: NDArray[Any], *arguments: Any) -> Any:
    """Call a search of FAISS, for one query in one thread: a team has nothing to share out, and is waited for."""
    faiss = load_faiss()
    if len(x) > 1:
        return search(x, *arguments)
    n_threads = faiss.omp_get_max_threads()  # of the calling thread alone
    faiss.omp_set_num_threads(1)
    try:
        return search(x, *arguments)
    finally:
        faiss.omp_set_num_threads(n_threads)


class FlatIndex(Index):
    """Inner product with every row: exact, and the time of a search grows with the number of rows.

    Rows are dense in one array, which FAISS searches where it lies. A known id is overwritten in its slot; removing
    one moves the last row into its slot. So both are O(1), and no search skips a slot.
    """

    _dtype: ClassVar[type[np.generic]] = np.float32

    def __init__(self, dim: int) -> None:
        check_positive(dim=dim)
        self.dim = dim
        self._slot_of: dict[int, int] = {}
        self._ids: Ids = np.empty(0, np.int64)  # by slot; spare room at the end
        self._rows: NDArray[Any] = self._encode(np.empty((0, dim), np.float32))

    def add(self, ids: Ids, x: Floats) -> None:
        check_ids(ids, x, self.dim)
        names = ids.tolist()
        n = len(self._slot_of) + len({*names} - self._slot_of.keys())
        if n > len(self._ids):  # first: if memory runs out, no id points past the rows held
            room = max(64, n + n // 4) - len(self._ids)
            rows = np.concatenate([self._rows, np.empty((room, self._rows.shape[1]), self._dtype)])
            self._ids, self._rows = np.concatenate([self._ids, np.empty(room, np.int64)]), rows
        for name, row in zip(names, self._encode(x), strict=True):
            slot = self._slot_of.setdefault(name, len(self._slot_of))
            self._ids[slot], self._rows[slot] = name, row

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        if x.dtype != np.float32 or x.shape[1:] != (self.dim,) or k < 1 or not np.isfinite(x).all():
            check_query(x, self.dim, k)  # it says what is wrong
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
        """Ids held (N,), int64."""
        return self._ids[: len(self)].copy()

    def __contains__(self, name: int) -> bool:
        return name in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def nbytes(self) -> int:
        return len(self) * int(self._rows.shape[1] * self._rows.itemsize + self._ids.itemsize)

    # What another kind of row changes.

    def _encode(self, x: Floats) -> NDArray[Any]:
        return x

    def _decode(self, rows: NDArray[Any]) -> Floats:
        return rows.reshape(-1, self.dim)

    def _find(self, x: NDArray[Any], rows: NDArray[Any], k: int) -> tuple[Floats, Ids]:
        faiss = load_faiss()

        found: tuple[Floats, Ids] = in_one_thread(faiss.knn, x, rows, k, faiss.METRIC_INNER_PRODUCT)
        return found


class BinaryIndex(FlatIndex):
    """One bit a dimension, for fingerprints whose entries are +1/sqrt(F) or -1/sqrt(F), such as SimHash.

    Exact for those: the similarity, 1 - 2 * (bits that differ) / F, is their inner product. Of any other row only the
    signs count (zero as negative). 32 times smaller than `FlatIndex` and otherwise the same.
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
        faiss = load_faiss()

        n_different, slots = in_one_thread(faiss.knn_hamming, self._encode(x), rows, k)
        return (1 - 2 * n_different / self.dim).astype(np.float32), slots


class AutoIndex(Index):
    """`flat` up to `switch` rows; beyond, an inverted file: time grows with the square root of the rows.

    A thread makes the file from a copy of the rows. Until it is done, and has caught up with what changed meanwhile,
    searches read the old structure, so that no call waits for it. With an eighth of `switch` left it is flat again.
    Similarities are exact; a neighbour in no list that a search reads is overlooked.
    """

    def __init__(self, dim: int, switch: int = 32768, probes: int = 16) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            switch: Most rows that are compared one by one, at least 1.
            probes: Fewest lists that a search reads, at least 1. More overlook less and take longer.
        """
        check_positive(dim=dim, switch=switch, probes=probes)
        self.dim, self._switch, self._probes = dim, switch, probes
        self._rows: FlatIndex | InvertedFile = FlatIndex(dim)
        self._most = switch  # rows of this structure; beyond, another one is made
        self._build: _Build | None = None

    def add(self, ids: Ids, x: Floats) -> None:
        check_ids(ids, x, self.dim)
        self._take_over()
        self._rows.add(ids, x)
        if self._build is not None:
            self._build.missed.update(ids.tolist())
        elif len(self) > self._most:
            held = self._rows.ids()
            self._build = _Build(held, self._rows.vectors(held), self._probes)
            self._build.start()

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        self._take_over()
        return self._rows.search(x, k)

    def vectors(self, ids: Ids) -> Floats:
        return self._rows.vectors(ids)

    def remove(self, ids: Ids) -> None:
        self._take_over()
        self._rows.remove(ids)
        if self._build is not None:
            self._build.missed.update(ids.tolist())
        elif isinstance(self._rows, InvertedFile) and len(self) < self._switch // 8:
            flat, held = FlatIndex(self.dim), self._rows.ids()
            flat.add(held, self._rows.vectors(held))
            self._rows, self._most = flat, self._switch

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def _take_over(self) -> None:
        """Use the file that a thread has made, once it holds what changed meanwhile."""
        build = self._build
        if build is None or build.is_alive():
            return
        self._build, self._most = None, _GROWTH * len(self)
        if build.made is not None:  # None: memory ran out, or the process was forked
            missed = np.array([*build.missed], np.int64)
            build.made.remove(missed)
            again = missed[[name in self._rows for name in missed.tolist()]]
            build.made.add(again, self._rows.vectors(again))
            self._rows = build.made


class InvertedFile(Index):
    """FAISS's `IndexIVFFlat`: lists of rows that are alike, each with a centroid, found by k-means."""

    def __init__(self, ids: Ids, x: Floats, probes: int) -> None:
        """Cluster rows (N, F), and hold them."""
        faiss = load_faiss()

        self.dim = int(x.shape[1])
        n_lists = max(1, int(4 * len(x) ** 0.5))
        self._faiss: Any = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(self.dim), self.dim, n_lists, faiss.METRIC_INNER_PRODUCT
        )
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
        faiss = load_faiss()

        gone = self._held.intersection(ids.tolist())
        if gone:
            self._faiss.remove_ids(faiss.IDSelectorArray(np.array([*gone], np.int64)))
            self._held -= gone

    def ids(self) -> Ids:
        """Ids held (N,), int64."""
        return np.array([*self._held], np.int64)

    def __contains__(self, name: int) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        return len(self) * (4 * self.dim + 24) + 4 * self.dim * int(self._faiss.nlist)


class _Build(Thread):
    """Makes an inverted file beside calls, of rows (N, F)."""

    def __init__(self, ids: Ids, x: Floats, probes: int) -> None:
        super().__init__(name="llmcache-index")
        self._arguments = ids, x, probes
        self.made: InvertedFile | None = None
        self.missed: set[int] = set()  # ids that changed since it began

    def run(self) -> None:
        faiss = load_faiss()

        faiss.omp_set_num_threads(1)  # of this thread: the other cores compute the model
        try:
            self.made = InvertedFile(*self._arguments)
        except (MemoryError, RuntimeError):  # FAISS raises the latter; searches go on as before
            self.made = None
