"""Measure `store_workers`: hit rates of workers that share what they learn and compute, beside one that sees all.

| way | workers | which requests each is asked | what each finds |
|---|---|---|---|
| `one` | 1 | all | what it computed itself |
| `shared` | several | one of so many, in turn | what any of them computed, through a Redis |
| `separate` | as many | likewise | what it computed itself |
| `routed` | as many | those whose text a consistent hash gives it | what it computed itself |

These requests have no session to route by. A hash of the text brings equal texts together, and no similar ones.

Each worker is a process that loads one calibration with growing sources, made of the first requests, and is then asked
its share of the later ones, one after the other, while the others are asked theirs. Every answer is held against the
model alone.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment, later
from experiments.methods.base import COMPUTED
from experiments.methods.cached import configure
from experiments.metrics.metrics import figures_of
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import check_installed, redis_server
from experiments.support.ring import Ring
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Answer, Workload
from llmcache import CacheConfig, ConfigError, LLMCache

ONE, SHARED, SEPARATE, ROUTED = "one", "shared", "separate", "routed"
_PATIENCE_S = 120.0  # for the slowest worker to be ready

_all_ready: Barrier | None = None  # of this process, where it is a worker


class StoreWorkers(LearningExperiment):
    """Settings of the measure. The calibration's sources grow, and its claim is the least of `max_drops`."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2)], ...], ONE_OR_MORE] = Field(default=(4,), min_length=1)

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Ways and numbers of workers; one worker is the same in every way."""
        return [(ONE, 1), *((way, n) for n in self.workers for way in (SHARED, SEPARATE, ROUTED))]


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker answered."""

    number: int  # of the request
    served: str
    answer: Answer
    ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker did."""

    told: Sequence[Told]
    n_errors: int
    n_fetched: int  # values that it had from the store


@dataclass(frozen=True, slots=True)
class Way:
    """What became of the later requests in one way."""

    name: str
    n_workers: int
    limit: float
    reports: Sequence[Report]  # one a worker

    @property
    def told(self) -> list[Told]:
        """In the order of the requests."""
        return sorted((one for report in self.reports for one in report.told), key=lambda one: one.number)

    def seconds(self, is_hit: bool) -> list[float]:
        """Of calls that computed, or that others' entries served."""
        return [one.ms / 1e3 for one in self.told if one.served != "exact" and (one.served != COMPUTED) == is_hit]

    def total(self, name: str) -> int:
        """A count of all workers."""
        return sum(getattr(one, name) for one in self.reports)


def run(experiment: StoreWorkers, folders: Folders) -> Outcome:
    """Serve the stream in each way."""
    check_installed()
    workload = experiment.stream(folders)
    counted, base = later(workload, experiment.learn), _alone(workload, experiment.learn)
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    for way in serve_all(experiment, workload):
        told = way.told
        served = np.array([one.served for one in told])
        figures = figures_of(counted, base, [one.answer for one in told], served, experiment.seed)
        lost = 100 * (summary[0]["hit_rate"] - figures["hit_rate"]) if summary else None
        about = {"way": way.name, "workers": way.n_workers, "n": len(told), "limit": way.limit, "points_lost": lost}
        summary.append({**about, **figures, **{name: way.total(name) for name in ("n_errors", "n_fetched")}})
        rows += _rows(way, workload, base, experiment.learn)
    return Outcome(rows, {**experiment.about(workload), "learn": experiment.learn, "summary": summary})


def serve_all(experiment: StoreWorkers, workload: Workload) -> Iterator[Way]:
    """Serve the later requests in each way, from the same calibration; what one left in the Redis the next has not."""
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        limits: dict[Path, float] = {}
        for way, n_workers in experiment.runs:
            folder = Path(place) / ("shared" if way == SHARED else "alone")
            if folder not in limits:
                store = {"store": {"name": "redis", "url": server.url}} if way == SHARED else {}
                limits[folder] = calibrate(experiment, workload, store, folder)
            server.remove_values()
            shares = shares_of(way, [request.text for request in workload.requests], experiment.learn, n_workers)
            yield Way(way, n_workers, limits[folder], _serve(workload, folder, shares))


def shares_of(way: str, texts: Sequence[str], first: int, n_workers: int) -> list[Sequence[int]]:
    """The numbers of the requests from `first` on that each worker is asked."""
    numbers = range(first, len(texts))
    if way != ROUTED:
        return [numbers[i::n_workers] for i in range(n_workers)]
    ring = Ring(n_workers)
    owners = [ring.of(texts[number]) for number in numbers]
    return [[number for number, owner in zip(numbers, owners, strict=True) if owner == i] for i in range(n_workers)]


def _alone(workload: Workload, first: int) -> list[Answer]:
    """What the model alone answers the later requests."""
    numbers = range(first, len(workload.requests))
    with torch.inference_mode():
        return [
            workload.answer(workload.module(**workload.requests[number].inputs), number)
            for number in tracked(numbers, len(numbers), "The model alone")
        ]


def calibrate(experiment: StoreWorkers, workload: Workload, store: Mapping[str, Any], folder: Path) -> float:
    """Save a calibrated cache for the workers to load; returns its limit."""
    claim = {"sources": "growing", "max_drop": min(experiment.max_drops), "audit": 0}
    config: CacheConfig = configure(workload, {**experiment.cache, **claim, **store})
    requests = workload.requests[: experiment.learn]
    with LLMCache.wrap(workload.module, config=config, tokenizer=workload.tokenizer) as cache:
        found = cache.calibrate([request.inputs for request in requests], seed=experiment.seed)
        if found.chosen is None:
            raise ConfigError(f"max_drops={experiment.max_drops}: nothing could be reused: allow more")
        cache.save(folder)
    return found.chosen.limit


def _serve(workload: Workload, folder: Path, shares: Sequence[Sequence[int]]) -> list[Report]:
    """Have workers serve requests, each its share."""
    given = folder.with_name("workload")
    given.write_bytes(pickle.dumps(workload))
    context = get_context("spawn")
    barrier = context.Barrier(len(shares))
    with ProcessPoolExecutor(len(shares), mp_context=context, initializer=_begin, initargs=(barrier,)) as pool:
        working = [pool.submit(_work, given, folder, share) for share in shares]
        return [worker.result() for worker in working]


def _begin(barrier: Barrier) -> None:
    global _all_ready
    _all_ready = barrier
    torch.set_num_threads(1)


def _work(given: Path, folder: Path, numbers: Sequence[int]) -> Report:
    """Load the calibration, and serve some requests once all are ready to."""
    workload: Workload = pickle.loads(given.read_bytes())
    told = []
    with LLMCache.load(workload.module, folder, tokenizer=workload.tokenizer) as cache:
        assert _all_ready is not None
        _all_ready.wait(_PATIENCE_S)
        for number in numbers:
            began = perf_counter()
            output = cache(**workload.requests[number].inputs)
            ms = 1e3 * (perf_counter() - began)
            told.append(Told(number, cache.last[0].rung or COMPUTED, workload.answer(output, number), ms))
        stats = cache.stats()
    return Report(told, stats.errors, 0 if stats.store is None else stats.store.n_found)


def _rows(way: Way, workload: Workload, base: Sequence[Answer], first: int) -> Iterator[dict[str, Any]]:
    for worker, report in enumerate(way.reports):
        for one in report.told:
            is_changed = workload.is_changed(base[one.number - first], one.answer)
            yield {
                "way": way.name,
                "workers": way.n_workers,
                "worker": worker,
                "number": one.number,
                "served": one.served,
                "is_changed": bool(is_changed),
                "ms": one.ms,
            }
