"""Runs the trunk by compiled graphs, one per bucket of rows by tokens. If no graph fits, the trunk runs eagerly.

Decisions of the cache stay outside of the graphs: rows without a hit are padded to a bucket. In-place edits of weights
take effect in a graph. All else that the weights' digest covers is compiled into it: if it changes, graphs are dropped.

Sizes: B rows, T tokens of a call; R rows, L tokens of a bucket.
"""

import logging
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmcache.engines.engine import Eager
from llmcache.engines.graphs import TYPES, GraphEngine, GraphTwin
from llmcache.errors import ConfigError
from llmcache.models.adapters import device_of
from llmcache.models.model_config import setting
from llmcache.request.rows import Row

logger = logging.getLogger("llmcache")

_OWNING_MODES = ("reduce-overhead", "max-autotune")  # CUDA graphs, which write each output to the same memory

#: `inputs by name (R, L) -> tensors of the trunk's output, in order`.
Graph = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]


class Bucket(NamedTuple):
    """The shape of a graph, R rows of L tokens: calls that are not larger are padded to it."""

    rows: int
    length: int


def make_buckets(lengths: Sequence[int], rows: Sequence[int], config: Any) -> list[Bucket]:
    """Return all buckets of these sizes, smallest first; `ConfigError` if none is within the model's positions."""
    n_positions = getattr(config, "max_position_embeddings", None)
    for name, sizes in (("lengths", lengths), ("rows", rows)):
        if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ConfigError(f"{name}: give whole numbers over 0 (got {sizes})")
    kept = sorted({length for length in lengths if n_positions is None or length <= n_positions})
    if not kept:
        raise ConfigError(f"lengths: the model has {n_positions} positions (got {lengths})")
    return [Bucket(n_rows, length) for length in kept for n_rows in sorted(set(rows))]


class CompiledTrunk(GraphEngine):
    """The compiled graphs of one trunk, all made at construction. Thread-safe."""

    def __init__(
        self,
        twin: GraphTwin,
        eager: Eager,
        buckets: Sequence[Bucket],
        mode: str | None,
        backend: str | Callable[..., Any],
        max_padding: float,
    ) -> None:
        """Make and test all graphs; arguments and errors are those of `LLMCache.compile`."""
        super().__init__(twin, eager)
        if not 0 <= max_padding <= 1:
            raise ConfigError(f"max_padding: give a share, 0 to 1 (got {max_padding})")
        self.name = f"compiled {mode or ''} {backend if isinstance(backend, str) else 'own'}"
        self._max_padding, self._backend, self._settings = max_padding, backend, _torch_settings()
        # No guards, so that nothing is checked or compiled in service: this class checks for changes.
        self._options = {**_options_of(mode, backend), "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        is_owning = mode in _OWNING_MODES and device_of(twin.module).type == "cuda"
        self._thread = threading.get_ident() if is_owning else None
        self._graphs: dict[Bucket, Graph] = {}
        first: Exception | None = None
        for bucket in buckets:
            try:
                self._graphs[bucket] = self._make(bucket)
            except Exception as error:  # a compiler may raise anything
                first = first or error
                self._fail(bucket, error)
        if not self._graphs:
            raise ConfigError(f"compile: no graph could be made, see the log; the first failed with: {first}")

    @property
    def n_graphs(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        with self._lock:
            self._graphs = {}

    # -- making --------------------------------------------------------------------------------------------------------

    def _make(self, bucket: Bucket) -> Graph:
        """Compile a graph; `ValueError` if it differs from the trunk on a full call, or on a padded one."""
        twin = self.twin

        def run(inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            return twin.run(inputs)

        # torch.compile stores compiled code by code object: each graph gets its own.
        name = f"trunk_{bucket.rows}x{bucket.length}"
        code = run.__code__.replace(co_name=name)
        own = types.FunctionType(code, run.__globals__, name, run.__defaults__, run.__closure__)
        graph: Graph = torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, options=self._options)
        with torch.inference_mode(False), torch.no_grad():
            part = twin.inputs(max(1, bucket.rows - 1), max(1, bucket.length - 1))
            part["attention_mask"][0, (part["input_ids"].shape[1] + 1) // 2 :] = 0
            for given in (twin.inputs(*bucket), part):
                twin.compare(self._cut(graph(self._pad(bucket, given)), given["input_ids"].shape), given)
        return graph

    def _pad(self, bucket: Bucket, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a call's arguments padded to a bucket: tokens on the right, rows at the end."""
        ids, given, kinds = arguments["input_ids"], arguments.get("attention_mask"), arguments.get(TYPES)
        n_rows, n_tokens = ids.shape
        pad_id = setting(self.twin.trunk.config, "pad_token_id") or 0
        padded = torch.full(bucket, pad_id, dtype=torch.int64, device=ids.device)
        mask = torch.zeros_like(padded)
        padded[:n_rows, :n_tokens] = ids
        mask[:n_rows, :n_tokens] = 1 if given is None else given
        mask[n_rows:, 0] = 1  # a row without any valid token would give NaN
        inputs = {"input_ids": padded, "attention_mask": mask}
        if self.twin.takes_types:
            inputs[TYPES] = torch.zeros_like(padded)
            if kinds is not None:
                inputs[TYPES][:n_rows, :n_tokens] = kinds
        return inputs

    def _cut(self, made: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
        """Return the part of a graph's tensors of a call (B, T), copied if a CUDA graph's next run overwrites them."""
        n_rows, n_tokens = shape
        cut = [one[:n_rows, :n_tokens] if one.ndim == 3 else one[:n_rows] for one in made]
        return [one.contiguous() if self._thread is None else one.clone() for one in cut]

    # -- serving -------------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output, of a graph if one has room."""
        arguments = self.twin.arguments.bind(args, kwargs)
        fitting = self._fit(*arguments["input_ids"].shape)
        if fitting is None:
            return self.run_eagerly("shape", args, kwargs, rows)
        bucket, graph = fitting
        try:
            with torch.inference_mode(False), torch.no_grad():  # as when the graph was made
                if self._thread is not None:
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                made = self._cut(graph(self._pad(bucket, arguments)), arguments["input_ids"].shape)
                output = self.twin.pack(made, arguments)
        except Exception as error:
            output = self.run_eagerly("failed", args, kwargs, rows)  # raises if the input is wrong
            if self._graphs.pop(bucket, None) is not None:  # else another thread removed it
                self._fail(bucket, error)
            return output
        with self._lock:
            self._n_requests += len(rows)
        return output

    def _fit(self, n_rows: int, n_tokens: int) -> tuple[Bucket, Graph] | None:
        """Return the smallest bucket that holds B rows of T tokens and its graph, unless too much of it is padding."""
        graphs = self._graphs.copy()
        holding = [one for one in graphs if one.rows >= n_rows and one.length >= n_tokens]
        bucket = min(holding, key=lambda one: (one.rows * one.length, one.rows), default=None)
        if bucket is None or n_rows * n_tokens < (1 - self._max_padding) * bucket.rows * bucket.length:
            return None
        return bucket, graphs[bucket]

    def _find_reason(self, arguments: dict[str, Any]) -> str | None:
        if reason := super()._find_reason(arguments):
            return reason
        if self._settings != _torch_settings():
            return "torch_settings"
        return None if self._thread in (None, threading.get_ident()) else "thread"

    def _covers(self, row: Row) -> bool:
        """Whether, too, the row is padded on the right only."""
        return super()._covers(row) and row.starts_first

    def is_of(self, digest: str) -> bool:
        """Whether the graphs are valid for weights with this digest; if not, drop them."""
        if super().is_of(digest):
            return True
        twin = self.twin
        with self._lock:
            if twin.attention == twin.trunk.attention and twin.weights.differs_in_values(twin.snapshot):
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


def _torch_settings() -> tuple[Any, ...]:
    """Return torch's settings that may be compiled into a graph."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _options_of(mode: str | None, backend: str | Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a mode of `torch.compile`, which does not take both mode and options."""
    if mode is None:
        return {}
    modes = torch._inductor.list_mode_options()
    if backend != "inductor" or mode not in modes:
        raise ConfigError(f"mode: give {', '.join(sorted(modes))}, with backend 'inductor' (got {mode!r}, {backend!r})")
    return dict(modes[mode])
