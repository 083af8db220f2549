"""MinHash signatures in bands (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, chapter 3).

N: rows, B: queries, F: hashes of a signature, k: neighbours asked for.
"""

from typing import Any

import numpy as np

from llmcache.arrays import Floats, Ids
from llmcache.index.base import Index, check_query, no_rows
from llmcache.index.flat import FlatIndex


class LSHIndex(Index):
    """Finds signatures that agree with a query's in a whole band, and ranks them by the share of equal entries.

    That share estimates the Jaccard similarity of the sets behind two signatures, and takes the inner product's place
    here; so rows need no norm. With b bands of r entries, sets of Jaccard similarity s are compared with probability
    1 - (1 - s^r)^b. Bands are as wide as they can be while that is at least `recall` at the threshold, and it is more
    above it: what is overlooked is computed, which costs time, never the answer. Where even bands of one entry fall
    short (128 hashes: under a threshold of 0.023), those are used. Time grows with the number of candidates, not of
    rows.
    """

    def __init__(self, dim: int, threshold: float = 0.5, recall: float = 0.95) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 2, so that there can be two bands.
            threshold: Jaccard similarity from which on rows are to be found, over 0, at most 1. Of a cache: its tau.
            recall: Least probability, over 0 and under 1, that a row right at the threshold is found.
        """
        if dim < 2:
            raise ValueError(f"dim must be at least 2, got {dim}")
        if not 0 < threshold <= 1 or not 0 < recall < 1:
            raise ValueError(
                f"threshold={threshold}, recall={recall}: give a threshold over 0, at most 1, and a recall between"
            )
        self.dim = dim
        self.width = widest_band(dim, threshold, recall)
        self._rows = FlatIndex(dim)
        self._bands = _open_bands(dim, self.width)

    def add(self, ids: Ids, x: Floats) -> None:
        self._rows.add(ids, x)
        for name, row in zip(ids.tolist(), x, strict=True):
            self._leave_bands(name)
            self._bands.insert(name, _sketch(row))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_query(x, self.dim, k)
        width = min(k, len(self))
        ids, similarity = no_rows(len(x), width)
        for i, row in enumerate(x):
            candidates = np.sort(np.array(self._bands.query(_sketch(row)), np.int64))
            share = share_equal(self._rows.vectors(candidates), row)
            best = np.argsort(-share, kind="stable")[:width]
            ids[i, : len(best)], similarity[i, : len(best)] = candidates[best], share[best]
        return ids, similarity

    def vectors(self, ids: Ids) -> Floats:
        return self._rows.vectors(ids)

    def remove(self, ids: Ids) -> None:
        self._rows.remove(ids)
        for name in ids.tolist():
            self._leave_bands(name)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + len(self) * (self.dim // self.width) * self.width * 4

    def _leave_bands(self, name: int) -> None:
        if name in self._bands:
            self._bands.remove(name)


def share_equal(rows: Floats, row: Floats) -> Floats:
    """Share (N,) of the entries at which rows (N, F) equal one (F,): what MinHash estimates Jaccard similarity by."""
    share: Floats = (rows == row).mean(axis=1, dtype=np.float32)
    return share


def widest_band(dim: int, threshold: float, recall: float) -> int:
    """Most entries r of a band with which sets right at the threshold still meet with probability `recall`."""
    widths = range(dim // 2, 0, -1)  # datasketch wants two bands at least
    return next((r for r in widths if chance_to_meet(threshold, dim, r) >= recall), 1)


def chance_to_meet(jaccard: float, dim: int, width: int) -> float:
    """Probability that signatures (F = dim) of two sets of this similarity agree in a whole band of `width` entries."""
    return float(1 - (1 - jaccard**width) ** (dim // width))


def _open_bands(dim: int, width: int) -> Any:
    from datasketch import MinHashLSH

    return MinHashLSH(num_perm=dim, params=(dim // width, width))


def _sketch(row: Floats) -> Any:
    """A signature (F,) as datasketch takes it. It compares bytes, so those of a float will do as a hash."""
    from datasketch import LeanMinHash

    return LeanMinHash(seed=0, hashvalues=row.view(np.uint32), scheme="affine32")
