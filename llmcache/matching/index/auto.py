"""The structure that suits the number of rows. N: rows, B: queries, F: dimensions, k: neighbours asked for."""

import numpy as np

from llmcache.arrays import Floats, Ids
from llmcache.matching.index.base import Index
from llmcache.matching.index.flat import check_ids, check_k, check_rows
from llmcache.matching.index.inverted_file import InvertedFile
from llmcache.matching.index.refined import RefinedIndex

_PACE = 16  # rows that move with each one that is added
_AT_ONCE = 4096  # rows; of more that come together, no two copies are held
_SAMPLE = 2048  # rows that tell where an inverted file begins


class AutoIndex(Index):
    """`refined` up to `switch` rows, exact while few; beyond that an inverted file whose search is sublinear.

    Rows move while others are added, some with each, and are searched as before until all have moved: no call pays for
    a rebuild. With an eighth of `switch` left it is `refined` again. Similarities are exact; a neighbour in none of the
    `probes` lists that a search reads is overlooked. The same calls in the same order find the same rows.
    No call is safe beside another one: the caller holds a lock.
    """

    def __init__(
        self,
        dim: int,
        exact: int = 2048,
        candidates: int = 64,
        switch: int = 32768,
        probes: int = 16,
        compared: int = 64,
    ) -> None:
        """Open an empty index.

        Args:
            dim: F, at least 1.
            exact: Of `refined`: most rows that are all compared in full, at least 1.
            candidates: Of `refined`: rows a query that its second stage compares, at least 1.
            switch: Most rows that are held so, at least 1.
            probes: Least lists that a search of the inverted file reads, at least 1. More overlook less, take longer.
            compared: Rows a query of those lists that are compared in full, at least 1.
        """
        for name, value in {"switch": switch, "probes": probes, "compared": compared}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.dim = dim
        self._few = {"exact": exact, "candidates": candidates}
        self._many = {"probes": probes, "candidates": compared}
        self._switch = switch
        self._refined: RefinedIndex | None = RefinedIndex(dim, **self._few)  # answers while it is there
        self._file: InvertedFile | None = None  # holds some of the same rows then, and all later
        self._to_move: list[int] = []

    def add(self, ids: Ids, x: Floats) -> None:
        check_rows(x, self.dim)
        check_ids(ids, len(x))
        for start in range(0, len(ids), _AT_ONCE):
            self._add(ids[start : start + _AT_ONCE], x[start : start + _AT_ONCE])

    def search(self, x: Floats, k: int) -> tuple[Ids, Floats]:
        if self._refined is not None:
            return self._refined.search(x, k)
        check_rows(x, self.dim)
        check_k(k)
        return self._filled.search(x, k)

    def vectors(self, ids: Ids) -> Floats:
        return (self._filled if self._refined is None else self._refined).vectors(ids)

    def remove(self, ids: Ids) -> None:
        check_ids(ids, len(ids), least=None)
        for part in (self._refined, self._file):
            if part is not None:
                part.remove(ids)
        if self._file is None:
            return
        if self._refined is None and len(self) < self._switch // 8:
            held = self._file.ids()
            refined = RefinedIndex(self.dim, **self._few)
            refined.add(held, self._file.vectors(held))
            self._refined, self._file = refined, None
        elif self._refined is not None and len(self) < self._switch // 2:
            self._file = None

    def __len__(self) -> int:
        return len(self._filled if self._refined is None else self._refined)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._refined, self._file) if part is not None)

    @property
    def _filled(self) -> InvertedFile:
        assert self._file is not None
        return self._file

    def _add(self, ids: Ids, x: Floats) -> None:
        """Add rows that were checked."""
        if self._refined is None:
            self._filled.add(ids, x)
            return
        self._refined.add(ids, x)
        if self._file is not None:
            self._to_move += ids.tolist()
        elif len(self._refined) > self._switch:
            held = self._refined.ids()
            self._file = InvertedFile(self._refined.vectors(held[:_SAMPLE]), **self._many)
            self._to_move = held[::-1].tolist()
        if self._file is not None:
            self._move(self._refined, self._file, (_PACE + 1) * len(ids))

    def _move(self, refined: RefinedIndex, file: InvertedFile, n: int) -> None:
        """Copy the next `n` rows into the inverted file; when no more are left, it takes over."""
        due = self._to_move[-n:]
        held = np.array([name for name in due if name in refined], np.int64)
        file.add(held, refined.vectors(held))
        del self._to_move[len(self._to_move) - len(due) :]  # not before: where memory runs out they remain due
        if not self._to_move:
            self._refined = None
