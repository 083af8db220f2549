"""The interface of an index. B: queries, N: rows, F: dimensions of a fingerprint, k: neighbours per query."""

from abc import ABC, abstractmethod

import numpy as np

from llmcache.support.arrays import Floats, Ids


class Index(ABC):
    """Rows of L2 norm 1 by integer id, searched by inner product. The caller's arrays are never modified.

    Four methods, `len` and `nbytes`, all called under one lock. The constructor takes F as its first argument, and
    settings as keyword arguments, checked against its annotations. Only `lsh` holds rows of any norm and compares them
    by the share of equal entries.
    """

    @abstractmethod
    def add(self, ids: Ids, x: Floats) -> None:
        """Add rows. A known id gets the new row; for an id given twice, the last row is kept.

        Args:
            ids: int64 (N,), at least 0.
            x: float32 (N, F), finite, L2 norm 1.

        Raises:
            ValueError: Wrong shape or dtype, a negative id, or a value that is not finite. No row was added.
        """

    @abstractmethod
    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        """Return the `k` most similar rows of each query, best first.

        Args:
            x: float32 (B, F), finite, L2 norm 1.
            k: Neighbours per query, at least 1.

        Returns:
            ids int64 and similarity float32 (-1 to 1), both (B, min(k, len(self))). If an approximate index found fewer
            rows, id -1 and similarity -inf fill the end.

        Raises:
            ValueError: Wrong shape or dtype, `k` under 1, or a value that is not finite.
        """

    @abstractmethod
    def vectors(self, ids: Ids) -> Floats:
        """Return the rows with these ids, as a search compares them. They are saved with a cache.

        Args:
            ids: int64 (N,), all held.

        Returns:
            float32 (N, F), a copy.

        Raises:
            KeyError: An id is not held.
        """

    @abstractmethod
    def remove(self, ids: Ids) -> None:
        """Remove the rows with these ids, int64 (N,). Unknown ids are ignored."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of rows, links and slot numbers, without Python's dict of ids."""


def check_rows(x: Floats, dim: int) -> None:
    """Raise `ValueError` unless `x` is float32 (N, dim) and finite."""
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != dim:
        raise ValueError(f"x must be float32 of shape (N, {dim}), got {x.dtype} {x.shape}")
    finite = np.isfinite(x)
    if not finite.all():
        raise ValueError(f"x must be finite, got {x[~finite][0]} in row {np.argwhere(~finite)[0, 0]}")


def check_ids(ids: Ids, x: Floats, dim: int) -> None:
    """Raise `ValueError` unless `x` passes `check_rows` and ids are int64 (N,), at least 0."""
    check_rows(x, dim)
    if ids.dtype != np.int64 or ids.shape != (len(x),):
        raise ValueError(f"ids must be int64 of shape ({len(x)},), got {ids.dtype} {ids.shape}")
    if len(ids) and ids.min() < 0:
        raise ValueError(f"ids must be at least 0, got {ids.min()}")


def check_query(x: Floats, dim: int, k: int) -> None:
    """Raise `ValueError` unless `x` passes `check_rows` and `k` is at least 1."""
    check_rows(x, dim)
    check_least(k=k)


def check_least(least: int = 1, **options: int) -> None:
    """Raise `ValueError` if an option is under `least`."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def no_rows(n_queries: int, width: int = 0) -> tuple[Ids, Floats]:
    """Return the result of a search that found nothing: id -1 and similarity -inf, both (B, width)."""
    return np.full((n_queries, width), -1, np.int64), np.full((n_queries, width), -np.inf, np.float32)
