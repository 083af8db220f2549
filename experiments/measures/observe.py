"""Measure `observe`: one llmcache setting serves the task once, untimed: hits, quality, bytes and counters.

For questions that need the real banks, codecs and policies, but no timing.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
from pydantic import Field

from experiments.measures.base import CacheExperiment, Outcome, serve_once
from experiments.methods.base import Served, is_hit
from experiments.methods.cached import Cached
from experiments.metrics.metrics import clusters, hit_rates, quality
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from experiments.tasks.workload import Answer, Workload
from llmcache import POLICIES, CacheConfig


class Observe(CacheExperiment):
    # Seconds the clock of time-based policies advances per request; None: the real clock.
    seconds_per_request: float | None = Field(default=None, gt=0.0)

    def check(self) -> None:
        super().check()
        CacheConfig.make(self.cache).policy.build(POLICIES)


def run(experiment: Observe, folders: Folders) -> Outcome:
    # `seconds_preparing` covers the data, the model and its answers without a cache, which the next run on the same
    # task reuses.
    started, task = perf_counter(), (experiment.task, experiment.seed, folders)
    workload = _load(*task)
    clock = _Clock(experiment.seconds_per_request)
    method = Cached(workload, clock.given_to(experiment.cache))  # refuses unsuitable settings before the model runs
    base = _alone(*task)
    seconds_preparing = perf_counter() - started
    n = len(workload.requests)
    told, notes = serve_once(method, clock.following(tracked(range(n), "Serving")))
    stats = method.stats
    served = np.array([note.by for note in notes])
    figures = {
        **hit_rates(served, clusters(workload), experiment.seed),
        **quality(workload, base, told, is_hit(served), experiment.seed),
        "bytes": method.nbytes,
        "state_bytes": stats.nbytes,
        "entries": stats.n_stored,
        "evicted": sum(stats.n_evicted.values()),
        "revalidated": stats.n_revalidated,
        "expelled": sum(stats.n_expelled.values()),
        "reconstruction_error": _mean(stats.reconstruction_error),
        "layers_skipped": stats.n_layers_skipped,
        "hits_by_layer": stats.hits_by_layer,
        "errors": stats.errors,
    }
    shown = ("hit_rate", "accuracy", "accuracy_drop", "changed_answers", "bytes", "entries", "evicted")
    metrics = {
        **experiment.about(workload),
        "seconds_preparing": round(seconds_preparing, 3),
        **figures,
        "summary": [{name: figures[name] for name in shown}],
    }
    return Outcome(_rows(workload, base, told, notes), metrics)


class _Clock:
    """A clock driven by requests, so that a run does not depend on the machine's speed."""

    def __init__(self, seconds_per_request: float | None) -> None:
        self._seconds = seconds_per_request
        self._number = 0

    def __call__(self) -> float:
        return self._number * (self._seconds or 0.0)

    def following(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield request numbers, and advance the clock with them."""
        for self._number in numbers:
            yield self._number

    def given_to(self, cache: Mapping[str, Any]) -> dict[str, Any]:
        """Return the cache's settings, with this clock if its policy takes one."""
        policy = CacheConfig.make(cache).policy
        if self._seconds is None or "now" not in inspect.signature(POLICIES[policy.name]).parameters:
            return dict(cache)
        return {**cache, "policy": {"name": policy.name, **policy.options, "now": self}}


@lru_cache(maxsize=1)  # runs of a grid differ in their caches, not in their tasks
def _load(task: Any, seed: int, folders: Folders) -> Workload:
    return build(task, folders, seed)


@lru_cache(maxsize=1)
def _alone(task: Any, seed: int, folders: Folders) -> list[Answer]:
    """Return the N answers of the model alone, or reuse the last ones."""
    return _load(task, seed, folders).answer_all("The model alone")


def _mean(by_layer: Mapping[int, float | None]) -> float | None:
    known = [value for value in by_layer.values() if value is not None]
    return sum(known) / len(known) if known else None


def _rows(workload: Workload, base: list[Answer], told: list[Answer], notes: list[Served]) -> list[dict[str, Any]]:
    scores = workload.scores(told)
    return [
        {
            "id": request.id,
            **note.cells(workload.requests),
            "is_changed": int(workload.is_changed(base[i], told[i])),
            "score": round(float(scores[i]), 5),
        }
        for i, (request, note) in enumerate(zip(workload.requests, notes, strict=True))
    ]
