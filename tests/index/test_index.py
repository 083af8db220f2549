"""Every index keeps the rules of its base (`check_index`); then each index's own rules."""

import threading
from collections.abc import Callable

import faiss
import numpy as np
import pytest

from llmcache.memory.index import INDEXES, AutoIndex, HNSWIndex, Index, LSHIndex
from llmcache.memory.index.lsh import chance_to_meet, share_equal
from llmcache.support.arrays import Floats
from llmcache.testing import check_index

DIM = 32


def join() -> None:
    """Wait for the threads that make inverted files."""
    for thread in threading.enumerate():
        if thread.name == "llmcache-index":
            thread.join()


class Prompt(AutoIndex):
    """Switches at eight rows, and waits for its inverted file."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, switch=8, probes=1000)

    def add(self, *rows: np.ndarray) -> None:
        super().add(*rows)
        join()


EXACT: dict[str, Callable[[int], Index]] = {
    **{name: made for name, made in INDEXES.items() if name not in ("lsh", "hnsw")},
    "all lists": Prompt,
}


def directions(rng: np.random.Generator, n: int, dim: int = DIM) -> Floats:
    """Rows anywhere on the sphere."""
    x = rng.standard_normal((n, dim)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def paraphrases(rng: np.random.Generator, centres: Floats, n: int) -> Floats:
    """Rows near some centres."""
    x = centres[rng.integers(len(centres), size=n)] + 0.05 * rng.standard_normal((n, centres.shape[1]))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def recall(index: Index, held: dict[int, Floats], queries: Floats) -> float:
    """Share of queries whose nearest row was found."""
    best = np.max(queries @ np.stack([*held.values()]).T, axis=1)
    return float((index.search(queries, 1)[1][:, 0] >= best - 1e-5).mean())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_index_keeps_the_rules(name: str) -> None:
    check_index(EXACT[name])


def test_those_that_compare_otherwise_or_may_overlook_a_row_keep_them_too() -> None:
    # Bands of one entry: a search overlooks a row only if they share no entry.
    check_index(lambda dim: LSHIndex(dim, threshold=0.01), lambda a, b: share_equal(a[None], b)[0])
    check_index(HNSWIndex, is_exact=False)
    check_index(lambda dim: AutoIndex(dim, switch=4), is_exact=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: INDEXES["binary"](12), "multiple of 8, got 12"),
        (lambda: HNSWIndex(DIM, M=1), "M .* 2, got 1"),
        (lambda: HNSWIndex(DIM, ef_search=0), "ef_search"),
        (lambda: AutoIndex(8, switch=0), "switch must be at least 1"),
        (lambda: AutoIndex(8, probes=0), "probes"),
        (lambda: LSHIndex(8, threshold=1.1), r"threshold=1\.1"),
        (lambda: LSHIndex(8, recall=0.0), r"recall=0\.0"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Index], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_search_leaves_the_number_of_threads_alone(rng: np.random.Generator) -> None:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    for make in EXACT.values():
        index = make(DIM)
        index.add(np.arange(10), directions(rng, 10))
        index.search(directions(rng, 1), 1)
        assert faiss.omp_get_max_threads() == 3
    faiss.omp_set_num_threads(before)


def test_binary_is_small_and_takes_zero_for_negative(rng: np.random.Generator) -> None:
    index, x = INDEXES["binary"](DIM), np.sign(directions(rng, 1)) / np.float32(DIM**0.5)
    x[0, :8] = -abs(x[0, :8])
    index.add(np.arange(1), np.where(np.arange(DIM) < 8, np.float32(0), x))
    assert index.nbytes == DIM // 8 + 8
    assert [found.tolist() for found in index.search(x, 1)] == [[[0]], [[1]]]


def test_hnsw_finds_rows_that_come_change_and_go(rng: np.random.Generator) -> None:
    index, held = HNSWIndex(DIM), dict[int, Floats]()
    for step in range(12):
        ids, x = rng.permutation(1000)[:300], directions(rng, 300)
        index.add(ids, x)
        held.update(zip(ids.tolist(), x, strict=True))
        gone = rng.permutation(1000)[: 60 * step]
        index.remove(gone)
        held = {name: row for name, row in held.items() if name not in gone}
        assert recall(index, held, directions(rng, 50)) > 0.97
    assert index._faiss.ntotal <= 2 * len(index)


def test_hnsw_finds_the_living_behind_many_dead(rng: np.random.Generator) -> None:
    query = directions(rng, 1)
    near = query + np.float32(0.01) * directions(rng, 300)
    x = np.concatenate([near / np.linalg.norm(near, axis=1, keepdims=True), directions(rng, 600)])
    index = HNSWIndex(DIM, ef_search=256)
    index.add(np.arange(900), x)
    index.remove(np.arange(300))
    assert recall(index, dict(enumerate(x[300:])), query) == 1
    index.remove(np.arange(350, 900))
    assert (index.search(query, 50)[0] >= 300).all()


def test_auto_searches_as_before_until_its_lists_are_there_and_finds_what_changed_meanwhile(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_train, centres = threading.Event(), directions(rng, 60)
    train = faiss.IndexIVFFlat.train
    monkeypatch.setattr(faiss.IndexIVFFlat, "train", lambda index, x: (may_train.wait(60), train(index, x))[1])
    index, held = AutoIndex(DIM, switch=500), dict[int, Floats]()

    def put(first: int, n: int) -> None:
        ids, x = np.arange(first, first + n), paraphrases(rng, centres, n)
        index.add(ids, x)
        held.update(zip(ids.tolist(), x, strict=True))

    put(0, 600)
    put(590, 100)  # ten change, ninety are new
    index.remove(np.arange(20))
    held = {name: row for name, row in held.items() if name >= 20}
    queries = paraphrases(rng, centres, 200)
    assert recall(index, held, queries) == 1
    may_train.set()
    join()
    assert recall(index, held, queries) > 0.97
    assert type(index._rows).__name__ == "InvertedFile" and len(index) == len(held)
    assert np.allclose(index.vectors(np.array([*held])), [*held.values()])
    for start in range(1000, 4000, 100):  # more than four times as many: the lists are made anew
        put(start, 100)
    join()
    assert recall(index, held, queries) > 0.97 and index._rows._faiss.nlist > 150
    index.remove(np.array([*held])[50:])
    held = dict([*held.items()][:50])
    assert recall(index, held, queries) == 1 and type(index._rows).__name__ == "FlatIndex"


def test_auto_goes_on_where_memory_runs_out(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(faiss.IndexIVFFlat, "train", fail)
    index, x = AutoIndex(DIM, switch=10), directions(rng, 30)
    for i in range(30):
        index.add(np.array([i]), x[i : i + 1])
        join()
    assert index.search(x, 1)[0][:, 0].tolist() == [*range(30)]


def test_lsh_takes_bands_as_wide_as_the_threshold_allows() -> None:
    assert LSHIndex(128, threshold=0.5).width < LSHIndex(128, threshold=0.9).width
    for threshold in (0.3, 0.5, 0.8):
        width = LSHIndex(128, threshold=threshold).width
        assert chance_to_meet(threshold, 128, width) >= 0.95 > chance_to_meet(threshold, 128, width + 1)
