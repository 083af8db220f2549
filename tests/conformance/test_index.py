"""Every index against an exact twin, and what is special about each."""

from collections.abc import Callable, Iterator

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcache.arrays import Floats, Ids
from llmcache.matching.index import INDEXES, HNSWIndex, Index, LSHIndex
from llmcache.matching.index.lsh import chance_to_meet
from tests.conformance.outside import Scan

DIM = 32
ALL = {**INDEXES, "outside": Scan}

# Bands of one entry: a row is overlooked only if it has not a single entry in common.
OPTIONS = {"lsh": {"threshold": 0.01}}


class Twin:
    """What an index must do, in the plainest way. Similarity is the inner product; to `lsh`, the share equal."""

    def __init__(self, like: Index | None = None) -> None:
        self.rows: dict[int, Floats] = {}
        self.alike = (lambda a, b: np.mean(a == b)) if isinstance(like, LSHIndex) else np.dot

    def add(self, ids: Ids, x: Floats) -> None:
        self.rows.update(zip(ids.tolist(), x.copy(), strict=True))

    def remove(self, ids: Ids) -> None:
        for name in ids.tolist():
            self.rows.pop(name, None)

    def similarity(self, query: Floats, ids: Ids) -> Floats:
        return np.array([self.alike(query, self.rows[name]) for name in ids.tolist()], np.float32)

    def best(self, query: Floats, k: int) -> Floats:
        return np.sort([self.alike(query, row) for row in self.rows.values()])[::-1][:k].astype(np.float32)


def signs(rng: np.random.Generator, n: int) -> Floats:
    """Floats that every kind of index holds exactly."""
    return ((2 * rng.integers(2, size=(n, DIM)) - 1) / np.sqrt(DIM)).astype(np.float32)


def directions(rng: np.random.Generator, n: int) -> Floats:
    """Floats anywhere on the sphere."""
    x = rng.standard_normal((n, DIM)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def check_exact(index: Index, twin: Twin, queries: Floats, k: int) -> None:
    """The index finds what the twin finds. Among equals any order will do."""
    ids, similarity = index.search(queries, k)
    assert len(index) == len(twin.rows)
    assert ids.dtype == np.int64 and similarity.dtype == np.float32
    assert ids.shape == similarity.shape == (len(queries), min(k, len(twin.rows)))
    for query, found, claimed in zip(queries, ids, similarity, strict=True):
        assert len(set(found.tolist())) == len(found)
        np.testing.assert_allclose(claimed, twin.similarity(query, found), atol=1e-6)
        np.testing.assert_allclose(claimed, twin.best(query, k), atol=1e-6)


def recall(index: Index, twin: Twin, queries: Floats, k: int) -> float:
    """Share of results as similar as the twin's; each must be alive and as similar as claimed."""
    ids, similarity = index.search(queries, k)
    assert ids.shape == (len(queries), min(k, len(twin.rows)))
    n_good = 0
    for query, found, claimed in zip(queries, ids, similarity, strict=True):
        np.testing.assert_allclose(claimed, twin.similarity(query, found), atol=1e-6)
        n_good += int((claimed >= twin.best(query, k)[-1] - 1e-6).sum())
    return n_good / ids.size


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


@pytest.mark.parametrize("k", [1, 7, 1000])
@pytest.mark.parametrize("n", [1, 300])
def test_finds_the_best_first(index: Index, rng: np.random.Generator, n: int, k: int) -> None:
    twin, ids, x = Twin(index), rng.permutation(10**12 + np.arange(n)), signs(rng, n)
    twin.add(ids, x)
    for start in range(0, n, 90):
        index.add(ids[start : start + 90], x[start : start + 90])
    check_exact(index, twin, signs(rng, 5), k)


@pytest.mark.parametrize("name", ["flat", "hnsw", "outside"])
def test_finds_directions(name: str, rng: np.random.Generator) -> None:
    index, twin, x = ALL[name](DIM), Twin(), directions(rng, 300)
    for held in index, twin:
        held.add(np.arange(300), x)
    check_exact(index, twin, directions(rng, 30), 8)


def test_empty_gives_empty_arrays(index: Index, rng: np.random.Generator) -> None:
    for _ in "never filled", "emptied":
        check_exact(index, Twin(index), signs(rng, 3), 4)
        index.add(np.arange(5), signs(rng, 5))
        index.remove(np.arange(5))


def test_nothing_asked_or_given_is_fine(index: Index, rng: np.random.Generator) -> None:
    none = signs(rng, 0)
    index.add(np.arange(0), none)
    assert len(index) == 0
    index.add(np.arange(3), signs(rng, 3))
    index.remove(np.arange(0))
    assert len(index) == 3
    ids, similarity = index.search(none, 2)
    assert ids.shape == similarity.shape == (0, 2)


def test_known_id_is_overwritten(index: Index, rng: np.random.Generator) -> None:
    twin = Twin(index)
    for _ in range(3):
        ids, x = rng.permutation(40)[:30], signs(rng, 30)
        for held in index, twin:
            held.add(ids, x)
        check_exact(index, twin, x[:3], 50)


def test_of_an_id_given_twice_the_last_row_counts(index: Index, rng: np.random.Generator) -> None:
    x = signs(rng, 4)
    index.add(np.array([7, 8, 7, 7]), x)
    assert len(index) == 2
    ids, similarity = index.search(x[3:], 1)
    assert ids.tolist() == [[7]]
    np.testing.assert_allclose(similarity, 1, atol=1e-6)


def test_removed_rows_are_gone(index: Index, rng: np.random.Generator) -> None:
    twin, x = Twin(index), signs(rng, 100)
    for held in index, twin:
        held.add(np.arange(100), x)
        held.remove(np.array([0, 99, 50, 50, 12345, -1]))
        held.remove(np.arange(20, 60))
    check_exact(index, twin, x[:60], 100)
    for held in index, twin:
        held.add(np.arange(90, 130), x[:40])
    check_exact(index, twin, x[:60], 100)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"lsh"}))  # which finds nothing that has nothing in common
def test_dead_rows_do_not_hide_opposite_ones(name: str, rng: np.random.Generator) -> None:
    """What is left of a removed row, zeros say, is more similar than rows that point away."""
    index, query = ALL[name](DIM), signs(rng, 1)
    index.add(np.arange(20), np.repeat(query, 20, axis=0))
    index.add(np.arange(20, 25), np.repeat(-query, 5, axis=0))
    index.remove(np.arange(20))
    ids, similarity = index.search(query, 8)
    assert sorted(ids[0].tolist()) == [20, 21, 22, 23, 24]
    np.testing.assert_allclose(similarity, -1, atol=1e-6)


def test_arrays_of_the_caller_stay_his(index: Index, rng: np.random.Generator) -> None:
    ids, x = np.arange(10), signs(rng, 10)
    kept_ids, kept = ids.copy(), x.copy()
    index.add(ids, x)
    found, similarity = index.search(x, 3)
    assert np.array_equal(ids, kept_ids) and np.array_equal(x, kept)
    ids[:], x[:] = 0, 1
    found[:], similarity[:] = 5, 5
    again, scores = index.search(kept, 1)
    assert again[:, 0].tolist() == kept_ids.tolist()
    np.testing.assert_allclose(scores, 1, atol=1e-6)


def test_layout_in_memory_does_not_matter(index: Index, rng: np.random.Generator) -> None:
    twin, x = Twin(index), np.asfortranarray(np.repeat(signs(rng, 40), 2, axis=0))[::2]
    for held in index, twin:
        held.add(np.arange(80)[::2], x)
    check_exact(index, twin, x[::3], 5)


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
def test_wrong_rows_are_refused_whole(
    index: Index, rng: np.random.Generator, change: Callable[[Ids, Floats], tuple[Ids, Floats]], message: str
) -> None:
    twin, x = Twin(index), signs(rng, 5)
    for held in index, twin:
        held.add(np.arange(5), x)
    ids, wrong = change(np.arange(5), signs(rng, 5))
    with pytest.raises(ValueError, match=message):
        index.add(ids, wrong)
    check_exact(index, twin, x, 5)


def test_wrong_questions_are_refused(index: Index, rng: np.random.Generator) -> None:
    x = signs(rng, 2)
    for _ in "empty", "filled":
        with pytest.raises(ValueError, match="got 0"):
            index.search(x, 0)
        with pytest.raises(ValueError, match="31"):
            index.search(x[:, 1:], 1)
        with pytest.raises(ValueError, match="nan"):
            index.search(x * np.float32("nan"), 1)
        with pytest.raises(ValueError, match="int32"):
            index.remove(np.arange(2, dtype=np.int32))
        index.add(np.arange(2), x)


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_dimension_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="got 0"):
        ALL[name](0)


def test_nbytes_follows_the_rows(index: Index, rng: np.random.Generator) -> None:
    empty = index.nbytes
    index.add(np.arange(100), signs(rng, 100))
    full = index.nbytes
    assert full - empty >= 100 * DIM // 8
    index.add(np.arange(100), signs(rng, 100))
    assert index.nbytes == full
    index.remove(np.arange(100))
    assert index.nbytes == empty


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), st.lists(st.integers(0, 30), max_size=12), st.integers(0, 99)),
    max_size=12,
)


@pytest.mark.parametrize("name", sorted(ALL))
@settings(deadline=None)
@given(steps=STEPS)
def test_any_sequence_agrees_with_the_twin(name: str, steps: list[tuple[str, list[int], int]]) -> None:
    index = ALL[name](DIM, **OPTIONS.get(name, {}))
    twin = Twin(index)
    for verb, names, seed in steps:
        rng, ids = np.random.default_rng(seed), np.array(names, np.int64)
        x = signs(rng, len(ids))
        for held in index, twin:
            held.add(ids, x) if verb == "add" else held.remove(ids)
        check_exact(index, twin, signs(rng, 2), 5)


@settings(deadline=None)
@given(steps=STEPS)
def test_hnsw_shows_no_dead_row_after_any_sequence(steps: list[tuple[str, list[int], int]]) -> None:
    index, twin = HNSWIndex(DIM, buffer=3, block=2), Twin()
    for verb, names, seed in steps:
        rng, ids = np.random.default_rng(seed), np.array(names, np.int64)
        x = directions(rng, len(ids))
        for held in index, twin:
            held.add(ids, x) if verb == "add" else held.remove(ids)
        assert len(index) == len(twin.rows)
        (query,) = directions(rng, 1)
        (found,), (claimed,) = index.search(query[None], 5)
        assert len(found) == min(5, len(twin.rows))
        found = found[found >= 0]
        assert len(set(found.tolist())) == len(found)
        np.testing.assert_allclose(claimed[: len(found)], twin.similarity(query, found), atol=1e-6)


def test_binary_needs_whole_bytes() -> None:
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        INDEXES["binary"](12)


def test_binary_is_small(rng: np.random.Generator) -> None:
    index = INDEXES["binary"](DIM)
    index.add(np.arange(1000), signs(rng, 1000))
    assert index.nbytes == 1000 * (DIM // 8 + 8)


def test_binary_takes_zero_for_negative(rng: np.random.Generator) -> None:
    index, x = INDEXES["binary"](DIM), signs(rng, 1)
    x[0, :8] = -abs(x[0, :8])
    index.add(np.arange(1), np.where(np.arange(DIM) < 8, np.float32(0), x))
    np.testing.assert_array_equal(index.search(x, 1)[1], [[1]])


def small_graph(**options: int) -> HNSWIndex:
    """A graph that fills early: most rows are in it after a few hundred."""
    return HNSWIndex(DIM, **{"buffer": 100, "block": 50, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"M": 1}, "M .* 2, got 1"), ({"buffer": -1}, "-1"), ({"block": 0}, "block"), ({"ef_search": 0}, "ef_search")],
)
def test_hnsw_refuses_small_numbers(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HNSWIndex(DIM, **options)


@pytest.mark.parametrize("buffer", [0, 100])
def test_hnsw_finds_rows_across_drains(rng: np.random.Generator, buffer: int) -> None:
    index, twin, x = small_graph(buffer=buffer), Twin(), directions(rng, 1500)
    for start in range(0, 1500, 30):
        index.add(np.arange(start, start + 30), x[start : start + 30])
    twin.add(np.arange(1500), x)
    assert len(index) == 1500
    assert recall(index, twin, directions(rng, 50), 8) > 0.97
    assert (index.search(x, 1)[0][:, 0] == np.arange(1500)).mean() > 0.99


def test_hnsw_skips_tombstones_and_rebuilds(rng: np.random.Generator) -> None:
    index, twin, x = small_graph(), Twin(), directions(rng, 1000)
    for held in index, twin:
        held.add(np.arange(1000), x)
    full = index.nbytes
    for start in range(0, 800, 100):  # more than half are dead on the way
        dead = np.arange(start, start + 100)
        for held in index, twin:
            held.remove(dead)
        assert len(index) == 1000 - start - 100
        assert recall(index, twin, x[start : start + 50], 8) > 0.97  # the nearest of each has just died
        assert len(index._buffer) <= 100  # what outlives a rebuild does not all wait outside
    assert index.nbytes < full / 2


def test_hnsw_serves_the_new_row_of_an_id(rng: np.random.Generator) -> None:
    index, twin = small_graph(), Twin()
    for _ in range(4):
        x = directions(rng, 400)
        for held in index, twin:
            held.add(np.arange(400), x)
        assert len(index) == 400
        assert recall(index, twin, directions(rng, 50), 8) > 0.97


def test_hnsw_finds_the_living_behind_many_dead(rng: np.random.Generator) -> None:
    """Twice more dead neighbours than a search looks at stand before the first one alive."""
    query = directions(rng, 1)
    near = query + 0.01 * directions(rng, 300)
    index, twin, x = small_graph(ef_search=16), Twin(), np.concatenate([near, directions(rng, 600)])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for held in index, twin:
        held.add(np.arange(900), x)
        held.remove(np.arange(300))
    assert recall(index, twin, query, 4) == 1


def test_hnsw_is_exact_again_when_few_are_left(rng: np.random.Generator) -> None:
    index, twin, x = small_graph(M=2, ef_construction=1, ef_search=1), Twin(), directions(rng, 600)
    for held in index, twin:
        held.add(np.arange(600), x)
    with pytest.raises(AssertionError):
        check_exact(index, twin, directions(rng, 50), 8)  # so poor a graph misses some
    for held in index, twin:
        held.remove(np.arange(80, 600))
    check_exact(index, twin, directions(rng, 50), 8)


def test_hnsw_marks_what_it_cannot_reach(rng: np.random.Generator) -> None:
    index = small_graph(M=2, ef_construction=1, buffer=0)
    index.add(np.arange(600), directions(rng, 600))
    ids, similarity = index.search(directions(rng, 20), 600)
    assert ids.shape == similarity.shape == (20, 600)
    missing = ids == -1
    assert missing.any() and not missing.all()
    assert np.array_equal(missing, similarity == -np.inf)
    assert (missing[:, 1:] >= missing[:, :-1]).all()  # after all others
    for found, is_missing in zip(ids, missing, strict=True):
        assert len(set(found[~is_missing].tolist())) == (~is_missing).sum()


@pytest.mark.parametrize("name", ALL)
def test_vectors_gives_back_what_was_added(name: str) -> None:
    index = ALL[name](16, **({"buffer": 4, "block": 2} if name == "hnsw" else {}))
    x = np.where(np.random.default_rng(0).standard_normal((12, 16)) > 0, 0.25, -0.25).astype(np.float32)
    index.add(np.arange(12), x)
    index.remove(np.array([3]))
    np.testing.assert_allclose(index.vectors(np.array([11, 0, 7])), x[[11, 0, 7]])
    assert index.vectors(np.empty(0, np.int64)).shape == (0, 16)
    with pytest.raises(KeyError):
        index.vectors(np.array([3]))


@pytest.mark.parametrize("dim", [32, 21])
def test_refined_overlooks_next_to_nothing_and_stays_right_as_rows_come_and_go(dim: int) -> None:
    rng = np.random.default_rng(0)

    def near(centres: Floats, n: int) -> Floats:
        x = centres[rng.integers(len(centres), size=n)] + 0.3 * rng.standard_normal((n, dim)).astype(np.float32)
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    centres = 2.0 + rng.standard_normal((40, dim)).astype(np.float32)  # far from zero: raw signs would say little
    index, twin = INDEXES["refined"](dim, exact=100, candidates=64), Twin()
    first, second = near(centres, 1500), near(centres, 400)
    for held in index, twin:
        held.add(np.arange(1500), first)
        held.remove(np.arange(0, 1500, 3))
        held.add(np.arange(400), second)
    assert len(index) == len(twin.rows)
    assert recall(index, twin, near(centres, 200), 1) > 0.97
    for held in index, twin:
        held.remove(np.arange(60, 1500))
    check_exact(index, twin, near(centres, 20), 5)


@pytest.mark.parametrize("option", [{"exact": 0}, {"candidates": 0}])
def test_refined_refuses_useless_sizes(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        INDEXES["refined"](8, **option)


def sets_and_signatures(rng: np.random.Generator, jaccard: float, n: int, dim: int) -> tuple[Floats, Floats]:
    """Signatures of pairs of sets, by definition of MinHash: each entry agrees with probability `jaccard`."""
    first, other = (rng.integers(2**24, size=(n, dim)).astype(np.float32) for _ in range(2))
    return first, np.where(rng.random((n, dim)) < jaccard, first, other)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
def test_lsh_finds_what_reaches_its_threshold(threshold: float, rng: np.random.Generator) -> None:
    """Against the exact twin, on rows at, above and far under the threshold."""
    stored, asked = sets_and_signatures(rng, threshold, 600, 128)
    index, twin = LSHIndex(128, threshold=threshold, recall=0.95), Twin(LSHIndex(2))
    for held in index, twin:
        held.add(np.arange(600), stored)
    ids, similarity = index.search(asked, 1)
    found = ids[:, 0] == np.arange(600)
    np.testing.assert_allclose(similarity[found, 0], (asked == stored)[found].mean(axis=1), atol=1e-6)
    promised = chance_to_meet(threshold, 128, index.width)
    assert promised >= 0.95
    assert found.mean() == pytest.approx(promised, abs=4 * np.sqrt(promised * (1 - promised) / 600) + 1e-9)
    nearly = np.where(rng.random((600, 128)) < 0.1, asked, stored)
    assert recall(index, twin, nearly[:100], 1) > 0.99
    far, _ = sets_and_signatures(rng, 0.0, 100, 128)
    assert (index.search(far, 1)[0] == -1).all()


def test_lsh_looks_at_few_rows_where_the_threshold_is_high(rng: np.random.Generator) -> None:
    """What makes it an index: unlike rows are not compared."""
    stored, asked = sets_and_signatures(rng, 0.2, 500, 128)
    index = LSHIndex(128, threshold=0.8)
    index.add(np.arange(500), stored)
    assert (index.search(asked, 1)[0] == -1).mean() > 0.99


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99])
def test_lsh_takes_the_widest_bands_that_keep_the_recall(recall: float) -> None:
    for threshold in (0.1, 0.5, 0.9, 1.0):
        width = LSHIndex(128, threshold, recall).width
        assert chance_to_meet(threshold, 128, width) >= recall
        assert width == 64 or chance_to_meet(threshold, 128, width + 1) < recall


@pytest.mark.parametrize("option", [{"threshold": 0.0}, {"threshold": 1.1}, {"recall": 0.0}, {"recall": 1.0}])
def test_lsh_refuses_shares_out_of_range(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}={next(iter(option.values()))}"):
        LSHIndex(8, **option)
