"""Consistent hashing: which of several workers a key belongs to, so that few keys move when workers come or go.

Karger et al. 1997; with bounded loads Mirrokni, Thorup and Zadimoghaddam 2018: a worker that has too much already is
passed over for the next one on the ring.
"""

import hashlib
from bisect import bisect
from collections.abc import Sequence
from itertools import islice
from math import ceil

_PLACES = 128  # of each worker on the ring: its share of all keys differs from the mean by a tenth or so


class Ring:
    """Workers, by number from 0."""

    def __init__(self, n_workers: int) -> None:
        """Place them."""
        self._n_workers = n_workers
        placed = sorted((_hash(f"{worker}:{place}"), worker) for worker in range(n_workers) for place in range(_PLACES))
        self._places = [place for place, _ in placed]
        self._workers = [worker for _, worker in placed]

    def of(self, key: str) -> int:
        """The worker of a key, however much it has."""
        return self._workers[bisect(self._places, _hash(key)) % len(self._workers)]

    def of_bounded(self, key: str, loads: Sequence[int], bound: float) -> int:
        """The first worker from the key on whose load, one more included, is at most `bound` times the mean (> 1)."""
        most = ceil(bound * (sum(loads) + 1) / self._n_workers)
        first = bisect(self._places, _hash(key))
        turn = self._workers[first:] + self._workers[:first] if loads[self.of(key)] >= most else [self.of(key)]
        return next(islice((worker for worker in turn if loads[worker] < most), 1))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
