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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
from pydantic import Field
from torch import nn

from experiments.measures import harness
from experiments.measures.base import Outcome
from experiments.measures.harness import Call, Pass, asking, by_round, calls_of, on_threads, speedup
from experiments.measures.learning import LearningExperiment
from experiments.measures.service import Server
from experiments.methods.responses import SemanticResponse
from experiments.metrics.metrics import figures_of
from experiments.models.onnx import OnnxModel, export
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Answer, Workload
from llmcache import ConfigError, LLMCache
from llmcache.lab import MINILM, RiskTarget, quantise

EAGER, ONNX, INT8, SEMANTIC = "eager", "onnxruntime", "int8", "semantic"
EXACT, REUSE, DRAFT, ALL = "exact", "reuse", "draft", "all"
WAYS = (EAGER, ONNX, INT8, SEMANTIC, EXACT, REUSE, DRAFT, ALL)
MEGABYTE = 1e6
DENSE = 500  # first requests, of which the audit draws more


class Engines(LearningExperiment):
    max_drops: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.005, 0.01), min_length=1)
    ways: tuple[str, ...] = Field(default=WAYS, min_length=2)  # some of `WAYS`, with `eager` and `onnxruntime`
    threads: int = Field(default=1, ge=1)  # of torch and of sessions
    rounds: int = Field(default=2, ge=1)
    batch: int = Field(default=1, ge=1)  # requests in a call, in order of arrival and padded to the longest
    threshold: float = Field(default=0.8, ge=-1.0, le=1.0)  # of the semantic response cache; GPTCache's default
    encoder: str = MINILM  # its sentence encoder

    def check(self) -> None:
        super().check()
        if unknown := set(self.ways) - set(WAYS) or {EAGER, ONNX} - set(self.ways):
            raise ConfigError(f"ways: some of {', '.join(WAYS)}, with {EAGER} and {ONNX} (wrong: {', '.join(unknown)})")
        if self.batch > 1 and SEMANTIC in self.ways:
            raise ConfigError(
                f"ways: the {SEMANTIC} response cache takes one request at a time (got batch={self.batch})"
            )
        if self.task.name != "held_out":
            raise ConfigError(f"task.name: the head is fitted here; take held_out (got {self.task.name!r})")


class Way(harness.Way):
    """One way to answer, with the passes taken so far."""

    max_drop: float | None = None

    def __init__(
        self, name: str, ask: Callable[[Call], list[Answer]], weights: int, cache: LLMCache | None = None
    ) -> None:
        """Set up; `weights` is the bytes of all copies of the weights that it holds."""
        super().__init__(name, ask, cache)
        self.weights = weights
        self.passes: list[Pass] = []
        self.told: dict[str, Any] = {}  # by its cache, after the first pass

    @property
    def nbytes(self) -> int:
        return 0 if self.cache is None else self.cache.stats().held_nbytes

    @property
    def ms(self) -> list[float]:
        """Mean ms of a request, by round."""
        return by_round(self.passes)

    def take(self, calls: Sequence[Call], number: int, what: str) -> None:
        self.passes.append(self.go(calls, number, f"{what}: {self.name}"))
        if not self.told:
            self.told = {"cache_mb": self.nbytes / MEGABYTE, **_told(self.cache), "audit_share": self.audit_share()}

    def audit_share(self) -> float | None:
        """Return the audit's share of the latest pass, after its denser beginning; None without an audit."""
        return None


class Cached(Way):
    """llmcache in front of ONNX Runtime, emptied and calibrated anew before each pass."""

    def __init__(self, name: str, server: Server, target: RiskTarget | None, weights: int) -> None:
        super().__init__(name, asking(server.stream, server.cache.model), weights, server.cache)
        self.max_drop = None if target is None else target.max_drop
        self._server, self._target = server, target
        self._steady: tuple[float, float] | None = None  # time and ms of recomputing when the beginning was over

    def served(self, call: Call) -> list[str]:
        if self._steady is None and call.first >= DENSE:
            self._steady = perf_counter(), self._recomputing_ms()
        return super().served(call)

    def audit_share(self) -> float | None:
        if self._target is None or self._steady is None:
            return None
        began, before_ms = self._steady
        return (self._recomputing_ms() - before_ms) / 1e3 / (perf_counter() - began)

    def _recomputing_ms(self) -> float:
        audit = self._server.cache.stats().audit
        return 0.0 if audit is None else audit.recomputing_ms

    def begin(self) -> None:
        self._steady = None
        with no_sources(self._server.cache) if self.name == DRAFT else nullcontext():
            self._server.begin(self._target)


class Semantic(Way):
    """A semantic response cache, begun with the first `learn` requests of its workload."""

    def __init__(self, method: SemanticResponse, learn: int, weights: int) -> None:
        super().__init__(SEMANTIC, lambda call: [method.ask(learn + call.first)], weights)
        self._method, self._learn = method, learn

    def begin(self) -> None:
        with torch.inference_mode():
            self._method.begin()
            for number in tracked(range(self._learn), "Filling the response cache"):
                self._method.ask(number)

    def served(self, call: Call) -> list[str]:
        return [self._method.last().by]

    @property
    def nbytes(self) -> int:
        return self._method.nbytes


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
        self.ways = [
            Way(name, asking(self._later, one), self._sizes[name]) for name, one in plain.items() if name in asked
        ]
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
            {**at, "way": way.name, "max_drop": way.max_drop, "round": one.number, "ms": one.mean_ms}
            for way in self.ways
            for one in way.passes
        ]
        return rows, [at | self._figures(way) for way in self.ways]

    def _figures(self, way: Way) -> dict[str, Any]:
        eager, onnx = (next(one for one in self.ways if one.name == name) for name in (EAGER, ONNX))
        first, seed = way.passes[0], self._experiment.seed
        return {
            "way": way.name,
            "max_drop": way.max_drop,
            "ms": median(way.ms),
            **speedup(eager.ms, way.ms),
            "times_onnx": speedup(onnx.ms, way.ms)["speedup"],
            "per_s": 1e3 / median(way.ms),
            **figures_of(self._later, eager.passes[0].answers, first.answers, first.served, seed),
            "weights_mb": way.weights / MEGABYTE,
            **way.told,
        }

    def _server(self, learn: int, **more: Any) -> Server:
        server = Server(self._workload, {**self._experiment.cache, "engine": ONNX, **more}, learn)
        self._stack.callback(server.cache.unwrap)
        server.stream = self._later
        return server

    def _cached(self, name: str, server: Server, target: RiskTarget | None) -> Way:
        held = (EAGER, ONNX) if server.cache.config.draft is None else (EAGER, ONNX, INT8)
        return Cached(name, server, target, sum(self._sizes[one] for one in held))

    def _semantic(self, module: nn.Module) -> Way:
        whole = self._workload.of(self._workload.requests)
        whole.module = module
        method = SemanticResponse(whole, {name: getattr(self._experiment, name) for name in ("threshold", "encoder")})
        encoder = Path(self._stack.enter_context(TemporaryDirectory()), "encoder.onnx")
        method.encode.module = OnnxModel(export(method.encode.module, whole.requests[0].inputs, encoder))
        return Semantic(method, self._experiment.learn, self._sizes[ONNX] + encoder.stat().st_size)


def run(experiment: Engines, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    with on_threads(experiment.threads), ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        graph = export(workload.module, workload.requests[0].inputs, place / "model.onnx")
        graphs = {ONNX: graph, INT8: quantise(graph, place / "int8.onnx")}
        rows, ways = Bench(experiment, workload, graphs, stack).measure()
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
    *("changed_answers", "bound", "accuracy", "weights_mb", "cache_mb", "rungs", "audit_share"),
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


def _told(cache: LLMCache | None) -> dict[str, Any]:
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
