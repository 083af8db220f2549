"""Measure `index_scale`: what indexes cost and overlook, by number of vectors, their width and how they lie.

Vectors are made (`experiments.data.vectors`), never held twice, and drawn anew for each index. Searches, insertions and
removals are of one vector each, one after another, in one thread, timed from call to return.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field

from experiments.data.vectors import BLOCK, Drawn, Floats, Vectors
from experiments.measures.base import Experiment, Outcome
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.section import ONE_OR_MORE
from llmcache import INDEXES, ConfigError, Index

BATCH = 1000  # vectors that are added at a time while an index is filled
NEAREST = 1e-5  # similarities closer than this are of equally near rows


class IndexScale(Experiment):
    """Settings of the measure."""

    n: int = Field(default=10_000, ge=1)  # vectors that are held
    dim: int = Field(default=384, ge=1)
    drawn: Drawn = "paraphrases"
    indexes: Annotated[tuple[str, ...], ONE_OR_MORE] = Field(default=("auto", "flat", "hnsw"), min_length=1)
    most: dict[str, int] = Field(default_factory=dict)  # of an index: vectors beyond which it is left out
    searches: int = Field(default=1000, ge=1)
    changes: int = Field(default=1000, ge=1)  # insertions, and as many removals, once all are held

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings; see `Section.make`."""
        made = super().make(values, name)
        for index in (*made.indexes, *made.most):
            INDEXES.find(index)
        if not made.measured:
            raise ConfigError(f"most={made.most}: no index is left at n={made.n}")
        return made

    @property
    def name(self) -> str:
        return "index"

    @property
    def measured(self) -> list[str]:
        """Indexes that are not left out."""
        return [name for name in self.indexes if self.n <= self.most.get(name, self.n)]


def run(experiment: IndexScale, folders: Folders) -> Outcome:
    """Fill each index, and search and change it."""
    vectors = Vectors(experiment.drawn, experiment.n, experiment.dim, experiment.seed)
    asked = vectors.asked(experiment.searches)
    nearest = np.full(len(asked), -1, np.float32)
    for block in tracked(vectors.stored(), -(-experiment.n // BLOCK), "Comparing all"):
        np.maximum(nearest, (block @ asked.T).max(axis=0), out=nearest)
    with one_thread():
        rows = [
            {
                "index": name,
                "n": experiment.n,
                "dim": experiment.dim,
                "drawn": experiment.drawn,
                **_of_index(INDEXES[name](experiment.dim), vectors, asked, nearest, experiment),
            }
            for name in experiment.measured
        ]
    return Outcome(rows, {"task": experiment.drawn, "n": experiment.n, "model": "none", "summary": rows})


@contextmanager
def one_thread() -> Iterator[None]:
    """Let faiss use one thread: a search of one vector has nothing to share out, and would wait for a team."""
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _of_index(index: Index, vectors: Vectors, asked: Floats, nearest: Floats, experiment: IndexScale) -> dict[str, Any]:
    """What one index takes, and how often it finds a row as near as the nearest."""
    build_s, n_added = 0.0, 0
    for block in vectors.stored():
        ids = np.arange(n_added, n_added + len(block), dtype=np.int64)
        started = perf_counter()
        for start in range(0, len(block), BATCH):
            index.add(ids[start : start + BATCH], block[start : start + BATCH])
        build_s += perf_counter() - started
        n_added += len(block)
    searches = Timed()
    found = [searches.time(index.search, asked[i : i + 1], 1)[1][0, 0] for i in range(len(asked))]
    nbytes = index.nbytes / len(index)
    new = vectors.asked(experiment.searches + experiment.changes)[experiment.searches :]
    inserts, removes = Timed(), Timed()
    for i, row in enumerate(new):
        inserts.time(index.add, np.array([vectors.n + i]), row[None])
    for name in np.random.default_rng((experiment.seed, 4)).permutation(vectors.n)[: experiment.changes]:
        removes.time(index.remove, np.array([name]))
    return {
        "build_s": build_s,
        "search_p50_ms": searches.ms(50),
        "search_p99_ms": searches.ms(99),
        "recall": float((np.array(found) >= nearest - NEAREST).mean()),
        "inserts_per_s": inserts.per_s,
        "insert_p99_ms": inserts.ms(99),
        "insert_max_ms": inserts.ms(100),
        "removes_per_s": removes.per_s,
        "remove_max_ms": removes.ms(100),
        "bytes_per_entry": nbytes,
    }


class Timed:
    """Times of calls."""

    def __init__(self) -> None:
        self._s: list[float] = []

    def time(self, call: Any, *arguments: Any) -> Any:
        """What the call returns."""
        started = perf_counter()
        made = call(*arguments)
        self._s.append(perf_counter() - started)
        return made

    def ms(self, percentile: int) -> float:
        """A percentile, in milliseconds."""
        return 1e3 * float(np.percentile(self._s, percentile))

    @property
    def per_s(self) -> float:
        """Calls a second."""
        return len(self._s) / sum(self._s)
