"""The paper's layer-wise cache: Algorithm 1, line by line in `Layerwise.layer`.

Sizes: B rows, T tokens, D hidden width.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.calls.context_flags import ContextFlags
from llmcache.calls.save import Saved, save
from llmcache.calls.wrapped import Wrapped
from llmcache.config import CacheConfig
from llmcache.errors import NotCachedError
from llmcache.models.adapters import cache_name, first_attention, repack, unpack
from llmcache.models.arguments import can_select_rows, count_rows
from llmcache.models.hooks import Installed, Swap, listen
from llmcache.models.sentences import Compute, SentenceSwap, deferred
from llmcache.paper.bank import State
from llmcache.paper.banks import Banks, Check
from llmcache.paper.call import Call, Reuse
from llmcache.paper.fingerprints import Fingerprint
from llmcache.paper.forwards import LayerForward, Runner, TrunkForward, copy_kv, install
from llmcache.paper.opening import Opener
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row
from llmcache.stats import Stats
from llmcache.support.threads import forkable

RUNG = "paper"


class Layerwise(ContextFlags):
    """The layer-wise cache of one model. Thread-safe."""

    def __init__(self, wrapped: Wrapped, fingerprint: Fingerprint, banks: Banks, is_ahead: bool) -> None:
        """Replace the forwards of the trunk and of its layers.

        With `is_ahead` all banks are searched before layer 0, the deepest first; otherwise each when its layer is
        reached.
        """
        super().__init__()
        trunk, head, payload = wrapped.trunk, wrapped.head, wrapped.payload
        attention = first_attention(trunk) if fingerprint.reads_attention else None  # first: raises if there is none
        self._fingerprint, self.payload, self._banks, self._is_ahead = fingerprint, payload, banks, is_ahead
        self._weights, self._opener, self._depth = wrapped.weights, Opener(wrapped, fingerprint), trunk.depth
        #: The banks to search at each layer.
        self._searched = {0: [*reversed(banks)]} if is_ahead else {layer: [layer] for layer in banks}
        self._runner = Runner(payload, trunk.adapter)
        self._is_after_norm = payload.after_norm and trunk.norm is not None  # states are taken and inserted there
        self._wrapped, self.counters, self.trunk = wrapped, wrapped.counters, trunk
        self._counting = forkable(threading.RLock())
        self._hits_by_layer, self._reuses_by_layer = Counter[int](), Counter[int]()
        self._n_skipped = self._n_checked = 0
        self._is_retired = False
        self._local = threading.local()  # `call`: this thread's innermost call; `last`: outcomes
        self.installed: Installed = install(trunk, self)
        if self._is_after_norm and trunk.norm is not None:
            self.installed.add(listen(trunk.norm, self._on_norm))
        if attention is not None:
            self.installed.add(listen(attention, self._on_attention))
        pooled = head.pooled if payload.fits_any_length else None
        self._is_pooled = pooled is not None
        #: Within a sentence-transformers forward: functions that compute the states a hit did not. Else None.
        self._pooled: ContextVar[list[Compute] | None] = ContextVar("llmcache_pooled", default=None)
        if pooled is not None:
            self.installed.add(SentenceSwap(pooled.parent, self, self._pooled).remove)

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def call(self, swap: TrunkForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk through the cache and return its output.

        Raises:
            NotCachedError: A row is not served within `only_if_cached`.
        """
        if self._is_retired:
            return swap.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(swap.arguments.bind(args, kwargs))
            return swap.original(*args, **kwargs)
        call, outer, self._local.last = self._open(swap, args, kwargs), self.call_under_way(), ()
        started, self._local.call = perf_counter() - call.lookup_s, call
        try:
            if call.is_only_if_cached and call.reason is not None:
                raise NotCachedError(None)
            if call.reason is None and self._opener.keeps_no_kv:
                args, kwargs = swap.arguments.replace(args, kwargs, {"use_cache": False})
            output = swap.original(*args, **kwargs)
            # With `_is_after_norm`, the norm is one more step.
            if call.reason is None and call.turn != self._depth + self._is_after_norm:
                call.reason = "unwrapped" if self._is_retired else "other_layers"
                if call.reused:  # layers were skipped, but the stored states were not inserted
                    if call.kv_cache is not None:
                        call.kv_cache.reset()
                    output = swap.original(*args, **kwargs)
        finally:
            self._local.call = outer
        # Before `_close`, which sets a reason where nothing can be stored.
        is_served = bool(call.reused) and call.reason is None
        self._close(call, output, perf_counter() - started)
        if is_served and (left_out := self._pooled.get()) is not None:
            left_out.append(deferred(swap.original, args, kwargs, call.arguments["input_ids"].device.type))
        return output

    def pass_by(self, swap: Swap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of another encoder of the model, which is not cached; count its rows."""
        if self.is_only_if_cached.get():
            raise NotCachedError(None)
        output = swap.original(*args, **kwargs)
        self._bypass("disabled" if self.is_disabled.get() else "other_encoder", swap.arguments.bind(args, kwargs))
        return output

    def call_under_way(self) -> Call | None:
        """Return this thread's innermost call of the trunk; None within a compiled graph."""
        return None if torch.compiler.is_compiling() else getattr(self._local, "call", None)

    def layer(self, swap: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run Algorithm 1 for one layer: search its bank; on a hit use h'_l, else compute and store h_l."""
        call = self._local.call
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        if number == 0:
            call.reason = self._begin(call, swap, args, kwargs)
            if call.reason is not None:
                return swap.original(*args, **kwargs)
        if number == 0 or (self._fingerprint.per_layer and number in self._banks):
            self._take_fingerprint(call, hidden)  # line 1
        for layer in self._searched.get(number, ()):
            self._search(call, layer)  # lines 3 and 4
        if call.is_only_if_cached and (number == 0 or number in self._banks):
            least = 0 if self._is_ahead else number
            if missing := tuple(row.number for row in call.rows if not call.skips(row.number, least)):
                raise NotCachedError(missing)
        if call.reused:
            is_activated = self._weights.activated is not None  # PEFT's hooks expect all rows of the batch
            can_select = not is_activated and can_select_rows(swap.arguments, args, kwargs, len(call.rows))
            call.takes_all_rows = not can_select
        output = self._runner.run(call, swap, number, args, kwargs)  # line 7, for rows that need it
        if number not in self._banks or self._is_after_norm:
            return output
        computed = unpack(output)
        states = self._runner.place(call, number, computed)  # line 5
        self._keep(call, number, states)  # line 8
        return output if states is computed else repack(output, states)

    def _take_fingerprint(self, call: Call, hidden: Tensor) -> None:
        started = perf_counter()
        with self.counters.guard("take a fingerprint"):
            self._opener.take_fingerprint(call, hidden)
        call.lookup_s += perf_counter() - started

    def _search(self, call: Call, number: int) -> None:
        """Search the bank of a layer for a stored fingerprint f' with sim(f_X, f') >= tau."""
        started = perf_counter()
        with self.counters.guard("search a bank"):
            found = self._find(call, number)
            call.reused |= found
            call.reuses += [number] * len(found)
        call.lookup_s += perf_counter() - started

    def _find(self, call: Call, number: int) -> dict[int, Reuse]:
        """Return the stored states that serve rows at a layer, by row; record the rows to check."""
        done = {*call.checked, *(call.reused if self._is_ahead else ())}
        rows = [row for row in call.active_rows if not row.is_misread and row.number not in done]
        if call.vectors is None or not (call.may_search and rows):
            return {}
        kinds, vectors = [self._opener.kind_of(call, row) for row in rows], call.vectors[[row.number for row in rows]]
        # A row that reuses a state is not checked: its computed states would depend on another request.
        keys = ["" if row.number in call.reused else row.key for row in rows]
        reused = {}
        for row, near in zip(rows, self._banks.search(number, kinds, vectors, keys), strict=True):
            if near is None:
                continue
            call.near[row.number] = max(near.similarity, call.near.get(row.number, -1.0))
            if not near.may_serve:
                continue
            kept, entry = self._banks[number].unpack(near.entry), near.entry
            reuse = Reuse(number, kept["hidden"], kept.get("keys"), kept.get("values"), entry.key, near.similarity)
            if near.is_checked:
                call.checked[row.number] = reuse, entry
            else:
                reused[row.number] = reuse
        return reused

    def _keep(self, call: Call, number: int, states: Tensor) -> None:
        """Copy the states (B, T, D) that rows computed at a layer, to be stored once the call has succeeded."""
        started = perf_counter()
        with self.counters.guard("keep a state"), torch.inference_mode(False), torch.no_grad():
            for row in call.active_rows:
                if call.skips(row.number, number):
                    continue
                tensors = {"hidden": self.payload.take(states[row.number], row.valid).clone()}
                if call.kv_cache is not None:
                    tensors |= copy_kv(call.kv_cache, row, 0 if self._is_ahead else number, number)
                vector = None if call.vectors is None else call.vectors[row.number]
                features = None if call.features is None else call.features[row.number]
                state = State(number, row.key, self._opener.kind_of(call, row), tensors, vector, features)
                call.computed.append((row.number, state))
        call.storing_s += perf_counter() - started

    def _store(self, call: Call) -> None:
        """Store the copied states unless weights changed meanwhile; compare checked rows."""
        if not call.computed:
            return
        assert call.scope is not None
        if self._runner.cannot_skip:  # found when the first layer ran
            call.reason = "unknown_output"
        elif not self._weights.stayed(call.snapshot, call.scope.weights):
            call.reason = "weights_changed"
        if call.reason is not None:
            return
        states, checks = [], []
        for number, state in call.computed:
            if number not in call.checked:
                states.append(state)
                continue
            reuse, entry = call.checked[number]
            if reuse.layer == state.layer:
                checks.append(Check(state.layer, entry, state.tensors["hidden"], reuse.hidden))
        if n_too_large := self._banks.put(states, checks, call.generation):
            self.counters.too_large(n_too_large)

    # -- a call --------------------------------------------------------------------------------------------------------

    def _open(self, swap: TrunkForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Open a call: read its rows with their keys, or set the reason for a bypass."""
        started, call = perf_counter(), Call(self.namespace.get(), self.is_only_if_cached.get())
        call.generation = self._banks.purges.generation
        call.arguments = swap.arguments.bind(args, kwargs)
        if torch.is_grad_enabled():
            self._weights.suspect()  # an optimizer may change them from now on
        if self.is_disabled.get():
            call.reason = "disabled"
        elif self._runner.cannot_skip:
            call.reason = "unknown_output"
        elif self._is_pooled and self._pooled.get() is None:
            call.reason = "token_states"
        else:
            call.reason = self.counters.find_reason("read a call", self._opener.open, call, args, kwargs)
        call.lookup_s = perf_counter() - started
        return call

    def _begin(self, call: Call, swap: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Prepare a call at layer 0; return the reason for a bypass, or None."""
        names = swap.arguments.names
        hidden, kv_cache = (swap.arguments.get(args, kwargs, name) for name in (names[0], cache_name(names)))
        reason = self.counters.find_reason("begin a call", self._opener.begin, call, hidden, kv_cache)
        if reason is not None and call.is_only_if_cached:
            raise NotCachedError(None)
        if reason is None and self._fingerprint.reads_attention:  # not guarded: an error here is the model's
            call.first_output = swap.original(*args, **kwargs)
        return reason

    def _on_norm(self, output: Any) -> Any:
        """Insert reused states and copy computed ones after the final norm, for payloads taken there."""
        call = self.call_under_way()
        if call is None or call.reason is not None or call.turn != self._depth:
            return None
        call.turn += 1
        states = self._runner.place(call, self._depth - 1, output)
        self._keep(call, self._depth - 1, states)
        return states

    def _on_attention(self, output: Any) -> None:
        if (call := self.call_under_way()) is not None:
            call.attention = unpack(output)

    def _close(self, call: Call, output: Any, took_s: float) -> None:
        """Store the states of a call that has succeeded, count it, and record the outcome of each row."""
        started = perf_counter()
        if call.reason is None:
            with self.counters.guard("store a call"):
                self._store(call)
                self._report_costs(call, took_s - call.lookup_s - call.storing_s)
        if call.reason is not None:
            self._bypass(call.reason, call.arguments)
            return
        outcomes = tuple(self._outcome(call, row) for row in call.rows)
        self._local.last = outcomes
        with self._counting:
            self._hits_by_layer.update(reuse.layer for reuse in call.reused.values())
            self._reuses_by_layer.update(call.reuses)
            self._n_skipped += call.n_skipped
            self._n_checked += len(call.checked)
        counted = tuple(
            outcome for outcome, row in zip(outcomes, call.rows, strict=True) if row.number not in call.checked
        )
        self.counters.done(counted, 0, call.lookup_s, 0.0, call.storing_s + perf_counter() - started)

    def _report_costs(self, call: Call, took_s: float) -> None:
        """Report to the policies the cost of each computed row: the call's milliseconds, divided by tokens."""
        n_tokens = {row.key: row.n_valid for row in call.active_rows if row.number not in call.reused}
        if n_tokens and took_s > 0:
            total = sum(n_tokens.values())
            self._banks.report_costs({key: 1e3 * took_s * n / total for key, n in n_tokens.items()})

    def _outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        reuse = call.reused.get(row.number)
        if reuse is None:
            return Outcome(row.key, similarity=call.near.get(row.number))
        return Outcome(row.key, RUNG, reuse.layer, reuse.key, reuse.similarity)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, arguments: dict[str, Any]) -> None:
        """Count a bypass outside the compiled graph, which cannot contain counters."""
        if torch.is_grad_enabled():
            self._weights.suspect()
        self._bypass("compiled", arguments)

    def _bypass(self, reason: str, arguments: dict[str, Any]) -> None:
        n_rows = count_rows(arguments)
        self.counters.bypass(reason, n_rows)
        if reason != "decode":  # a decode step belongs to the request of its prefill
            self._local.last = (Outcome(bypassed=reason),) * n_rows

    # -- for the facade ------------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[Outcome, ...]:
        return getattr(self._local, "last", ())

    def join(self, kv_cache: Any, rows: Sequence[tuple[Any, int]]) -> None:
        """Follow nothing: generated tokens are not stored."""

    def stats(self) -> Stats:
        """Return the counts since the start or `restart_stats`, and the figures of what is held now."""
        counted = self.counters.snapshot(**self._banks.held())
        with self._counting:
            return replace(
                counted,
                n_requests=counted.n_requests + self._n_checked,
                hits_by_layer=dict(self._hits_by_layer),
                reuses_by_layer=dict(self._reuses_by_layer),
                n_revalidated=self._n_checked,
                n_layers_skipped=self._n_skipped,
            )

    def restart_stats(self) -> None:
        self.counters.restart()
        with self._counting:
            self._hits_by_layer.clear()
            self._reuses_by_layer.clear()
            self._n_skipped = self._n_checked = 0

    def clear(self, namespace: str | None = None) -> int:
        """Remove the entries of a namespace, or all (None); return how many requests they belonged to.

        Counts and fitted fingerprints and codecs stay.
        """
        if namespace is None:
            self._weights.recheck()
        return self._banks.drop(namespace)

    def forget(self, calls: Iterable[Callable[[], object]]) -> int:
        """Make the calls, then forget their requests and those that served them; return how many were held."""
        keys = set[str]()
        for call in calls:
            call()
            keys |= {key for outcome in self.last for key in (outcome.key, outcome.source) if key}
        return self._banks.forget(keys)

    def drain(self) -> int:
        """Return 0: there is no background work."""
        return 0

    def close(self) -> None:
        """Restore the model's forwards. Calls under way finish with correct answers; a second call does nothing.

        Raises:
            WrapError: One of our forwards was wrapped by another one.
        """
        self._is_retired = True  # first: later calls bypass the cache
        self.installed.remove()

    def save(self, folder: str | Path, config: CacheConfig) -> None:
        save(folder, self._wrapped, config, {"layers": self._banks}, {})

    def restore(self, saved: Saved) -> None:
        saved.restore(self.payload.name, {"layers": self._banks})
