"""Every index against an exact twin (`check_index`), and what is special about each."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache.arrays import Floats, Ids
from llmcache.matching.index import INDEXES, AutoIndex, HNSWIndex, Index, LSHIndex, RefinedIndex
from llmcache.matching.index.inverted_file import Blocks, InvertedFile
from llmcache.matching.index.lists import MOST
from llmcache.matching.index.lsh import chance_to_meet
from llmcache.testing import check_index
from tests.conformance.outside import Scan

DIM = 32
ALL = {**INDEXES, "outside": Scan}

# Bands of one entry: a row is overlooked only if it has not a single entry in common.
OPTIONS = {"lsh": {"threshold": 0.01}}


def share_equal(a: Floats, b: Floats) -> float:
    """How `lsh` compares rows."""
    return float(np.mean(a == b))


class Pair:
    """An index, and beside it what it must hold, in the plainest way."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.rows: dict[int, Floats] = {}
        self._similarity: Callable[[Floats, Floats], Any] = share_equal if isinstance(index, LSHIndex) else np.dot

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
        """The similarities that the index finds, which are checked."""
        ids, similarity = self.index.search(queries, k)
        assert len(self.index) == len(self.rows)
        shape = len(queries), min(k, len(self.rows))
        assert ids.shape == similarity.shape == shape
        assert ids.dtype == np.int64 and similarity.dtype == np.float32
        for query, names, claimed in zip(queries, ids.tolist(), similarity, strict=True):
            found = [name for name in names if name != -1]
            is_at_end = names == found + [-1] * (len(names) - len(found))
            assert is_at_end and len({*found}) == len(found)
            assert {*found} <= {*self.rows}
            true = [self._similarity(query, self.rows[name]) for name in found]
            true += [-inf] * (len(names) - len(found))
            assert np.allclose(claimed, true, rtol=0, atol=1e-6)
            assert bool((np.diff(claimed[: len(found)]) <= 1e-6).all())
        return similarity

    def recall(self, queries: Floats, k: int) -> float:
        """Share of results as similar as those of an exact search."""
        found = self.search(queries, k)
        least = np.array([self._best(query, k)[-1] for query in queries])
        return float((found >= least[:, None] - 1e-6).mean())

    def check_exact(self, queries: Floats, k: int) -> None:
        """The index finds what an exact search finds. Among equals any order will do."""
        for query, found in zip(queries, self.search(queries, k), strict=True):
            assert np.allclose(found, self._best(query, k), rtol=0, atol=1e-6)

    def check_vectors(self) -> None:
        """The index gives back what was added."""
        held = np.array([*self.rows], np.int64)
        got, rows = self.index.vectors(held), [*self.rows.values()]
        assert got.dtype == np.float32 and got.shape[:1] == held.shape
        assert all(np.allclose(a, b) for a, b in zip(got, rows, strict=True))
        with pytest.raises(KeyError):
            self.index.vectors(np.array([10**15]))

    def _best(self, query: Floats, k: int) -> Floats:
        """The similarities that an exact search finds."""
        best = np.sort([self._similarity(query, row) for row in self.rows.values()])[::-1][:k]
        return np.array(best, np.float32)


def signs(rng: np.random.Generator, n: int, dim: int) -> Floats:
    """Rows (n, dim) of norm 1 that every kind of index holds exactly: each entry is one of two numbers."""
    made: Floats = ((2 * rng.integers(2, size=(n, dim)) - 1) / np.sqrt(dim)).astype(np.float32)
    return made


def directions(rng: np.random.Generator, n: int, dim: int = DIM) -> Floats:
    """Floats anywhere on the sphere."""
    x = rng.standard_normal((n, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def paraphrases(rng: np.random.Generator, centres: Floats, n: int) -> Floats:
    """Floats near some centres."""
    x = centres[rng.integers(len(centres), size=n)] + 0.3 * rng.standard_normal((n, centres.shape[1]))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """So graphs come out alike each time, and no search waits for a core that others use."""
    n_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(n_threads)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(params=sorted(ALL))
def index(request: pytest.FixtureRequest) -> Index:
    return ALL[request.param](DIM, **OPTIONS.get(request.param, {}))


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), st.lists(st.integers(0, 20), max_size=12), st.integers(0, 99)),
    min_size=4,
    max_size=12,
)


#: Which may overlook a row.
APPROXIMATE = {
    "in a graph": lambda dim=DIM: HNSWIndex(dim, buffer=3, block=2),
    "in lists": lambda dim=DIM: AutoIndex(dim, switch=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(ALL), *APPROXIMATE])
@settings(deadline=None)
@given(steps=STEPS)
@example([("add", [], 0), ("remove", [5, -1], 0), ("add", [7, 8, 7, 7], 0), ("remove", [8, 8, 7, -1, 10**12], 0)])
def test_any_sequence_agrees_with_the_twin(name: str, steps: list[tuple[str, list[int], int]]) -> None:
    """Ids may be new or known, given twice, or held by none; the index may be empty."""
    pair = Pair(APPROXIMATE[name]() if name in APPROXIMATE else ALL[name](DIM, **OPTIONS.get(name, {})))
    for verb, names, seed in steps:
        rng, ids = np.random.default_rng(seed), np.array(names, np.int64)
        pair.add(ids, signs(rng, len(ids), DIM)) if verb == "add" else pair.remove(ids)
        for n_queries in (0, 2):
            if name in APPROXIMATE:
                pair.search(directions(rng, n_queries), 5)
            else:
                pair.check_exact(signs(rng, n_queries, DIM), 5)
        pair.check_vectors()


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_index_keeps_the_rules(name: str) -> None:
    options, similarity = OPTIONS.get(name, {}), share_equal if name == "lsh" else np.dot
    check_index(lambda dim: ALL[name](dim, **options), similarity)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_those_that_may_overlook_a_row_keep_the_others(name: str) -> None:
    check_index(APPROXIMATE[name], is_exact=False)


@pytest.mark.parametrize("name", ["flat", "hnsw", "outside"])
def test_finds_directions(name: str, rng: np.random.Generator) -> None:
    pair = Pair(ALL[name](DIM))
    pair.add(np.arange(300), directions(rng, 300))
    pair.check_exact(directions(rng, 30), 8)


def test_a_search_leaves_the_number_of_threads_alone(index: Index, rng: np.random.Generator) -> None:
    index.add(np.arange(10), signs(rng, 10, DIM))
    faiss.omp_set_num_threads(2)
    index.search(signs(rng, 1, DIM), 1)
    n_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    assert n_threads == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, x: (ids, x[:, 1:]), "31"),
        (lambda ids, x: (ids, x[0]), "32"),
        (lambda ids, x: (ids, x.astype(np.float64)), "float64"),
        (lambda ids, x: (ids, np.where(x == x[2, 3], np.float32("nan"), x)), "nan"),
        (lambda ids, x: (ids, np.where(x == x[2, 3], np.float32("-inf"), x)), "-inf"),
        (lambda ids, x: (ids[1:], x), "4"),
        (lambda ids, x: (ids[:, None], x), "5, 1"),
        (lambda ids, x: (ids.astype(np.int32), x), "int32"),
        (lambda ids, x: (ids - 3, x), "-3"),
    ],
)
def test_what_is_wrong_with_rows_is_told(
    rng: np.random.Generator, change: Callable[[Ids, Floats], tuple[Ids, Floats]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        INDEXES["flat"](DIM).add(*change(np.arange(5), signs(rng, 5, DIM)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: INDEXES["binary"](12), "multiple of 8, got 12"),
        (lambda: HNSWIndex(DIM, M=1), "M .* 2, got 1"),
        (lambda: HNSWIndex(DIM, buffer=-1), "-1"),
        (lambda: HNSWIndex(DIM, block=0), "block"),
        (lambda: HNSWIndex(DIM, ef_search=0), "ef_search"),
        (lambda: INDEXES["refined"](8, exact=0), "exact must be at least 1"),
        (lambda: INDEXES["refined"](8, candidates=0), "candidates must be at least 1"),
        (lambda: AutoIndex(8, switch=0), "switch must be at least 1"),
        (lambda: AutoIndex(8, probes=0), "probes"),
        (lambda: AutoIndex(8, compared=-1), "compared"),
        (lambda: LSHIndex(8, threshold=0.0), r"threshold=0\.0"),
        (lambda: LSHIndex(8, threshold=1.1), r"threshold=1\.1"),
        (lambda: LSHIndex(8, recall=0.0), r"recall=0\.0"),
        (lambda: LSHIndex(8, recall=1.0), r"recall=1\.0"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Index], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_binary_is_small_and_takes_zero_for_negative(rng: np.random.Generator) -> None:
    index, x = INDEXES["binary"](DIM), signs(rng, 1, DIM)
    index.add(np.arange(1000), signs(rng, 1000, DIM))
    assert index.nbytes == 1000 * (DIM // 8 + 8)
    x[0, :8] = -abs(x[0, :8])
    index.add(np.arange(1), np.where(np.arange(DIM) < 8, np.float32(0), x))
    ids, similarity = index.search(x, 1)
    assert (ids.tolist(), similarity.tolist()) == ([[0]], [[1]])


def small_graph(**options: int) -> Pair:
    """A graph that fills early: most rows are in it after a few hundred."""
    return Pair(HNSWIndex(DIM, **{"buffer": 100, "block": 50, **options}))


@pytest.mark.parametrize("buffer", [0, 100])
def test_hnsw_finds_rows_across_drains(rng: np.random.Generator, buffer: int) -> None:
    pair, x = small_graph(buffer=buffer), directions(rng, 1500)
    for start in range(0, 1500, 30):
        pair.add(np.arange(start, start + 30), x[start : start + 30])
    assert pair.recall(directions(rng, 50), 8) > 0.97
    assert (pair.index.search(x, 1)[0][:, 0] == np.arange(1500)).mean() > 0.99


def test_hnsw_skips_tombstones_and_rebuilds(rng: np.random.Generator) -> None:
    pair, x = small_graph(), directions(rng, 1000)
    pair.add(np.arange(1000), x)
    full = pair.index.nbytes
    for start in range(0, 800, 100):  # more than half are dead on the way
        pair.remove(np.arange(start, start + 100))
        assert pair.recall(x[start : start + 50], 8) > 0.97  # the nearest of each has just died
        assert len(pair.index._buffer) <= 100  # what outlives a rebuild does not all wait outside
    assert pair.index.nbytes < full / 2


def test_hnsw_serves_the_new_row_of_an_id(rng: np.random.Generator) -> None:
    pair = small_graph()
    for _ in range(4):
        pair.add(np.arange(400), directions(rng, 400))
        assert pair.recall(directions(rng, 50), 8) > 0.97


def test_hnsw_finds_the_living_behind_many_dead(rng: np.random.Generator) -> None:
    """Twice more dead neighbours than a search looks at stand before the first one alive."""
    query = directions(rng, 1)
    near = query + 0.01 * directions(rng, 300)
    pair, x = small_graph(ef_search=16), np.concatenate([near, directions(rng, 600)])
    pair.add(np.arange(900), x / np.linalg.norm(x, axis=1, keepdims=True))
    pair.remove(np.arange(300))
    assert pair.recall(query, 4) == 1


def test_hnsw_is_exact_again_when_few_are_left(rng: np.random.Generator) -> None:
    pair = small_graph(M=2, ef_construction=1, ef_search=1)
    pair.add(np.arange(600), directions(rng, 600))
    assert pair.recall(directions(rng, 50), 8) < 1  # so poor a graph misses some
    pair.remove(np.arange(80, 600))
    pair.check_exact(directions(rng, 50), 8)


def test_hnsw_marks_what_it_cannot_reach(rng: np.random.Generator) -> None:
    pair = small_graph(M=2, ef_construction=1, buffer=0)
    pair.add(np.arange(600), directions(rng, 600))
    missing = pair.search(directions(rng, 20), 600) == -np.inf
    assert missing.any() and not missing.all()


@pytest.mark.parametrize("dim", [32, 21])
def test_refined_overlooks_next_to_nothing_and_stays_right_as_rows_come_and_go(dim: int) -> None:
    rng = np.random.default_rng(0)

    def near(centres: Floats, n: int) -> Floats:
        return paraphrases(rng, centres, n)

    centres = 2.0 + rng.standard_normal((40, dim)).astype(np.float32)  # far from zero: raw signs would say little
    pair = Pair(INDEXES["refined"](dim, exact=100, candidates=64))
    pair.add(np.arange(1500), near(centres, 1500))
    pair.remove(np.arange(0, 1500, 3))
    pair.add(np.arange(400), near(centres, 400))
    assert pair.recall(near(centres, 200), 1) > 0.97
    pair.remove(np.arange(60, 1500))
    pair.check_exact(near(centres, 20), 5)


SWITCH = 200


def check_lists(file: InvertedFile) -> None:
    """Each row held is in one list that is open, where its slot says, with bits of its own."""
    lists, numbers = file._lists, sorted(file._to_revise)
    assert numbers == sorted(file._centroids.ids().tolist())
    assert sorted(numbers + file._unused) == list(range(MOST))
    held = [slot for number in numbers for slot in lists.slots(number).tolist()]
    assert sorted(held) == sorted(file._slot_of.values())
    assert sum(lists.length(number) for number in range(MOST)) == len(file)
    for number in numbers:
        slots, codes = lists._contents(number)
        assert (lists._list_of[slots] == number).all()
        assert np.array_equal(lists._place_of[slots], np.arange(len(slots)))
        assert np.array_equal(codes, lists.encode(file._rows.take(slots)))
    for name, slot in file._slot_of.items():
        assert file._ids[slot] == name


def centres(rng: np.random.Generator) -> Floats:
    return 1 + rng.standard_normal((60, DIM)).astype(np.float32)


@pytest.mark.slow
def test_auto_is_refined_until_all_rows_have_moved_and_no_call_moves_many(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    add = InvertedFile.add
    monkeypatch.setattr(InvertedFile, "add", lambda file, ids, x: (moved.append(len(ids)), add(file, ids, x))[1])
    middles = centres(rng)
    index, small, queries = AutoIndex(DIM, switch=SWITCH), RefinedIndex(DIM), paraphrases(rng, middles, 5)
    pair = Pair(index)
    for name, row in enumerate(paraphrases(rng, middles, 600)):
        pair.add(np.array([name]), row[None])
        small.add(np.array([name]), row[None])
        if index._refined is not None:
            for ours, theirs in zip(index.search(queries, 4), small.search(queries, 4), strict=True):
                assert np.array_equal(ours, theirs)
    assert index._refined is None and len(index._file) == 600
    assert max(moved) <= 17 and sum(moved) >= 600
    assert pair.recall(paraphrases(rng, middles, 100), 4) > 0.97


@pytest.mark.slow
def test_auto_finds_what_is_held_and_nothing_else_as_rows_come_change_and_go(rng: np.random.Generator) -> None:
    """Lists are split while there are more and more rows, and dissolved while they leave."""
    middles = centres(rng)
    index = AutoIndex(DIM, switch=SWITCH)
    pair = Pair(index)
    for start in range(0, 3000, 100):
        pair.add(np.arange(start, start + 100), paraphrases(rng, middles, 100))
    n_lists = len(index._file._centroids)
    assert n_lists > 30
    for start in range(0, 2900, 100):
        pair.remove(rng.permutation(3000)[:100])
        pair.remove(np.arange(start, start + 50))
        pair.add(np.arange(start, start + 10), paraphrases(rng, middles, 10))
        assert pair.recall(paraphrases(rng, middles, 20), 4) > 0.97
    assert len(index._file._centroids) < n_lists
    check_lists(index._file)
    pair.check_vectors()
    pair.remove(np.array([*pair.rows])[20:])
    pair.check_exact(directions(rng, 20), 5)  # so few that all are compared
    pair.add(np.arange(10**6, 10**6 + 900), paraphrases(rng, middles, 900))
    assert index._refined is None
    assert pair.recall(paraphrases(rng, middles, 100), 1) > 0.97


@pytest.mark.slow
def test_auto_finds_rows_of_topics_that_come_later(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows leave as come, and those that come are unlike those by which lists began."""
    monkeypatch.setattr("llmcache.matching.index.inverted_file._LONGEST", 16)
    index = AutoIndex(DIM, switch=SWITCH, probes=4)
    pair = Pair(index)
    pair.add(np.arange(2000), paraphrases(rng, centres(rng), 2000))
    for start in range(2000, 8000, 50):
        if start % 2000 == 0:
            middles = centres(rng) * np.float32(-1) ** (start // 2000)
        pair.add(np.arange(start, start + 50), paraphrases(rng, middles, 50))
        pair.remove(np.arange(start - 2000, start - 1950))
    assert pair.recall(paraphrases(rng, middles, 200), 1) > 0.97
    check_lists(index._file)


@pytest.mark.slow
def test_no_insertion_into_lists_reads_many_rows(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is split, and one that is revised: at most two of them, however many rows are held."""
    monkeypatch.setattr("llmcache.matching.index.inverted_file._LONGEST", 16)
    index = AutoIndex(DIM, switch=SWITCH)
    index.add(np.arange(4000), paraphrases(rng, centres(rng), 4000))
    read = [0]
    take = Blocks.take
    monkeypatch.setattr(Blocks, "take", lambda blocks, numbers: (read.append(len(numbers)), take(blocks, numbers))[1])
    most = 0
    for name, row in enumerate(paraphrases(rng, centres(rng), 1000)):
        before = len(read)
        index.add(np.array([4000 + name]), row[None])
        most = max(most, sum(read[before:]))
    assert 16 < most <= 3 * index._file._longest


@pytest.mark.parametrize("n_first", [0, 100, 300])
def test_rows_that_come_at_once_are_found_as_others(n_first: int, rng: np.random.Generator) -> None:
    pair, middles = Pair(AutoIndex(DIM, switch=SWITCH)), centres(rng)
    for n in (n_first, 5000, 0):
        first = len(pair.rows)
        pair.add(np.arange(first, first + n), paraphrases(rng, middles, n))
    assert pair.index._refined is None
    assert pair.recall(paraphrases(rng, middles, 100), 1) > 0.97
    check_lists(pair.index._file)


@pytest.mark.slow
def test_auto_finds_the_same_rows_after_the_same_calls(rng: np.random.Generator) -> None:
    middles = centres(rng)
    x, queries = paraphrases(rng, middles, 1000), directions(rng, 50)
    found = []
    for _ in range(2):
        index = AutoIndex(DIM, switch=SWITCH, probes=1)
        for start in range(0, 1000, 40):
            index.add(np.arange(start, start + 40), x[start : start + 40])
            index.remove(np.arange(start, start + 7))
        found.append(index.search(queries, 3))
    assert all(np.array_equal(*both) for both in zip(*found, strict=True))


def test_auto_holds_many_equal_rows(rng: np.random.Generator) -> None:
    pair = Pair(AutoIndex(DIM, switch=SWITCH))
    pair.add(np.arange(1000), np.repeat(directions(rng, 1), 1000, axis=0))
    pair.add(np.arange(1000, 1400), directions(rng, 400))
    pair.remove(np.arange(990))
    assert pair.recall(pair.index.vectors(np.array([990])), 1) == 1


@pytest.mark.slow
@pytest.mark.parametrize("n", [SWITCH + 5, 900])  # rows are moving; all have moved
def test_auto_stays_whole_wherever_memory_runs_out(n: int, rng: np.random.Generator) -> None:
    middles = centres(rng)
    pair = Pair(AutoIndex(DIM, switch=SWITCH))
    for start in range(0, n, 5):
        pair.add(np.arange(start, start + 5), paraphrases(rng, middles, 5))
    held = pair.index._file._lists
    lists = held._held = ShortOfMemory(held._held)
    for name in range(n, n + 400):
        try:
            pair.add(np.array([name]), paraphrases(rng, middles, 1))
        except MemoryError:
            pair.index.remove(np.array([name]))
        assert pair.recall(paraphrases(rng, middles, 2), 4) > 0.7
    assert lists.n_failed > 40
    check_lists(pair.index._file)
    held._held = lists.real
    for name in range(n + 400, n + 800):
        pair.add(np.array([name]), paraphrases(rng, middles, 1))
    assert pair.index._refined is None
    assert pair.recall(paraphrases(rng, middles, 100), 4) > 0.97


class ShortOfMemory:
    """Inverted lists of which every ninth to grow does not."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.n_grown = self.n_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def resize(self, number: int, length: int) -> None:
        if length > self.real.list_size(number):
            self.n_grown += 1
            if self.n_grown % 9 == 0:
                self.n_failed += 1
                raise MemoryError
        self.real.resize(number, length)


def signatures(rng: np.random.Generator, jaccard: float, n: int, dim: int = 128) -> tuple[Floats, Floats]:
    """Signatures of pairs of sets, by definition of MinHash: each entry agrees with probability `jaccard`."""
    first, other = (rng.integers(2**24, size=(n, dim)).astype(np.float32) for _ in range(2))
    return first, np.where(rng.random((n, dim)) < jaccard, first, other)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
def test_lsh_finds_what_reaches_its_threshold(threshold: float, rng: np.random.Generator) -> None:
    """Rows at, above and far under the threshold."""
    stored, asked = signatures(rng, threshold, 600)
    pair = Pair(LSHIndex(128, threshold=threshold, recall=0.95))
    pair.add(np.arange(600), stored)
    found = pair.index.search(asked, 1)[0][:, 0] == np.arange(600)
    np.testing.assert_allclose(pair.search(asked, 1)[found, 0], (asked == stored)[found].mean(axis=1), atol=1e-6)
    promised = chance_to_meet(threshold, 128, pair.index.width)
    assert promised >= 0.95
    assert found.mean() == pytest.approx(promised, abs=4 * np.sqrt(promised * (1 - promised) / 600) + 1e-9)
    nearly = np.where(rng.random((600, 128)) < 0.1, asked, stored)
    assert pair.recall(nearly[:100], 1) > 0.99
    far, _ = signatures(rng, 0.0, 100)
    assert (pair.search(far, 1) == -np.inf).all()


def test_lsh_looks_at_few_rows_where_the_threshold_is_high(rng: np.random.Generator) -> None:
    """What makes it an index: unlike rows are not compared."""
    stored, asked = signatures(rng, 0.2, 500)
    index = LSHIndex(128, threshold=0.8)
    index.add(np.arange(500), stored)
    assert (index.search(asked, 1)[0] == -1).mean() > 0.99


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99])
def test_lsh_takes_the_widest_bands_that_keep_the_recall(recall: float) -> None:
    for threshold in (0.1, 0.5, 0.9, 1.0):
        width = LSHIndex(128, threshold, recall).width
        assert chance_to_meet(threshold, 128, width) >= recall
        assert width == 64 or chance_to_meet(threshold, 128, width + 1) < recall
