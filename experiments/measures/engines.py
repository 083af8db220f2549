"""Measure `engines`: whole passes of one stream by each way to answer it, one after another, with nothing in between.

    eager            the model, in PyTorch: what others are compared with
    onnxruntime      the whole model exported, in a plain session: no llmcache in the path
    int8             the same with dynamic int8 products, one scale for each column of the weights
    semantic         a semantic response cache: encoder and model in ONNX Runtime, begun with the first `learn`
    exact            llmcache with the engine onnxruntime, cold
    reuse            the same, calibrated at each `max_drop` on the first `learn` requests
    draft            the same with an int8 draft and no source to reuse: only the draft is calibrated
    all              reuse and draft: a calibration chooses what pays

A round is a pass of the eager model, one of every other way, and one of the eager model; every other round takes the
ways backwards. Calls run back to back. Audit and storing use the defaults, and a pass is timed until the audit's queue
is empty. Before each pass a calibrated cache is emptied and calibrated anew, outside the times.

Sizes: N served requests.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any, Self
from unittest.mock import patch

import numpy as np
import torch
from pydantic import Field
from torch import nn

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment
from experiments.measures.service import Server
from experiments.methods.base import BYPASSED, COMPUTED
from experiments.methods.responses import SemanticResponse
from experiments.metrics.metrics import figures_of
from experiments.models.loading import Inputs
from experiments.models.onnx import OnnxModel, export, quantise
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Answer, Workload
from llmcache import ConfigError, LLMCache
from llmcache.lab import MINILM, RiskTarget

EAGER, ONNX, INT8, SEMANTIC = "eager", "onnxruntime", "int8", "semantic"
EXACT, REUSE, DRAFT, ALL = "exact", "reuse", "draft", "all"
WAYS = (EAGER, ONNX, INT8, SEMANTIC, EXACT, REUSE, DRAFT, ALL)
MEGABYTE = 1e6


class Engines(LearningExperiment):
    max_drops: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.005, 0.01), min_length=1)
    ways: tuple[str, ...] = Field(default=WAYS, min_length=2)  # some of `WAYS`, with `eager` and `onnxruntime`
    threads: int = Field(default=1, ge=1)  # of torch and of sessions
    rounds: int = Field(default=2, ge=1)
    batch: int = Field(default=1, ge=1)  # requests in a call, in order of arrival and padded to the longest
    threshold: float = Field(default=0.8, ge=-1.0, le=1.0)  # of the semantic response cache; GPTCache's default
    encoder: str = MINILM  # its sentence encoder

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        made = super().make(values, name)
        if unknown := set(made.ways) - set(WAYS) or {EAGER, ONNX} - set(made.ways):
            raise ConfigError(f"ways: some of {', '.join(WAYS)}, with {EAGER} and {ONNX} (wrong: {', '.join(unknown)})")
        if made.batch > 1 and SEMANTIC in made.ways:
            raise ConfigError(
                f"ways: the {SEMANTIC} response cache takes one request at a time (got batch={made.batch})"
            )
        if made.task.name != "held_out":
            raise ConfigError(f"task.name: the head is fitted here; take held_out (got {made.task.name!r})")
        return made


@dataclass(frozen=True, slots=True)
class Call:
    first: int  # number of its first request
    inputs: Inputs  # tensors (rows, T)
    n_rows: int


@dataclass(slots=True)
class Way:
    """One way to answer, with the passes taken so far."""

    name: str
    ask: Callable[[Call], list[Answer]]
    weights: int  # bytes of all copies of the weights that it holds
    max_drop: float | None = None
    begin: Callable[[], None] = lambda: None  # before a pass, untimed
    hits: Callable[[], list[str]] | None = None  # what served each row of the latest call
    nbytes: Callable[[], int] = lambda: 0  # held by its cache
    cache: LLMCache | None = None
    ms: list[list[float]] = field(default_factory=list)  # of a request, by round and pass
    answers: list[Answer] = field(default_factory=list)  # of the first pass, N
    served: list[str] = field(default_factory=list)  # of the first pass, N
    told: dict[str, Any] = field(default_factory=dict)  # by its cache, after the first pass

    def take(self, calls: Sequence[Call], number: int, what: str) -> None:
        """Answer all calls, back to back, in a round."""
        self.begin()
        answers: list[Answer] = []
        served: list[str] = []
        gc.collect()
        with torch.inference_mode():
            started = perf_counter()
            for call in tracked(calls, f"{what}: {self.name}"):
                answers += self.ask(call)
                served += self.hits() if self.hits is not None else [COMPUTED] * call.n_rows
            if self.cache is not None:
                self.cache.drain()
        ms = 1e3 * (perf_counter() - started) / len(answers)
        self.ms += [[] for _ in range(number + 1 - len(self.ms))]
        self.ms[number].append(ms)
        if not self.answers:
            self.answers, self.served = answers, served
            self.told = {"cache_mb": self.nbytes() / MEGABYTE, **_told(self.cache)}


class Bench:
    """The ways to answer the requests of a stream that follow those learned from, on torch's present threads."""

    def __init__(self, experiment: Engines, workload: Workload, graphs: Mapping[str, Path], stack: ExitStack) -> None:
        """Make the ways; `graphs` are of the whole model by way, and `stack` frees what they hold."""
        self._experiment, self._workload, self._stack = experiment, workload, stack
        self._later = workload.after(experiment.learn)
        self._sizes = {EAGER: sum(one.numel() * one.element_size() for one in workload.module.parameters())}
        self._sizes |= {name: path.stat().st_size for name, path in graphs.items()}
        asked, targets = experiment.ways, experiment.frozen_claims
        plain = {EAGER: workload.module, **{name: OnnxModel(path) for name, path in graphs.items()}}
        self.ways = [Way(name, self._asking(one), self._sizes[name]) for name, one in plain.items() if name in asked]
        if SEMANTIC in asked:
            self.ways.append(self._semantic(plain[ONNX]))
        if EXACT in asked:
            self.ways.append(self._cached(EXACT, self._server(0), None))
        if REUSE in asked:
            server = self._server(experiment.learn)
            self.ways += [self._cached(REUSE, server, target) for target in targets]
        if with_draft := [name for name in (DRAFT, ALL) if name in asked]:
            server = self._server(experiment.learn, draft="int8")
            self.ways += [self._cached(name, server, target) for target in targets for name in with_draft]

    def measure(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Take all passes; return a row for each pass, and the figures of each way."""
        experiment, (eager, *others) = self._experiment, self.ways
        at = {"threads": experiment.threads}
        calls = calls_of(self._later, experiment.batch)
        for number in range(experiment.rounds):
            what = f"round {number + 1} of {experiment.rounds}"
            for way in (eager, *(others if number % 2 == 0 else others[::-1]), eager):
                way.take(calls, number, what)
        rows = [
            at | {"way": way.name, "max_drop": way.max_drop, "round": number, "ms": ms}
            for way in self.ways
            for number, passes in enumerate(way.ms)
            for ms in passes
        ]
        return rows, [at | self._figures(way) for way in self.ways]

    def _figures(self, way: Way) -> dict[str, Any]:
        eager, onnx = (next(one for one in self.ways if one.name == name) for name in (EAGER, ONNX))
        base, own, other = ([fmean(passes) for passes in one.ms] for one in (eager, way, onnx))
        ratios = [alone / mine for alone, mine in zip(base, own, strict=True)]
        quality = figures_of(self._later, eager.answers, way.answers, np.array(way.served), self._experiment.seed)
        return {
            "way": way.name,
            "max_drop": way.max_drop,
            "ms": median(own),
            "speedup": median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "times_onnx": median([theirs / mine for theirs, mine in zip(other, own, strict=True)]),
            "per_s": 1e3 / median(own),
            **quality,
            "weights_mb": way.weights / MEGABYTE,
            **way.told,
        }

    def _asking(self, module: Callable[..., Any]) -> Callable[[Call], list[Answer]]:
        def ask(call: Call) -> list[Answer]:
            output = module(**call.inputs)
            return [self._later.answer(output[i : i + 1], call.first + i) for i in range(call.n_rows)]

        return ask

    def _server(self, learn: int, **more: Any) -> Server:
        server = Server(self._workload, {**self._experiment.cache, "engine": ONNX, **more}, learn)
        self._stack.callback(server.cache.unwrap)
        return server

    def _cached(self, name: str, server: Server, target: RiskTarget | None) -> Way:
        cache, max_drop = server.cache, None if target is None else target.max_drop

        def begin() -> None:
            with no_sources(cache) if name == DRAFT else ExitStack():
                server.begin(target)

        def hits() -> list[str]:
            return [BYPASSED if one.bypassed else one.rung or COMPUTED for one in cache.last]

        held = (EAGER, ONNX) if cache.config.draft is None else (EAGER, ONNX, INT8)
        weights = sum(self._sizes[one] for one in held)
        return Way(
            name, self._asking(cache.model), weights, max_drop, begin, hits, lambda: cache.stats().held_nbytes, cache
        )

    def _semantic(self, module: nn.Module) -> Way:
        learn, whole = self._experiment.learn, self._workload.of(self._workload.requests)
        whole.module = module
        method = SemanticResponse(whole, {name: getattr(self._experiment, name) for name in ("threshold", "encoder")})
        encoder = Path(self._stack.enter_context(TemporaryDirectory()), "encoder.onnx")
        method.encode.module = OnnxModel(export(method.encode.module, whole.requests[0].inputs, encoder))

        def begin() -> None:
            with torch.inference_mode():
                method.begin()
                for number in tracked(range(learn), "Filling the response cache"):
                    method.ask(number)

        return Way(
            SEMANTIC,
            lambda call: [method.ask(learn + call.first)],
            self._sizes[ONNX] + encoder.stat().st_size,
            begin=begin,
            hits=lambda: [method.last().by],
            nbytes=lambda: method.nbytes,
        )


def run(experiment: Engines, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    before = torch.get_num_threads()
    torch.set_num_threads(experiment.threads)
    try:
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory()))
            graph = export(workload.module, workload.requests[0].inputs, place / "model.onnx")
            graphs = {ONNX: graph, INT8: quantise(graph, place / "int8.onnx")}
            rows, ways = Bench(experiment, workload, graphs, stack).measure()
    finally:
        torch.set_num_threads(before)
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": len(workload.requests) - experiment.learn,
        "mean_tokens": fmean(request.inputs["input_ids"].shape[-1] for request in workload.requests),
        "rounds": experiment.rounds,
        "batch": experiment.batch,
        "ways": ways,
        "summary": [{name: way[name] for name in SHOWN} for way in ways],
    }
    return Outcome(rows, metrics)


SHOWN = (
    *("threads", "way", "max_drop", "ms", "speedup", "speedup_min", "speedup_max", "times_onnx", "per_s", "hit_rate"),
    *("changed_answers", "bound", "accuracy", "weights_mb", "cache_mb", "rungs"),
)


@contextmanager
def no_sources(cache: LLMCache) -> Iterator[None]:
    """Let a calibration choose rungs as if no source could serve, so that the draft is calibrated alone."""
    assert cache.calibrated is not None
    fitter = cache.calibrated.fitter
    choose = fitter._choose_rungs

    def choose_draft(cases: Any, found: Any, search_s: float, claim: RiskTarget) -> Any:
        return choose(cases, replace(found, risk=np.full_like(found.risk, np.inf)), search_s, claim)

    with patch.object(fitter, "_choose_rungs", choose_draft):
        yield


def calls_of(workload: Workload, batch: int) -> list[Call]:
    """Return the requests of a workload as calls of up to `batch` rows."""
    calls = []
    for first in range(0, len(workload.requests), batch):
        some = [request.inputs for request in workload.requests[first : first + batch]]
        inputs = some[0]
        if len(some) > 1:
            rows = [{name: value[0] for name, value in one.items()} for one in some]
            inputs = dict(workload.tokenizer.pad(rows, return_tensors="pt"))
        calls.append(Call(first, inputs, len(some)))
    return calls


def _told(cache: LLMCache | None) -> dict[str, Any]:
    """Return what a cache says of its calibration, audit and engine."""
    made = None if cache is None else cache.calibration
    chosen = None if made is None else made.chosen
    stats: Mapping[str, Any] = {} if cache is None else cache.stats().to_dict()
    return {
        "bound": None if chosen is None else chosen.bound,
        "rungs": None if made is None else " ".join(made.shares) if chosen is not None else "none",
        "calibration": None if made is None else str(made),
        "audit": stats.get("audit"),
        "engine": stats.get("engine"),
    }
