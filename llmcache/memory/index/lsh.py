"""MinHash signatures in bands (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, chapter 3).

N: rows, B: queries, F: hashes of a signature, k: neighbours per query.
"""

from typing import Any

import numpy as np

from llmcache.memory.index.base import check_least, check_query, no_rows
from llmcache.memory.index.flat import FlatIndex
from llmcache.support.arrays import Floats, Ids


class LSHIndex(FlatIndex):
    """Finds signatures that agree with the query in a whole band, and ranks them by the share of equal entries.

    That share estimates the Jaccard similarity of the sets behind two signatures and replaces the inner product here,
    so rows need no norm. With b bands of r entries, sets of Jaccard similarity s are compared with probability
    1 - (1 - s^r)^b. Bands are as wide as possible with a probability of at least `recall` at the threshold; above the
    threshold it is higher. A missed neighbour only costs time: the request is computed. If even bands of one entry
    reach less than `recall` (with 128 hashes, at thresholds below 0.023), they are used all the same. Time grows with
    the number of candidates, not of rows.
    """

    def __init__(self, dim: int, threshold: float = 0.5, recall: float = 0.95) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 2, for two bands.
            threshold: Least Jaccard similarity of rows to find, over 0, at most 1. In a cache: its tau.
            recall: Least probability, over 0 and under 1, that a row at the threshold is found.
        """
        from datasketch import MinHashLSH

        check_least(2, dim=dim)
        if not 0 < threshold <= 1 or not 0 < recall < 1:
            raise ValueError(
                f"threshold={threshold}, recall={recall}: give a threshold over 0, at most 1, and a recall between"
            )
        super().__init__(dim)
        widths = range(dim // 2, 0, -1)  # datasketch needs at least two bands
        self.width = next((one for one in widths if chance_to_meet(threshold, dim, one) >= recall), 1)
        self._bands: Any = MinHashLSH(num_perm=dim, params=(dim // self.width, self.width))

    def add(self, ids: Ids, x: Floats) -> None:
        super().add(ids, x)
        for name, row in zip(ids.tolist(), x, strict=True):
            self._leave_bands(name)
            self._bands.insert(name, _sketch(row))

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        check_query(x, self.dim, k)
        width = min(k, len(self))
        ids, similarity = no_rows(len(x), width)
        for i, row in enumerate(x):
            candidates = np.sort(np.array(self._bands.query(_sketch(row)), np.int64))
            share = share_equal(self.vectors(candidates), row)
            best = np.argsort(-share, kind="stable")[:width]
            ids[i, : len(best)], similarity[i, : len(best)] = candidates[best], share[best]
        return ids, similarity

    def remove(self, ids: Ids) -> None:
        super().remove(ids)
        for name in ids.tolist():
            self._leave_bands(name)

    @property
    def nbytes(self) -> int:
        return super().nbytes + len(self) * (self.dim // self.width) * self.width * 4

    def _leave_bands(self, name: int) -> None:
        if name in self._bands:
            self._bands.remove(name)


def share_equal(rows: Floats, row: Floats) -> Floats:
    """Return the share (N,) of entries in which rows (N, F) equal `row` (F,), an estimate of Jaccard similarity."""
    share: Floats = (rows == row).mean(axis=1, dtype=np.float32)
    return share


def chance_to_meet(jaccard: float, dim: int, width: int) -> float:
    """Return the probability that signatures (dim,) of two such sets agree in a whole band of `width` entries."""
    return float(1 - (1 - jaccard**width) ** (dim // width))


def _sketch(row: Floats) -> Any:
    """Return a signature (F,) for datasketch, which compares bytes, so the bits of a float serve as hash."""
    from datasketch import LeanMinHash

    return LeanMinHash(seed=0, hashvalues=row.view(np.uint32), scheme="affine32")
