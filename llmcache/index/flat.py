"""Exhaustive search, exact, over floats or bits. N: rows, B: queries, F: dimensions."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcache.arrays import Floats, Ids
from llmcache.index.base import Index, check_ids, check_positive, check_query, in_one_thread, load_faiss, no_rows


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
        check_query(x, self.dim, k)
        width = min(k, len(self))
        if not width or not len(x):
            return no_rows(len(x), width)
        similarity, slots = self._find(self._encode(x), self._rows[: len(self)], width)
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

        n_different, slots = in_one_thread(faiss.knn_hamming, x, rows, k)
        return (1 - 2 * n_different / self.dim).astype(np.float32), slots
