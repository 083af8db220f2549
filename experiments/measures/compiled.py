"""Measure `compiled`: the cost of one call with and without `torch.compile`, with and without a cache, interleaved.

| kind | model | cache |
|---|---|---|
| `nocache` | eager | none |
| `nocache_compiled` | `torch.compile(model, dynamic=False)`, as a user would, for this exact shape | none |
| `miss`, `hit` | eager | a request that is not stored; a stored request |
| `miss_compiled`, `hit_compiled` | graphs of `cache.compile()` | as `miss`, `hit` |

A graph of the cache is padded to its bucket, so lengths between buckets show the cost of padding. After each call,
outside the timer, its kind is checked.
"""

import copy
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from experiments.measures.base import DeviceExperiment, Outcome
from experiments.measures.bench.latency import BANKS
from experiments.measures.harness import figures_of_rounds, interleaved
from experiments.models.architectures import Requests, build, check, check_target
from experiments.models.loading import find
from experiments.support.clock import Clock, Spent
from experiments.support.files import Folders
from experiments.support.progress import tracked
from llmcache import ConfigError, LLMCache

WARM_UP = 5  # rounds
KINDS = ("nocache", "nocache_compiled", "miss", "hit", "miss_compiled", "hit_compiled")
#: Figures of a row; empty if not run.
FIGURES = ("bucket", *(f"{kind}_ms" for kind in KINDS), *(f"{kind}_ratio" for kind in KINDS[1:]), "compile_s", "detail")


class Compiled(DeviceExperiment):
    batch_sizes: tuple[PositiveInt, ...] = Field(default=(1, 8), min_length=1)  # rows per call
    seq_lens: tuple[int, ...] = Field(default=(24, 32, 128), min_length=1)  # tokens per row, 8 or more
    buckets: tuple[PositiveInt, ...] = Field(default=(32, 128), min_length=1)  # lengths to make graphs for
    entries: int = Field(default=1000, ge=64)  # capacity of the cache
    rounds: int = Field(default=100, ge=10)  # calls of each kind; p90 and p99 take 200 or more
    mode: str | None = None  # of torch.compile
    backend: str = "inductor"  # of torch.compile

    def check(self) -> None:
        for seq_len in self.seq_lens:
            if not 8 <= seq_len <= max(self.buckets):
                raise ValueError(f"seq_lens: give 8 to {max(self.buckets)}, the longest bucket (got {seq_len})")


def run(experiment: Compiled, folders: Folders) -> Outcome:
    """Measure every model and shape, after checking that all models exist and suit the settings."""
    for dtype in experiment.dtypes:
        check_target(experiment.device, dtype)
    sources = {model: find(model, folders.models) for model in experiment.models}
    for source in sources.values():
        check(source, max(experiment.seq_lens))
    shapes = product(experiment.dtypes, experiment.batch_sizes, experiment.seq_lens, experiment.banks)
    asked = list(product(experiment.models, [Shape(*shape) for shape in shapes]))
    calls = [
        _row(experiment, model, sources[model], shape) for model, shape in tracked(asked, "Compiling and measuring")
    ]
    flat = [{name: value for name, value in row.items() if name != "detail"} for row in calls]
    return Outcome(flat, {"calls": calls, "summary": flat, "threads": torch.get_num_threads()})


def _row(experiment: Compiled, model: str, source: str, shape: "Shape") -> dict[str, Any]:
    """Return the figures of one model and shape; none if it cannot be compiled or memory is too small."""
    about = {"model": model, **shape._asdict(), "clock": Clock(experiment.device).name, **dict.fromkeys(FIGURES)}
    try:
        return about | Bench(experiment, source, shape).measure() | {"not_run": ""}
    except (ConfigError, TorchDynamoException, torch.OutOfMemoryError) as error:
        return about | {"not_run": str(error).strip().partition("\n")[0]}


class Shape(NamedTuple):
    dtype: str
    rows: int
    tokens: int
    banks: str


class Bench:
    """Four copies of a model, with and without a cache, each eager and compiled; for calls of one shape."""

    def __init__(self, experiment: Compiled, source: str, shape: Shape) -> None:
        torch._dynamo.reset()  # drop graphs of other shapes
        self._experiment = experiment
        self._shape = shape
        self._clock = Clock(experiment.device)
        plain = build(source, experiment.seed, experiment.device, dtype=shape.dtype).model
        self._requests = Requests(plain.config, shape.rows, shape.tokens, experiment.seed, experiment.device)
        options = {"mode": experiment.mode} if experiment.backend == "inductor" else {}
        self._models: dict[str, Any] = {
            "nocache": plain,
            "nocache_compiled": torch.compile(
                copy.deepcopy(plain), dynamic=False, backend=experiment.backend, **options
            ),
        }
        how = {"auto_bypass": False, "max_entries": experiment.entries, "device": BANKS[shape.banks]}
        self._caches = {end: LLMCache.wrap(copy.deepcopy(plain), **how) for end in ("", "_compiled")}
        self._bucket = min(length for length in experiment.buckets if length >= shape.tokens)
        started = perf_counter()
        self._caches["_compiled"].compile(
            (self._bucket,), (shape.rows,), mode=experiment.mode, backend=experiment.backend, max_padding=1.0
        )
        self._compile_s = perf_counter() - started
        for end, cache in self._caches.items():
            self._models |= {f"miss{end}": cache.model, f"hit{end}": cache.model}
        self._stored: dict[str, Tensor] = {}

    def measure(self) -> dict[str, Any]:
        with torch.inference_mode():  # a hit is of the request that the preceding miss stored
            spent = interleaved(KINDS, range(WARM_UP + self._experiment.rounds), lambda kind, _: self._call(kind))
        counted = {kind: some[WARM_UP:] for kind, some in spent.items()}
        detail = figures_of_rounds(counted, "nocache", self._clock)
        return {
            "bucket": self._bucket,
            **{f"{kind}_ms": detail[f"{kind}_ms"]["median"] for kind in KINDS},
            **{f"{kind}_ratio": detail["ratios"][f"{kind}/nocache"]["median"] for kind in KINDS[1:]},
            "compile_s": self._compile_s,
            "detail": detail,
        }

    def _call(self, kind: str) -> Spent:
        """Return the time of one call, after checking that it was of that kind."""
        end = "_compiled" if kind.endswith("_compiled") else ""
        ids = self._stored[end] if kind.startswith("hit") else self._requests.fresh()
        inputs, model = self._requests.inputs(ids), self._models[kind]
        cache = None if kind.startswith("nocache") else self._caches[end]
        before = None if cache is None else self._done(cache)
        spent, _ = self._clock.time(partial(model, **inputs))
        if cache is not None and before is not None:
            n_hits, n_compiled = (now - then for now, then in zip(self._done(cache), before, strict=True))
            wanted = (
                self._shape.rows if kind.startswith("hit") else 0,
                self._shape.rows if kind == "miss_compiled" else 0,
            )
            is_first = end not in self._stored  # the first call shows how the model packs its output
            if (n_hits, n_compiled) != wanted and not is_first:
                raise RuntimeError(
                    f"a {kind} call had {n_hits} hits and {n_compiled} rows run by a graph, not {wanted}"
                )
            if kind.startswith("miss"):
                self._stored[end] = ids
        return spent

    def _done(self, cache: LLMCache) -> tuple[int, int]:
        """Return the numbers of hits and of rows computed by graphs so far."""
        stats = cache.stats()
        return stats.n_hits, 0 if stats.engine is None else stats.engine.n_requests
