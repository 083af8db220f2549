"""The order of a call, from the trunk's first argument to the stats. Every step is a function of another module.

    opened   -> may this call use the cache at all?
    layer 0  -> rows and exact keys, fingerprint, then the rungs decide
    layer l  -> rows to compute are computed, stored states put in, misses captured
    closed   -> misses stored, counters updated

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

from llmcache.adapters import CACHE, Arguments, Trunk, special_ids, unpack, vocabulary_size
from llmcache.bypass import find_reason, is_plain_cache
from llmcache.context import Call, Inputs, Reuse, Row, Scope, read_rows, to_host
from llmcache.fingerprint import Fingerprint
from llmcache.heads import Head
from llmcache.hooks import SwappedForward
from llmcache.library import Library
from llmcache.payloads import Payload, misread
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
        self._special_ids = special_ids(parts.trunk, tokenizer)
        self._vocabulary = vocabulary_size(parts.trunk)
        self._id_dtype = np.dtype(np.uint16 if self._vocabulary <= 2**16 else np.int32)
        self._tables: dict[torch.device, Tensor] = {}
        self._thread = threading.local()
        # Context variables follow async tasks too: a tenant's namespace must not leak into another's request.
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=False)

    # -- called by the hooks -------------------------------------------------------------------------------------------

    def opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a forward of the trunk, unless it must go by the cache."""
        arguments = self._arguments.bind(args, kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(_count_rows(arguments))
            return None
        self._thread.call = None
        reason = "disabled" if self.is_disabled.get() else self._find_reason(arguments)
        if reason is not None:
            self._parts.counters.bypass(reason, _count_rows(arguments))
            return None
        self._thread.call = Call(arguments, self.namespace.get())
        if self._keeps_no_kv:
            return self._arguments.replace(args, kwargs, "use_cache", False)
        return None

    def layer(self, swap: SwappedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer for the rows that need it."""
        call: Call | None = None if torch.compiler.is_compiling() else getattr(self._thread, "call", None)
        if call is not None and swap.number == 0:
            call = self._thread.call = self._begin(call, swap, args, kwargs)
        if call is None:
            return swap.original(*args, **kwargs)
        self._decide(call, swap.number)
        is_last = self._is_last(swap.number)
        ends_here = not (is_last and self._ends_after_norm)
        output = self._runner.run(call, swap, args, kwargs, places=ends_here)
        call.is_complete = is_last
        if ends_here:
            self._capture(call, swap.number, unpack(output))
        return output

    def normed(self, output: Tensor) -> Tensor | None:
        """After the final norm: where payloads of normed states are put in and taken."""
        call: Call | None = None if torch.compiler.is_compiling() else getattr(self._thread, "call", None)
        if call is None or not self._ends_after_norm or not call.is_complete:
            return None
        last = self._parts.trunk.depth - 1
        output = self._runner.place(call, last, output)
        self._capture(call, last, output)
        return output

    def closed(self) -> None:
        """End a forward: store what was computed, count what was done. A call that failed half-way leaves nothing."""
        if torch.compiler.is_compiling():
            return
        call: Call | None = getattr(self._thread, "call", None)
        self._thread.call = None
        if call is None or not call.is_complete:
            return
        started = perf_counter()
        self._store(call)
        self._count(call, perf_counter() - started)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _find_reason(self, arguments: dict[str, Any]) -> str | None:
        reason = find_reason(arguments, self._parts.trunk.module)
        if reason is None and self._keeps_no_kv and (arguments.get("use_cache") or arguments.get(CACHE) is not None):
            return "kv_cache_with_pooled_payload"
        return reason

    def _begin(self, call: Call, swap: SwappedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Read the call's rows and fingerprints, or give the call up."""
        started = perf_counter()
        call.kv_cache = swap.arguments.get(args, kwargs, CACHE)
        if call.kv_cache is not None and not is_plain_cache(call.kv_cache):
            self._parts.counters.bypass("kv_cache_kind", _count_rows(call.arguments))
            return None
        try:
            self._read(call, swap.arguments.get(args, kwargs, swap.arguments.names[0]))
        except Exception as error:
            self._parts.counters.error("read the request", error)
            self._parts.counters.bypass("error", _count_rows(call.arguments))
            return None
        call.lookup_s += perf_counter() - started
        return call

    def _read(self, call: Call, hidden: Tensor) -> None:
        """Everything that needs the host, in one transfer."""
        ids, mask = call.arguments["input_ids"], call.arguments.get("attention_mask")
        valid = None if mask is None else mask != 0
        content = self._content_table(ids.device)[ids]
        content = content if valid is None else content & valid
        fingerprint = self._parts.fingerprint
        features = None if fingerprint is None else fingerprint.features(hidden, content)
        types, positions = call.arguments.get("token_type_ids"), call.arguments.get("position_ids")
        inputs = Inputs(*to_host(ids, valid, types, positions, content.any(dim=1), features))
        call.scope = self._scope(call, hidden)
        call.rows = read_rows(call.scope, inputs, self._id_dtype)
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
        is_classifier = self._parts.head.name == "classifier"
        ids = inputs.ids[row.number]
        return "head_reads_padding" if misread(self._parts.payload, ids, row.valid, pad_id, is_classifier) else ""

    def _decide(self, call: Call, number: int) -> None:
        """Ask each rung in turn for the rows that none has served at this depth."""
        for rung in self._parts.rungs:
            if not rung.asks_at(number):
                continue
            started = perf_counter()
            rows = [row for row in call.active_rows if _is_open(call.reused.get(row.number), number)]
            try:
                decided = rung.decide(call, rows, number) if rows else []
            except Exception as error:
                self._parts.counters.error(f"look up ({rung.name})", error)
                decided = []
            call.reused |= {reuse.row: reuse for reuse in decided}
            call.lookup_s += perf_counter() - started

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
        n_misses = sum(row.number not in call.reused for row in call.active_rows)
        skipped = sum(1 if rung == "paper" else layer + 1 for rung, layer in hits)
        self._parts.counters.call(hits, n_misses, skipped, call.lookup_s, storing_s)

    # -- small facts ---------------------------------------------------------------------------------------------------

    @property
    def _keeps_no_kv(self) -> bool:
        """Whether the model would make K/V that its head never reads and entries do not hold."""
        return self._parts.payload.fits_any_length and self._parts.trunk.makes_kv

    @property
    def _ends_after_norm(self) -> bool:
        return self._parts.payload.after_norm and self._parts.trunk.norm is not None

    def _is_last(self, number: int) -> bool:
        return number == self._parts.trunk.depth - 1

    def _scope(self, call: Call, hidden: Tensor) -> Scope:
        dtype = str(hidden.dtype)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype += f" autocast {torch.get_autocast_dtype(hidden.device.type)}"
        attention = str(getattr(self._parts.trunk.config, "_attn_implementation", ""))
        return Scope(call.namespace, self._parts.weights.digest(), dtype, attention)

    def _content_table(self, device: torch.device) -> Tensor:
        """Bool (vocabulary,): whether a token carries content."""
        table = self._tables.get(device)
        if table is None:
            with torch.inference_mode(False):
                table = torch.ones(self._vocabulary, dtype=torch.bool, device=device)
                table[list(self._special_ids)] = False
            self._tables[device] = table
        return table

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, n_rows: int) -> None:
        """Leave the compiled graph for a moment: counters cannot be part of it."""
        self._thread.call = None
        self._parts.counters.bypass("compiled", n_rows)


def _is_open(reuse: Reuse | None, number: int) -> bool:
    """Whether a row may still be decided at this layer."""
    return reuse is None or reuse.layer < number


def _count_rows(arguments: dict[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
