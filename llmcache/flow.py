"""The order of a call, from the trunk's first argument to the stats. Every step is a function of another module.

    opened   -> may this call use the cache at all?
    layer 0  -> rows and exact keys, fingerprint, then the rungs decide
    layer l  -> rows to compute are computed, stored states put in, misses captured
    closed   -> doubted states compared, misses stored, counters updated

Trouble here costs speed, never correctness: a failing lookup or store is counted, logged once, and computed around.
"""

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.adapters import CACHE, Arguments, Trunk, can_select_rows, special_ids, unpack, vocabulary_size
from llmcache.bypass import find_reason, is_plain_cache
from llmcache.context import Call, Inputs, Reuse, Row, Scope, read_rows, to_host
from llmcache.fingerprint import Fingerprint
from llmcache.heads import Head
from llmcache.hooks import LayerSwap
from llmcache.library import Library
from llmcache.payloads import Payload, cosine_distance, head_reads_padding
from llmcache.reuse import Rung
from llmcache.reuse.runner import Runner
from llmcache.stats import Counters
from llmcache.weights import Weights

DEFAULT_NAMESPACE = "default"


@dataclass(slots=True)
class Parts:
    """What a call is served with."""

    trunk: Trunk
    head: Head
    payload: Payload
    library: Library
    rungs: Sequence[Rung]
    fingerprint: Fingerprint | None
    weights: Weights
    counters: Counters = field(default_factory=Counters)


class Flow:
    """Listens to one wrapped model. Thread-safe: what a call knows is kept per thread, what is shared is locked."""

    def __init__(self, parts: Parts, tokenizer: Any = None) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            tokenizer: Names the special tokens; without one the config and the family do.
        """
        self._parts = parts
        self._arguments = Arguments(parts.trunk.module.forward)
        self._runner = Runner(parts.payload, parts.trunk.adapter)
        self._tokenizer = tokenizer
        self._last = parts.trunk.depth - 1
        self._table: tuple[object, Tensor] | None = None
        self._head_reads = _reads(parts)
        self._thread = threading.local()
        # Context variables follow async tasks too: a tenant's namespace must not leak into another's request.
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=False)

    # -- called by the hooks -------------------------------------------------------------------------------------------

    def opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a forward of the trunk, unless it must go by the cache; returns the arguments to run it with."""
        arguments = self._arguments.bind(args, kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(_count_rows(arguments))
            return args, kwargs
        self._thread.call = None
        if torch.is_grad_enabled():
            self._parts.weights.suspect()
        reason = "disabled" if self.is_disabled.get() else self._find_reason(arguments)
        if reason is not None:
            self._parts.counters.bypass(reason, _count_rows(arguments))
            return args, kwargs
        self._thread.call = Call(arguments, self.namespace.get())
        return self._arguments.replace(args, kwargs, "use_cache", False) if self._keeps_no_kv else (args, kwargs)

    def layer(self, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer for the rows that need it."""
        call: Call | None = None if torch.compiler.is_compiling() else getattr(self._thread, "call", None)
        if call is not None and swap.number == 0:
            call = self._thread.call = self._begin(call, swap, args, kwargs)
        if call is None or call.scope is None:  # bypassed, or layer 0 was not run through its swap
            return swap.original(*args, **kwargs)
        is_last = swap.number == self._last
        if call.is_served and not is_last:
            return self._runner.skip(call, swap, args, kwargs)
        self._decide(call, swap, args, kwargs)
        ends_here = not (is_last and self._ends_after_norm)
        output = self._runner.run(call, swap, args, kwargs, places=ends_here)
        call.is_complete = is_last
        if ends_here:
            self._try_to_capture(call, swap.number, unpack(output))
        return output

    def normed(self, output: Tensor) -> Tensor | None:
        """After the final norm: where payloads of normed states are put in and taken."""
        call: Call | None = None if torch.compiler.is_compiling() else getattr(self._thread, "call", None)
        if call is None or not self._ends_after_norm or not call.is_complete:
            return None
        output = self._runner.place(call, self._last, output)
        self._try_to_capture(call, self._last, output)
        return output

    def closed(self) -> None:
        """End a forward: store what was computed, count what was done. A call that failed half-way leaves nothing."""
        if torch.compiler.is_compiling():
            return
        call: Call | None = getattr(self._thread, "call", None)
        self._thread.call = None
        if call is None or call.scope is None or not call.is_complete:
            return
        started = perf_counter()
        self._check(call)
        self._store(call)
        self._count(call, perf_counter() - started)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _find_reason(self, arguments: dict[str, Any]) -> str | None:
        try:
            reason = find_reason(arguments, self._parts.trunk.module)
        except Exception as error:
            self._parts.counters.error("look at the arguments", error)
            return "error"
        if reason is None and self._keeps_no_kv and (arguments.get("use_cache") or arguments.get(CACHE) is not None):
            return "kv_cache_with_pooled_payload"
        return reason

    def _begin(self, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Read the call's rows and fingerprints, or give the call up."""
        started = perf_counter()
        call.kv_cache = swap.arguments.get(args, kwargs, CACHE)
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        try:
            reason = self._find_late_reason(call, hidden)
            if reason is None:
                self._read(call, hidden)
        except Exception as error:
            self._parts.counters.error("read the request", error)
            reason = "error"
        if reason is not None:
            self._parts.counters.bypass(reason, _count_rows(call.arguments))
            return None
        call.lookup_s += perf_counter() - started
        return call

    def _find_late_reason(self, call: Call, hidden: Tensor) -> str | None:
        """Why a call cannot use the cache, as far as it shows only when the first layer is reached."""
        if call.kv_cache is not None and not is_plain_cache(call.kv_cache):
            return "kv_cache_kind"
        if self._runner.cannot_skip:
            return "unknown_output"
        if hidden.ndim != 3 or hidden.shape[:2] != call.arguments["input_ids"].shape:
            return "unknown_layout"
        call.scope = self._scope(call, hidden)
        if self._parts.weights.samples:
            return "training"
        if not self._parts.weights.can_be_watched:
            return "inference_weights"
        return "adapter_names" if self._parts.weights.differ_by_row else None

    def _read(self, call: Call, hidden: Tensor) -> None:
        """Everything that needs the host, in one transfer."""
        ids, mask = call.arguments["input_ids"], call.arguments.get("attention_mask")
        valid = None if mask is None else mask != 0
        assert call.scope is not None
        table = self._content_table(ids.device, call.scope.weights)
        content = table[ids]
        content = content if valid is None else content & valid
        fingerprint = self._parts.fingerprint
        features = None if fingerprint is None else fingerprint.features(hidden, content)
        types, positions = call.arguments.get("token_type_ids"), call.arguments.get("position_ids")
        inputs = Inputs(*to_host(ids, valid, types, positions, content.any(dim=1), features))
        id_dtype = np.dtype(np.uint16 if len(table) <= 2**16 else np.int32)
        call.rows = read_rows(call.scope, inputs, id_dtype, self._parts.trunk.adapter.is_guess)
        call.features = inputs.features
        for row in call.rows:
            row.refused = self._refusal(row, inputs)
            if row.refused:
                self._parts.counters.bypass(row.refused, 1)
        if fingerprint is not None and fingerprint.n_fit == 0:
            call.fingerprints = fingerprint.project(inputs.features)

    def _refusal(self, row: Row, inputs: Inputs) -> str:
        if not inputs.has_content[row.number]:
            return "no_content"
        pad_id = getattr(self._parts.trunk.config, "pad_token_id", None)
        ids = inputs.ids[row.number]
        return "head_reads_padding" if head_reads_padding(self._head_reads, row.valid, ids, pad_id) else ""

    def _decide(self, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask each rung in turn for the rows that none has served at this depth."""
        number = swap.number
        for rung in self._parts.rungs:
            if not rung.asks_at(number):
                continue
            started = perf_counter()
            rows = [
                row
                for row in call.active_rows
                if _is_open(call.reused.get(row.number), number) and row.number not in call.doubted
            ]
            try:
                decided = rung.decide(call, rows, number) if rows else []
            except Exception as error:
                self._parts.counters.error(f"look up ({rung.name})", error)
                decided = []
            if decided and not can_select_rows(swap.arguments, args, kwargs, call.n_rows):
                decided = []  # rows could not be taken out of the batch safely
            if not rung.is_lossless:
                decided = self._doubt(call, decided)
            call.reused |= {reuse.row: reuse for reuse in decided}
            call.is_served = len(call.reused) == call.n_rows and all(
                reuse.layer == self._last and reuse.rung != "paper" for reuse in call.reused.values()
            )
            call.lookup_s += perf_counter() - started

    def _doubt(self, call: Call, decided: list[Reuse]) -> list[Reuse]:
        """Set aside what is to be checked: those rows are computed as if nothing had been found. Returns the others."""
        try:
            for reuse in decided:
                # A row that stands on another request's state would compute nothing to compare with.
                if reuse.row not in call.reused and self._parts.library.should_check(reuse.key, reuse.layer):
                    call.doubted[reuse.row] = reuse
        except Exception as error:
            self._parts.counters.error("choose what to check", error)
        return [reuse for reuse in decided if reuse.row not in call.doubted]

    def _try_to_capture(self, call: Call, number: int, hidden: Tensor) -> None:
        try:
            self._capture(call, number, hidden)
        except Exception as error:
            self._parts.counters.error("keep a state", error)
            call.captured.clear()

    def _capture(self, call: Call, number: int, hidden: Tensor) -> None:
        """Keep what rows computed at a stored layer, to be stored when the call has succeeded."""
        if number not in self._parts.library.banks:
            return
        for row in call.active_rows:
            reuse = call.reused.get(row.number)
            # What was computed on top of another request's state is not this request's, except to the paper.
            if reuse is not None and (reuse.layer >= number or reuse.rung == "semantic"):
                continue
            tensors = {"hidden": self._parts.payload.take(hidden[row.number], row.valid)}
            if call.kv_cache is not None:
                tensors |= self._capture_kv(call, row, number)
            call.captured.setdefault(row.number, {})[number] = tensors

    def _capture_kv(self, call: Call, row: Row, number: int) -> dict[str, Tensor]:
        """K and V (S, H, n, D_h) of this layer and the S - 1 layers since the stored one below it."""
        below = max((layer for layer in self._parts.library.layers if layer < number), default=-1)
        layers = call.kv_cache.layers[below + 1 : number + 1]
        return {
            "keys": torch.stack([layer.keys[row.number][:, row.valid] for layer in layers]),
            "values": torch.stack([layer.values[row.number][:, row.valid] for layer in layers]),
        }

    def _check(self, call: Call) -> None:
        """Compare what doubted rows computed with what they would have got. They are not stored: a stored one is near.

        A row may be missing from what was captured, if that failed.
        """
        for number, reuse in call.doubted.items():
            fresh = call.captured.pop(number, None)
            try:
                if fresh is not None:
                    divergence = cosine_distance(fresh[reuse.layer]["hidden"], reuse.entry)
                    self._parts.library.checked(reuse.key, reuse.layer, divergence)
            except Exception as error:
                self._parts.counters.error("check a reuse", error)
        self._parts.counters.revalidated(len(call.doubted))

    def _store(self, call: Call) -> None:
        assert call.scope is not None
        for number, states in call.captured.items():
            features = None if call.features is None else call.features[number]
            vector = None if call.fingerprints is None else call.fingerprints[number]
            try:
                if not self._parts.library.put(call.scope, call.rows[number], states, features, vector):
                    self._parts.counters.too_large()
            except Exception as error:
                self._parts.counters.error("store a request", error)

    def _count(self, call: Call, storing_s: float) -> None:
        hits = [(reuse.rung, reuse.layer) for reuse in call.reused.values()]
        n_misses = sum(row.number not in call.reused and row.number not in call.doubted for row in call.active_rows)
        self._parts.counters.call(hits, n_misses, call.n_skipped, call.lookup_s, storing_s)

    # -- small facts ---------------------------------------------------------------------------------------------------

    @property
    def _keeps_no_kv(self) -> bool:
        """Whether the model would make K/V that its head never reads and entries do not hold."""
        return self._parts.payload.fits_any_length and self._parts.trunk.makes_kv

    @property
    def _ends_after_norm(self) -> bool:
        return self._parts.payload.after_norm and self._parts.trunk.norm is not None

    def _scope(self, call: Call, hidden: Tensor) -> Scope:
        dtype = str(hidden.dtype)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype += f" autocast {torch.get_autocast_dtype(hidden.device.type)}"
        attention = str(getattr(self._parts.trunk.config, "_attn_implementation", ""))
        return Scope(call.namespace, self._parts.weights.digest(), dtype, attention)

    def _content_table(self, device: torch.device, weights: str) -> Tensor:
        """Bool (vocabulary,): whether a token carries content. Made anew when the weights, and so maybe it, changed."""
        if self._table is None or self._table[0] != (device, weights):
            with torch.inference_mode(False):
                table = torch.ones(vocabulary_size(self._parts.trunk), dtype=torch.bool, device=device)
                table[list(special_ids(self._parts.trunk, self._tokenizer))] = False
            self._table = ((device, weights), table)
            return table
        return self._table[1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, n_rows: int) -> None:
        """Leave the compiled graph for a moment: counters cannot be part of it."""
        self._thread.call = None
        self._parts.counters.bypass("compiled", n_rows)


def _reads(parts: Parts) -> str:
    """Which row a head reads by its place, whatever the mask says: `first`, `last`, or none of these."""
    if (
        parts.head.payload == "cls"
        or parts.payload.name == "cls"
        or getattr(parts.trunk.module, "pooler", None) is not None
    ):
        return "first"
    return "last" if parts.head.name == "classifier" and parts.head.payload == "last" else ""


def _is_open(reuse: Reuse | None, number: int) -> bool:
    """Whether a row may still be decided at this layer."""
    return reuse is None or reuse.layer < number


def _count_rows(arguments: dict[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
