"""Nearest neighbours of a fingerprint (component 3, matching).

B: queries, N: rows, F: dimensions of a fingerprint, k: neighbours asked for.

An index knows vectors and integer ids, nothing of entries, keys or budgets. It holds no lock: the library above does.
"""

from typing import Any, Protocol

from llmcache.arrays import Ids
from llmcache.matching.index.binary import BinaryIndex
from llmcache.matching.index.flat import FlatIndex, Rows
from llmcache.matching.index.hnsw import HNSWIndex
from llmcache.matching.index.lsh import LSHIndex
from llmcache.matching.index.refined import RefinedIndex

__all__ = ["INDEXES", "BinaryIndex", "FlatIndex", "HNSWIndex", "Ids", "Index", "LSHIndex", "RefinedIndex", "Rows"]


class Index(Protocol):
    """Rows of L2 norm 1 under integer ids, searched by inner product. The caller's arrays are never modified.

    `lsh` alone holds rows of any norm and tells their share of equal entries instead.
    """

    def __init__(self, dim: int, **options: Any) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            **options: What the class names in its own signature.
        """

    def add(self, ids: Ids, x: Rows) -> None:
        """Add rows; an id that is already held gets the new row. Of an id given twice, the last row counts.

        Args:
            ids: int64 (N,), none negative.
            x: float32 (N, F), finite, L2 norm 1.

        Raises:
            ValueError: Wrong shape or dtype, a negative id, or a value that is not finite. Nothing was added then.
        """

    def search(self, x: Rows, k: int) -> tuple[Ids, Rows]:
        """Find the `k` most similar rows, best first.

        Args:
            x: float32 (B, F), finite, L2 norm 1.
            k: Neighbours a query, at least 1.

        Returns:
            ids int64 and similarity float32 (-1 to 1), both (B, min(k, len(self))). Where an approximate index found
            no further row: id -1 and similarity -inf, after all others.

        Raises:
            ValueError: Wrong shape or dtype, `k` under 1, or a value that is not finite.
        """

    def vectors(self, ids: Ids) -> Rows:
        """The rows held under ids, as a search sees them: what is saved with a cache.

        Args:
            ids: int64 (N,), all held.

        Returns:
            float32 (N, F), a copy.

        Raises:
            KeyError: An id is not held.
        """

    def remove(self, ids: Ids) -> None:
        """Forget rows. An unknown id is ignored.

        Args:
            ids: int64 (N,).

        Raises:
            ValueError: Wrong shape or dtype.
        """

    def __len__(self) -> int:
        """Rows held."""

    @property
    def nbytes(self) -> int:
        """Bytes of rows, links and slot numbers; Python's own dict of ids is not counted."""


INDEXES: dict[str, type[Index]] = {
    "flat": FlatIndex,
    "hnsw": HNSWIndex,
    "binary": BinaryIndex,
    "refined": RefinedIndex,
    "lsh": LSHIndex,
}
