"""Measure `store_workers`: hit rates of workers that share what they learn and compute, beside one that sees all.

| way | workers | what each finds |
|---|---|---|
| `one` | 1, which is asked all requests | what it computed itself |
| `shared` | several, each asked its share in turn | what any of them computed, through a Redis |
| `separate` | as many | what it computed itself |

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
from typing import Any

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
from experiments.tasks.workload import Answer, Workload
from llmcache import CacheConfig, ConfigError, LLMCache

ONE, SHARED, SEPARATE = WAYS = ("one", "shared", "separate")
_PATIENCE_S = 120.0  # for the slowest worker to be ready

_all_ready: Barrier | None = None  # of this process, where it is a worker


class StoreWorkers(LearningExperiment):
    """Settings of the measure. The calibration's sources grow, and its claim is the least of `max_drops`."""

    workers: int = Field(default=4, ge=2)


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker answered."""

    number: int  # of the request
    served: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker did."""

    told: Sequence[Told]
    n_errors: int
    n_fetched: int  # values that it had from the store


def run(experiment: StoreWorkers, folders: Folders) -> Outcome:
    """Serve the stream in each way."""
    check_installed()
    workload = experiment.stream(folders)
    base = _alone(workload, experiment.learn)
    rows, summary = [], []
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        for way in WAYS:
            store = {"store": {"name": "redis", "url": server.url}} if way == SHARED else {}
            folder = Path(place) / way
            limit = _calibrate(experiment, workload, store, folder)
            n_workers = 1 if way == ONE else experiment.workers
            reports = _serve(workload, folder, experiment.learn, n_workers)
            told = sorted((one for report in reports for one in report.told), key=lambda one: one.number)
            counted, answers = later(workload, experiment.learn), [one.answer for one in told]
            figures = figures_of(counted, base, answers, np.array([one.served for one in told]), experiment.seed)
            n_errors, n_fetched = (sum(getattr(one, name) for one in reports) for name in ("n_errors", "n_fetched"))
            about = {"way": way, "workers": n_workers, "n": len(told), "limit": limit}
            summary.append({**about, **figures, "n_errors": n_errors, "n_fetched": n_fetched})
            rows += _rows(way, reports, workload, base, experiment.learn)
    metrics = {**experiment.about(workload), "learn": experiment.learn, "summary": summary}
    return Outcome(rows, metrics | {"points_lost": 100 * (summary[0]["hit_rate"] - summary[1]["hit_rate"])})


def _alone(workload: Workload, first: int) -> list[Answer]:
    """What the model alone answers the later requests."""
    numbers = range(first, len(workload.requests))
    with torch.inference_mode():
        return [
            workload.answer(workload.module(**workload.requests[number].inputs), number)
            for number in tracked(numbers, len(numbers), "The model alone")
        ]


def _calibrate(experiment: StoreWorkers, workload: Workload, store: Mapping[str, Any], folder: Path) -> float:
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


def _serve(workload: Workload, folder: Path, first: int, n_workers: int) -> list[Report]:
    """Have workers serve the later requests, each its share."""
    given = folder.with_name("workload")
    given.write_bytes(pickle.dumps(workload))
    context = get_context("spawn")
    barrier = context.Barrier(n_workers)
    with ProcessPoolExecutor(n_workers, mp_context=context, initializer=_begin, initargs=(barrier,)) as pool:
        numbers = range(first, len(workload.requests))
        working = [pool.submit(_work, given, folder, numbers[i::n_workers]) for i in range(n_workers)]
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
            output = cache(**workload.requests[number].inputs)
            told.append(Told(number, cache.last[0].rung or COMPUTED, workload.answer(output, number)))
        stats = cache.stats()
    return Report(told, stats.errors, 0 if stats.store is None else stats.store.n_found)


def _rows(
    way: str, reports: Sequence[Report], workload: Workload, base: Sequence[Answer], first: int
) -> Iterator[dict[str, Any]]:
    for worker, report in enumerate(reports):
        for one in report.told:
            is_changed = workload.is_changed(base[one.number - first], one.answer)
            yield {
                "way": way,
                "worker": worker,
                "number": one.number,
                "served": one.served,
                "is_changed": bool(is_changed),
            }
