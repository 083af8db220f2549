"""What every index has to do, as a check for classes from outside the library and for its own."""

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from llmcache.arrays import Floats, Ids
from llmcache.matching.index.base import Index
from llmcache.registry import refuses, rule


class IndexTwin:
    """An index, and beside it what it must hold, in the plainest way."""

    def __init__(self, index: Index, similarity: Callable[[Floats, Floats], Any] = np.dot) -> None:
        """Begin with an empty index, whose similarity of two rows is by default their inner product."""
        self.index = index
        self.rows: dict[int, Floats] = {}
        self._similarity = similarity

    def add(self, ids: Ids, x: Floats) -> None:
        """Add rows to both."""
        self.index.add(ids, x)
        self.rows.update(zip(ids.tolist(), x.copy(), strict=True))

    def remove(self, ids: Ids) -> None:
        """Forget rows in both."""
        self.index.remove(ids)
        for name in ids.tolist():
            self.rows.pop(name, None)

    def search(self, queries: Floats, k: int) -> Floats:
        """The similarities that the index finds, after a check that they are as it claims and of rows that are held."""
        ids, similarity = self.index.search(queries, k)
        rule(len(self.index) == len(self.rows), "len: the number of rows held")
        shape = len(queries), min(k, len(self.rows))
        rule(ids.shape == similarity.shape == shape, f"search: both results are (B, min(k, len)), {shape}")
        rule(ids.dtype == np.int64 and similarity.dtype == np.float32, "search: ids int64, similarity float32")
        for query, names, claimed in zip(queries, ids.tolist(), similarity, strict=True):
            found = [name for name in names if name != -1]
            is_at_end = names == found + [-1] * (len(names) - len(found))
            rule(is_at_end and len({*found}) == len(found), "search: different rows, and id -1 after all others")
            rule({*found} <= {*self.rows}, "search: rows that are held")
            true = [self._similarity(query, self.rows[name]) for name in found]
            true += [-inf] * (len(names) - len(found))
            rule(np.allclose(claimed, true, rtol=0, atol=1e-6), "search: the similarity of the rows named")
            rule(bool((np.diff(claimed[: len(found)]) <= 1e-6).all()), "search: best first")
        return similarity

    def recall(self, queries: Floats, k: int) -> float:
        """Share of results as similar as those of an exact search."""
        found = self.search(queries, k)
        least = np.array([self._best(query, k)[-1] for query in queries])
        return float((found >= least[:, None] - 1e-6).mean())

    def check_exact(self, queries: Floats, k: int) -> None:
        """The index finds what an exact search finds. Among equals any order will do."""
        for query, found in zip(queries, self.search(queries, k), strict=True):
            rule(np.allclose(found, self._best(query, k), rtol=0, atol=1e-6), "search: the most similar rows")

    def check_vectors(self) -> None:
        """The index gives back what was added."""
        held = np.array([*self.rows], np.int64)
        got, rows = self.index.vectors(held), [*self.rows.values()]
        rule(got.dtype == np.float32 and got.shape[:1] == held.shape, "vectors: float32 (N, F)")
        rule(all(np.allclose(a, b) for a, b in zip(got, rows, strict=True)), "vectors: the rows that were added")
        with refuses(KeyError, "vectors: KeyError where an id is not held"):
            self.index.vectors(np.array([10**15]))

    def _best(self, query: Floats, k: int) -> Floats:
        """The similarities that an exact search finds."""
        best = np.sort([self._similarity(query, row) for row in self.rows.values()])[::-1][:k]
        return np.array(best, np.float32)


def check_index(
    make: Callable[[int], Index],
    similarity: Callable[[Floats, Floats], Any] = np.dot,
    is_exact: bool = True,
    seed: int = 0,
) -> None:
    """Add, replace, remove and search rows in any order beside an exact twin; then pass what must be refused.

    Args:
        make: Called with the width.
        similarity: Of two rows (F,), where it is not their inner product.
        is_exact: Whether the most similar rows are always found; else those found are checked.
        seed: Of what is drawn.
    """
    rng, dim = np.random.default_rng(seed), 32
    twin = IndexTwin(make(dim), similarity)
    ids = np.array([7, 8, 7, 7, 10**12])
    steps = [(True, ids[:0]), (False, np.array([5, -1])), (True, ids), (False, np.array([8, 8, 7, -1, 10**13]))]
    steps += [(rng.random() < 0.7, rng.integers(0, 21, rng.integers(13))) for _ in range(16)]
    for adds, ids in (*steps, (True, rng.permutation(300))):
        twin.add(ids, signs(rng, len(ids), dim)) if adds else twin.remove(ids)
        for n_queries, k in ((0, 5), (3, 5), (1, 1000)):
            queries = signs(rng, n_queries, dim)
            twin.check_exact(queries, k) if is_exact else twin.search(queries, k)
        twin.check_vectors()
    _check_callers_arrays(make(dim), signs(rng, 10, dim))
    for index in make(dim), twin.index:
        _check_refusals(index, signs(rng, 5, dim))
    queries = signs(rng, 3, dim)
    twin.check_exact(queries, 5) if is_exact else twin.search(queries, 5)  # nothing of it was added
    index = make(dim)
    empty = index.nbytes
    index.add(np.arange(100), signs(rng, 100, dim))
    full = index.nbytes
    rule(full - empty >= 100 * dim // 8, "nbytes: grows with the rows")
    index.remove(np.arange(100))
    rule(index.nbytes == empty if is_exact else index.nbytes < full, "nbytes: rows that have left take nothing")
    with refuses(ValueError, "a width under 1: ValueError"):
        make(0)


def signs(rng: np.random.Generator, n: int, dim: int) -> Floats:
    """Rows (n, dim) of norm 1 that every kind of index holds exactly: each entry is one of two numbers."""
    made: Floats = ((2 * rng.integers(2, size=(n, dim)) - 1) / np.sqrt(dim)).astype(np.float32)
    return made


def _check_callers_arrays(index: Index, x: Floats) -> None:
    ids, spread = np.arange(10), np.asfortranarray(np.repeat(x, 2, axis=0))[::2]
    kept = x.copy()
    index.add(ids, spread)
    found, similarity = index.search(spread, 3)
    rule(np.array_equal(spread, kept) and np.array_equal(ids, np.arange(10)), "the caller's arrays are not modified")
    ids[:], spread[:], found[:], similarity[:] = 0, 1, 5, 5
    index.vectors(np.arange(10))[:] = 3
    again, similarity = index.search(kept, 1)
    is_found = again[:, 0].tolist() == [*range(10)] and np.allclose(similarity, 1, atol=1e-6)
    rule(is_found, "rows are copies: what the caller does with arrays afterwards changes nothing")


def _check_refusals(index: Index, x: Floats) -> None:
    ids, no_number = np.arange(5), np.where(np.arange(x.size).reshape(x.shape) == 70, np.float32("nan"), x)
    wrong: dict[str, tuple[Ids, Floats]] = {
        "a wrong width": (ids, x[:, 1:]),
        "a single row": (ids, x[0]),
        "float64": (ids, x.astype(np.float64)),
        "NaN": (ids, no_number),
        "infinity": (ids, np.where(np.isnan(no_number), np.float32("-inf"), x)),
        "fewer ids than rows": (ids[1:], x),
        "ids of two dimensions": (ids[:, None], x),
        "int32 ids": (ids.astype(np.int32), x),
        "a negative id": (ids - 3, x),
    }
    for what, (of_ids, rows) in wrong.items():
        with refuses(ValueError, f"add: ValueError for {what}"):
            index.add(of_ids, rows)
    for what, query, k in (("k=0", x, 0), ("a wrong width", x[:, 1:], 1), ("NaN", no_number, 1)):
        with refuses(ValueError, f"search: ValueError for {what}"):
            index.search(query, k)
    with refuses(ValueError, "remove: ValueError for int32 ids"):
        index.remove(ids.astype(np.int32))
