"""Runs the trunk by compiled graphs, one a bucket of rows by tokens. Where no graph fits, the trunk runs as it is.

Decisions of the cache stay outside of the graphs: rows that nothing serves are padded to a bucket. A graph sees edits
of weights in place. Everything else that the digest of the weights covers is part of a graph: all are dropped when it
changes.

Sizes: B rows, T tokens of a call; R rows, L tokens of a bucket.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcache.engines.engine import Eager, Engine
from llmcache.engines.graphs import Bucket, Graph, Maker, make_buckets
from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, device_of
from llmcache.models.arguments import Arguments
from llmcache.models.coupling import Coupling
from llmcache.models.model_config import setting
from llmcache.models.rope import changes_with_length
from llmcache.models.weights import Weights
from llmcache.request.bypass import CURES
from llmcache.request.rows import Row
from llmcache.stats import CompileStats
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

_OWNING_MODES = ("reduce-overhead", "max-autotune")  # CUDA graphs: each output is written to the same memory
_TAKEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict", "use_cache"})


class CompiledTrunk:
    """Graphs of one trunk. Made whole, before service. Thread-safe."""

    def __init__(
        self,
        trunk: Trunk,
        eager: Eager,
        arguments: Arguments,
        weights: Weights,
        coupling: Coupling,
        lengths: Sequence[int],
        rows: Sequence[int],
        mode: str | None,
        backend: str | Callable[..., Any],
        max_padding: float,
    ) -> None:
        """Make all graphs and try each; arguments and errors are those of `LLMCache.compile`."""
        if not 0 <= max_padding <= 1:
            raise ConfigError(f"max_padding: give a share, 0 to 1 (got {max_padding})")
        buckets = make_buckets(lengths, rows, getattr(trunk.config, "max_position_embeddings", None))
        if trunk.adapter.is_guess:
            name = type(trunk.module).__name__
            raise ConfigError(f"compile: what padding does to a {name} is not known: register an adapter")
        if weights.is_training:
            raise ConfigError("compile: the model is in training mode: call model.eval() first")
        if any(map(changes_with_length, trunk.module.modules())):
            raise ConfigError("compile: this model's RoPE changes with the length of a call, which no graph follows")
        self.name = f"compiled {mode or ''} {backend if isinstance(backend, str) else 'own'}"
        self._trunk, self._eager, self._arguments, self._weights = trunk, eager, arguments, weights
        self._lock = forkable(threading.Lock())
        self._n_requests = self._n_failed = self._n_dropped = 0
        self._n_eager = Counter[str]()
        self._max_padding = max_padding
        self._maker = Maker(trunk, mode, backend)
        self._digest = weights.digest()
        mark = weights.mark_of(self._digest)
        if weights.refusal is not None or mark is None:
            raise ConfigError(f"compile: {'weights change' if weights.refusal is None else CURES[weights.refusal]}")
        if reason := coupling.reason(self._digest):
            raise ConfigError(f"compile: rows that are padded to a bucket would not come out the same: {reason}")
        self._mark, self._attention, self._settings = mark, trunk.attention, _torch_settings()
        is_owning = mode in _OWNING_MODES and device_of(trunk.module).type == "cuda"
        self._thread = threading.get_ident() if is_owning else None
        self._graphs: dict[Bucket, Graph] = {}
        first: Exception | None = None
        for bucket in buckets:
            try:
                self._graphs[bucket] = self._maker.make(bucket)
            except Exception as error:  # a compiler may raise anything
                first = first or error
                self._fail(bucket, error)
        if not self._graphs:
            raise ConfigError(f"compile: no graph could be made, see the log; the first failed with: {first}")

    def stats(self) -> CompileStats:
        """Return what was done by graphs, and what was not."""
        with self._lock:
            return CompileStats(
                len(self._graphs), self._n_requests, dict(self._n_eager), self._n_failed, self._n_dropped
            )

    def close(self) -> None:
        """Run all calls eagerly from now on."""
        with self._lock:
            self._graphs = {}

    # -- serving -------------------------------------------------------------------------------------------------------

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        """Return itself, or the trunk as it is for a call that no graph can stand for; it is counted by reason."""
        if not self._graphs or not self._are_of(digest):
            return self._eager
        reason = "kv_cache" if keeps_kv else self._find_reason(self._arguments.bind(args, kwargs))
        return self if reason is None else _Passed(self, reason)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output: of a graph where one has room, and the rows are padded on the right."""
        arguments = self._arguments.bind(args, kwargs)
        fitting = self._fit(*arguments["input_ids"].shape)
        if fitting is None:
            return self.run_eagerly("shape", args, kwargs, rows)
        if not all(map(_begins, rows)):
            return self.run_eagerly("padding", args, kwargs, rows)
        bucket, graph = fitting
        try:
            output = self._replay(graph, bucket, arguments)
        except Exception as error:
            output = self.run_eagerly("failed", args, kwargs, rows)  # raises if it is the input that is wrong
            if self._graphs.pop(bucket, None) is not None:  # else another thread did it
                self._fail(bucket, error)
            return output
        with self._lock:
            self._n_requests += len(rows)
        return output

    def run_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Run the trunk as it is, and count why."""
        output = self._eager.run(args, kwargs, rows)
        with self._lock:
            self._n_eager[reason] += len(rows)
        return output

    def _replay(self, graph: Graph, bucket: Bucket, arguments: dict[str, Any]) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # under which it was made
            if self._thread is not None:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            asked = arguments.get("return_dict")
            has_names = setting(self._trunk.config, "return_dict") if asked is None else asked
            made, shape = graph(self._maker.inputs(bucket, arguments)), arguments["input_ids"].shape
            return self._maker.pack(made, shape, has_names is not False, is_owned=self._thread is not None)

    def _fit(self, n_rows: int, n_tokens: int) -> tuple[Bucket, Graph] | None:
        """Return the smallest bucket that holds B rows of T tokens and its graph, unless too much of it is padding."""
        graphs = self._graphs.copy()
        holding = [one for one in graphs if one.rows >= n_rows and one.length >= n_tokens]
        bucket = min(holding, key=lambda one: (one.rows * one.length, one.rows), default=None)
        if bucket is None or n_rows * n_tokens < (1 - self._max_padding) * bucket.rows * bucket.length:
            return None
        return bucket, graphs[bucket]

    def _find_reason(self, arguments: dict[str, Any]) -> str | None:
        """Return why no graph can stand for the trunk in a call that the cache understands, or None."""
        mask, shape = arguments.get("attention_mask"), arguments["input_ids"].shape
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape == shape):
            return "arguments"
        if arguments.get("token_type_ids") is not None and not self._maker.takes_types:
            return "arguments"
        defaults, known = self._arguments.defaults, _TAKEN.union(self._trunk.asks_for_more)
        if not all(one in known or value is None or value is defaults.get(one) for one, value in arguments.items()):
            return "arguments"
        if self._settings != _torch_settings() or torch.is_autocast_enabled(arguments["input_ids"].device.type):
            return "torch_settings"
        return None if self._thread in (None, threading.get_ident()) else "thread"

    def _are_of(self, digest: str) -> bool:
        """Return whether the graphs are of the trunk with this digest; if not, drop them."""
        if digest == self._digest and self._attention == self._trunk.attention:
            return True
        with self._lock:
            if self._attention == self._trunk.attention and self._weights.differs_in_values(self._mark):
                self._digest = digest
                return True
            if self._graphs:
                self._graphs = {}
                self._n_dropped += 1
                logger.warning(
                    "llmcache: compiled graphs were dropped, since the model was edited otherwise than in place; calls "
                    "run eagerly until cache.compile() is called again"
                )
        return False

    def _fail(self, bucket: Bucket, error: Exception) -> None:
        with self._lock:
            self._n_failed += 1
        logger.warning("llmcache: no graph for %d rows of %d tokens; such calls run eagerly", *bucket, exc_info=error)


@dataclass(frozen=True, slots=True)
class _Passed:
    """The engine of one call that no graph can stand for."""

    compiled: CompiledTrunk
    reason: str
    name: str = ""

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        return self.compiled.run_eagerly(self.reason, args, kwargs, rows)


def _torch_settings() -> tuple[Any, ...]:
    """Return what of torch's own settings a graph may have been made for."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _begins(row: Row) -> bool:
    """Return whether a row is valid from its first token to its last one, and its mask holds only 0 and 1."""
    is_plain = row.bypass_reason in ("", "no_content")
    return is_plain and row.n_valid > 0 and isinstance(row.valid, slice) and row.valid.start == 0
