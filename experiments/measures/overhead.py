"""Measure `overhead`: what a call takes beside the session that it runs, or in place of it, by what served it.

    wrapped   `wrap(session)` around the model's float32 session
    engine    the model with the engine onnxruntime
    draft     the same, calibrated on the first `learn` requests, with an int8 draft and no source to reuse
    all       reuse and draft

Each is a whole pass, between passes of the float32 and the int8 session alone. A pass asks each request, and soon after
it a repeat of an earlier one: exact hits follow calls that ran a session, as they do in service. What a call takes
beside a session is the median difference to the same request's time in the session alone, over all rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from experiments.measures.base import Outcome
from experiments.measures.engines import ALL, DRAFT, INT8, ONNX, Cached
from experiments.measures.harness import Call, Pass, Way, asking, calls_of, on_threads
from experiments.measures.learning import LearningExperiment
from experiments.measures.service import Server
from experiments.methods.base import COMPUTED
from experiments.models.onnx import OnnxModel, export
from experiments.support.files import Folders
from experiments.tasks.workload import Workload
from llmcache import LLMCache
from llmcache.lab import open_session, quantise

WRAPPED, ENGINE = "wrapped", "engine"
LATER = 50  # requests between one and its repeat
AGAIN = "draft again"  # what a draft answered before in the same pass, which runs no session
#: Sessions that a call has run, by way and by what served it; none: it ran none.
SESSIONS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (WRAPPED, COMPUTED): (ONNX,),
    (ENGINE, COMPUTED): (ONNX,),
    (DRAFT, "draft"): (INT8,),
    (DRAFT, COMPUTED): (INT8, ONNX),
    (ALL, "draft"): (INT8,),
    (ALL, COMPUTED): (INT8, ONNX),
}


class Overhead(LearningExperiment):
    """Settings of the measure; of `max_drops` the first counts."""

    threads: int = Field(default=1, ge=1)
    rounds: int = Field(default=2, ge=1)


class Wrapped(Way):
    """A wrapped session, emptied before each pass."""

    def begin(self) -> None:
        assert self.cache is not None
        self.cache.clear()


class Bench:
    """The ways of a workload, on torch's present threads."""

    def __init__(self, experiment: Overhead, workload: Workload, place: Path, stack: ExitStack) -> None:
        """Export the model into a folder, and make the ways; `stack` frees what they hold."""
        self._later, target = workload.after(experiment.learn), experiment.frozen_claims[0]
        graph = export(workload.module, workload.requests[0].inputs, place / "model.onnx")
        graphs = {ONNX: graph, INT8: quantise(graph, place / "int8.onnx")}
        self.alone = [Way(name, asking(self._later, OnnxModel(path))) for name, path in graphs.items()]
        wrapped = LLMCache.wrap(open_session(graph), tokenizer=workload.tokenizer)
        stack.callback(wrapped.unwrap)

        def run(**inputs: Tensor) -> Tensor:
            (output,) = wrapped(**{name: one.numpy() for name, one in inputs.items()}).values()
            return torch.from_numpy(output)

        self.cached: list[Way] = [Wrapped(WRAPPED, asking(self._later, run), wrapped)]
        for name, learn, more in (
            (ENGINE, 0, {}),
            (DRAFT, experiment.learn, {"draft": "int8"}),
            (ALL, experiment.learn, {"draft": "int8"}),
        ):
            server = Server(workload, {**experiment.cache, "engine": ONNX, **more}, learn)
            stack.callback(server.cache.unwrap)
            server.stream = self._later
            self.cached.append(Cached(name, server, target if learn else None, 0))

    def measure(self, rounds: int) -> Iterator[Pass]:
        """Take all passes."""
        calls = calls_of(self._later)
        for number in range(rounds):
            for way in (*self.alone, *(one for own in self.cached for one in (own, *self.alone))):
                given = _with_repeats(calls) if way.cache is not None else calls
                yield way.go(given, number, f"round {number + 1} of {rounds}: {way.name}")


def run(experiment: Overhead, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    with on_threads(experiment.threads), ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        passes = list(Bench(experiment, workload, place, stack).measure(experiment.rounds))
    numbers = [call.first for call in _with_repeats(calls_of(workload.after(experiment.learn)))]
    summary = summarise(passes, numbers)
    rows = [{"way": one.who, "round": one.number, "ms": one.mean_ms} for one in passes]
    metrics = {**experiment.about(workload), "threads": experiment.threads, "learn": experiment.learn}
    return Outcome(rows, {**metrics, "rounds": experiment.rounds, "summary": summary})


def summarise(passes: Sequence[Pass], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each way and for what served its calls, which asked the requests with these numbers."""
    alone: dict[str, dict[int, float]] = {ONNX: {}, INT8: {}}
    for name, known in alone.items():
        own = [one.ms for one in passes if one.who == name]
        known.update(enumerate(median(each) for each in zip(*own, strict=True)))
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for one in passes:
        seen: set[int] = set()
        for number, served, ms in () if one.who in alone else zip(numbers, one.served.tolist(), one.ms, strict=True):
            is_again = served == DRAFT and number in seen
            found.setdefault((one.who, AGAIN if is_again else served), []).append((number, float(ms)))
            seen.add(number)
    return [_row(way, served, calls, alone) for (way, served), calls in found.items()]


def _row(
    way: str, served: str, calls: Sequence[tuple[int, float]], alone: Mapping[str, Mapping[int, float]]
) -> dict[str, Any]:
    sessions = SESSIONS.get((way, served), ())
    base = [sum(alone[name][number] for name in sessions) for number, _ in calls]
    return {
        "way": way,
        "served": served,
        "n": len(calls),
        "ms": median(ms for _, ms in calls),
        "sessions": " + ".join(sessions),
        "sessions_ms": median(base),
        "beside_ms": median(ms - own for (_, ms), own in zip(calls, base, strict=True)),
    }


def _with_repeats(calls: Sequence[Call]) -> list[Call]:
    """Return calls, each followed by a repeat of the one `LATER` before it, with tensors of its own."""
    given: list[Call] = []
    for number, call in enumerate(calls):
        given.append(call)
        if number >= LATER:
            known = calls[number - LATER]
            given.append(replace(known, inputs={name: one.clone() for name, one in known.inputs.items()}))
    return given
