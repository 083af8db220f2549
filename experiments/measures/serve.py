"""Measure `serve`: several methods answer the same requests, interleaved: all answer a request before the next one.

The order of methods is drawn for each request, and reversed in every other round. Each method has its own copy of the
layers, with shared weights, and its own store, which is cold at the start of a round. The model alone is always one of
the methods.

Sizes: R rounds, N requests.
"""

import gc
import random
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from experiments.measures.base import Outcome, TaskExperiment
from experiments.measures.harness import interleaved
from experiments.methods import NOCACHE, Method, MethodSettings, make_methods
from experiments.methods.base import Served
from experiments.metrics.metrics import Trace, summary
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from experiments.tasks.workload import Answer, Workload


class Serve(TaskExperiment):
    makers: ClassVar[Any] = {**TaskExperiment.makers, "methods": make_methods}
    # Methods to compare, besides the model alone: a list of mappings, each with `method` and its options.
    methods: tuple[MethodSettings, ...]
    rounds: int = Field(default=5, ge=1)  # passes over the stream; each begins cold
    warmup: int = Field(default=20, ge=0)  # unmeasured requests for each method before each round
    keeps_rows: bool = True  # write one row per request and method

    def at_work(self, workload: Workload) -> dict[str, Method]:
        return {label: method.build(workload) for label, method in self.all_methods.items()}

    @property
    def all_methods(self) -> dict[str, MethodSettings]:
        """Settings of all methods by label, the model alone first."""
        alone = MethodSettings.make({"method": NOCACHE})
        return {NOCACHE: alone} | {method.label: method for method in self.methods}


def run(experiment: Serve, folders: Folders) -> Outcome:
    workload = build(experiment.task, folders, experiment.seed)
    traces = measure(workload, experiment.at_work(workload), experiment.rounds, experiment.warmup)
    settings = experiment.all_methods
    base = traces[NOCACHE]
    metrics = {
        **experiment.about(workload),
        "mean_tokens": float(np.mean([request.inputs["input_ids"].shape[-1] for request in workload.requests])),
        "rounds": experiment.rounds,
        "methods": {
            label: summary(workload, base, trace, experiment.seed)
            | {"method": settings[label].method, "options": settings[label].options}
            for label, trace in traces.items()
        },
    }
    return Outcome(rows(workload, traces) if experiment.keeps_rows else [], metrics)


def measure(workload: Workload, methods: Mapping[str, Method], rounds: int, warmup: int) -> dict[str, Trace]:
    """Run every method over the stream `rounds` times, each after `warmup` unmeasured requests; traces by label."""
    asked: dict[str, list[_Asked]] = {name: [] for name in methods}
    n = len(workload.requests)
    with torch.inference_mode():
        for number in range(rounds):
            for method in methods.values():
                method.begin()
                for request in range(min(warmup, n)):
                    method.ask(request)
                method.begin()
            gc.collect()
            found = interleaved(
                list(methods),
                tracked(range(n), f"Round {number + 1} of {rounds}"),
                partial(_ask, methods, number == 0),
                partial(order_of, number=number),
            )
            for name, some in found.items():
                asked[name] += some
    traces = {name: _trace(methods[name], some, n) for name, some in asked.items()}
    for method in methods.values():
        method.end()
    return traces


class _Asked(NamedTuple):
    ms: float  # from a request's tokens to its answer, storing included
    answer: Answer  # None after the first round
    note: Served


def _ask(methods: Mapping[str, Method], keeps_answer: bool, name: str, request: int) -> _Asked:
    started = perf_counter()
    answer = methods[name].ask(request)
    ms = (perf_counter() - started) * 1e3
    return _Asked(ms, answer if keeps_answer else None, methods[name].last())


def _trace(method: Method, asked: Sequence[_Asked], n: int) -> Trace:
    return Trace(
        ms=np.array([one.ms for one in asked]).reshape(-1, n),
        served=np.array([one.note.by for one in asked]).reshape(-1, n),
        evicting=np.array([one.note.is_evicting for one in asked], dtype=bool).reshape(-1, n),
        answers=[one.answer for one in asked[:n]],
        notes=[one.note for one in asked[:n]],
        nbytes=method.nbytes,
        n_entries=method.n_entries,
    )


def order_of(names: Sequence[str], request: int, number: int) -> list[str]:
    """Return the order of methods for a request: drawn per request, and reversed in every other round."""
    # In a rotation, each method would nearly always follow the same one, and inherit the processor caches it left.
    order = random.Random(f"{number // 2} {request}").sample(names, len(names))
    return order[::-1] if number % 2 else order


def rows(workload: Workload, traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    base = traces[NOCACHE].answers
    found = []
    for label, trace in traces.items():
        scores = workload.scores(trace.answers)
        for i, request in enumerate(workload.requests):
            found.append(
                {
                    "id": request.id,
                    "method": label,
                    **trace.notes[i].cells(workload.requests),
                    "answer": workload.show(trace.answers[i]),
                    "is_changed": int(workload.is_changed(base[i], trace.answers[i])),
                    "score": round(float(scores[i]), 5),
                    "ms": round(float(trace.ms[0, i]), 4),
                }
            )
    return found
