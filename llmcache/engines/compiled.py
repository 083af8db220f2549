"""Runs the trunk by compiled graphs, one per bucket of rows by tokens. If no graph fits, the trunk runs eagerly.

Decisions of the cache stay outside of the graphs: rows without a hit are padded to a bucket. In-place edits of weights
take effect in a graph. Everything else that the digest of the weights covers is compiled into it: if it changes, all
graphs are dropped.

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

_OWNING_MODES = ("reduce-overhead", "max-autotune")  # CUDA graphs, which write each output to the same memory
_GRAPH_ARGUMENTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict", "use_cache"})


class CompiledTrunk:
    """The compiled graphs of one trunk, all made at construction. Thread-safe."""

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
        """Make and test all graphs; arguments and errors are those of `LLMCache.compile`."""
        if not 0 <= max_padding <= 1:
            raise ConfigError(f"max_padding: give a share, 0 to 1 (got {max_padding})")
        buckets = make_buckets(lengths, rows, getattr(trunk.config, "max_position_embeddings", None))
        if trunk.adapter.is_guess:
            name = type(trunk.module).__name__
            raise ConfigError(f"compile: the effect of padding on a {name} is not known: register an adapter")
        if weights.is_training:
            raise ConfigError("compile: the model is in training mode: call model.eval() first")
        if any(map(changes_with_length, trunk.module.modules())):
            raise ConfigError("compile: this model's RoPE changes with the length of a call, which no graph can follow")
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
            raise ConfigError(f"compile: padding rows to a bucket would change their output: {reason}")
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
        """Return counts of graphs, and of requests that ran by graphs or eagerly."""
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
        """Return itself; for a call that no graph covers, an eager engine, which counts the reason."""
        if not self._graphs or not self._check_digest(digest):
            return self._eager
        reason = "kv_cache" if keeps_kv else self._find_reason(self._arguments.bind(args, kwargs))
        return self if reason is None else _EagerCall(self, reason)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output, of a graph if one has room and the rows are padded on the right only."""
        arguments = self._arguments.bind(args, kwargs)
        fitting = self._fit(*arguments["input_ids"].shape)
        if fitting is None:
            return self.run_eagerly("shape", args, kwargs, rows)
        if not all(map(_is_right_padded, rows)):
            return self.run_eagerly("padding", args, kwargs, rows)
        bucket, graph = fitting
        try:
            output = self._replay(graph, bucket, arguments)
        except Exception as error:
            output = self.run_eagerly("failed", args, kwargs, rows)  # raises if the input is wrong
            if self._graphs.pop(bucket, None) is not None:  # else another thread removed it
                self._fail(bucket, error)
            return output
        with self._lock:
            self._n_requests += len(rows)
        return output

    def run_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Run the trunk's own forward, and count the reason."""
        output = self._eager.run(args, kwargs, rows)
        with self._lock:
            self._n_eager[reason] += len(rows)
        return output

    def _replay(self, graph: Graph, bucket: Bucket, arguments: dict[str, Any]) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # as when the graph was made
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
        """Return why no graph covers a call, a key of the eager counts; None if one may."""
        mask, shape = arguments.get("attention_mask"), arguments["input_ids"].shape
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape == shape):
            return "arguments"
        if arguments.get("token_type_ids") is not None and not self._maker.takes_types:
            return "arguments"
        defaults, known = self._arguments.defaults, _GRAPH_ARGUMENTS.union(self._trunk.more_outputs)
        if not all(one in known or value is None or value is defaults.get(one) for one, value in arguments.items()):
            return "arguments"
        if self._settings != _torch_settings() or torch.is_autocast_enabled(arguments["input_ids"].device.type):
            return "torch_settings"
        return None if self._thread in (None, threading.get_ident()) else "thread"

    def _check_digest(self, digest: str) -> bool:
        """Whether the graphs are valid for weights with this digest; if not, drop them."""
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
                    "llmcache: compiled graphs were dropped, since the model was edited other than in place; calls run "
                    "eagerly until cache.compile() is called again"
                )
        return False

    def _fail(self, bucket: Bucket, error: Exception) -> None:
        with self._lock:
            self._n_failed += 1
        logger.warning("llmcache: no graph for %d rows of %d tokens; such calls run eagerly", *bucket, exc_info=error)


@dataclass(frozen=True, slots=True)
class _EagerCall:
    """The engine of one call that no graph covers."""

    compiled: CompiledTrunk
    reason: str
    name: str = ""

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        return self.compiled.run_eagerly(self.reason, args, kwargs, rows)


def _torch_settings() -> tuple[Any, ...]:
    """Return torch's settings that may be compiled into a graph."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _is_right_padded(row: Row) -> bool:
    """Whether a row's valid tokens are contiguous from its first token on, and its mask holds only 0 and 1."""
    is_plain = row.bypass_reason in ("", "no_content")
    return is_plain and row.n_valid > 0 and isinstance(row.valid, slice) and row.valid.start == 0
