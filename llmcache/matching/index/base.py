"""What an index has to do.

B: queries, N: rows, F: dimensions of a fingerprint, k: neighbours asked for.
"""

from abc import ABC, abstractmethod

from llmcache.arrays import Floats, Ids


class Index(ABC):
    """Rows of L2 norm 1 under integer ids, searched by inner product. The caller's arrays are never modified.

    Four methods are each index's own. `len` and `nbytes` come on top: what rows, links and tombstones take is known to
    nobody else. All are called under one lock.

    `lsh` alone holds rows of any norm and tells their share of equal entries instead. The constructor takes F as its
    first argument, and settings as keyword arguments, checked against its annotations.
    """

    @abstractmethod
    def add(self, ids: Ids, x: Floats) -> None:
        """Add rows; an id that is already held gets the new row. Of an id given twice, the last row counts.

        Args:
            ids: int64 (N,), none negative.
            x: float32 (N, F), finite, L2 norm 1.

        Raises:
            ValueError: Wrong shape or dtype, a negative id, or a value that is not finite. Nothing was added then.
        """

    @abstractmethod
    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
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

    @abstractmethod
    def vectors(self, ids: Ids) -> Floats:
        """The rows held under ids, as a search sees them: what is saved with a cache.

        Args:
            ids: int64 (N,), all held.

        Returns:
            float32 (N, F), a copy.

        Raises:
            KeyError: An id is not held.
        """

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Forget rows. An unknown id is ignored.

        Args:
            ids: int64 (N,).

        Raises:
            ValueError: Wrong shape or dtype.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Rows held."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of rows, links and slot numbers; Python's own dict of ids is not counted."""
