"""A call of the trunk, from the caller's arguments to its output. Only this module knows the order of the steps.

    open      read the arguments: rows with exact keys, or the reason for a bypass
    look_up   ask the rungs for hits, safest first; the audit then draws among the approximate hits
    answer    run the trunk on the rows without a hit, and assemble the output
    close     store computed rows, update counters, record each row's outcome, pass answers to the observer

A failure of the cache is counted and logged, and the call is computed. Errors of the model are raised unchanged.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import repeat
from operator import is_
from time import perf_counter
from typing import Any

import torch

from llmcache.calls.chunks import Chunks
from llmcache.calls.prefix import Prefix
from llmcache.calls.prepared import Prepared
from llmcache.calls.stored_blocks import StoredBlocks
from llmcache.calls.stored_entries import StoredEntries
from llmcache.calls.switches import Switches
from llmcache.engines.engine import Eager, Engine
from llmcache.memory.bank import Bank, Entry
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.stores.tier import Tier
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING, count_rows
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import Swap
from llmcache.models.kinds import Kinds
from llmcache.models.packing import Packing, Payload, parts_of
from llmcache.models.sentences import Compute, deferred
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.request.forms import Forms, find_reason_now
from llmcache.request.outcome import Outcome
from llmcache.request.reading import RequestReader
from llmcache.request.rows import Row, Scope
from llmcache.reuse.audit.audit import Audit
from llmcache.reuse.calibration.observer import Observer
from llmcache.reuse.calibration.sharing import SharedCalibration
from llmcache.reuse.call import Call, Hit, Rung
from llmcache.reuse.decide import Semantic
from llmcache.reuse.draft import Draft
from llmcache.reuse.search_cost import Account
from llmcache.support.context import setting

_MOST_SCOPES = 256  # scopes kept for each state of the trunk


class Exact:
    """The rung `exact`: serves a request from the entry under its own key. Lossless."""

    name = "exact"
    is_lossless = True

    def __init__(self, bank: Bank, stored: StoredEntries | None) -> None:
        self._bank, self._stored = bank, stored

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        if self._stored is not None:
            self._stored.recall(call, rows)
        found = self._bank.find(rows)
        for row, entry in zip(rows, found, strict=True):
            if entry is not None:
                padding = entry.padding if entry.layout == row.layout else ()
                call.hits[row.number] = Hit("exact", entry.key, entry.fields, padding)
        if self._stored is not None:
            self._stored.offer_again(call, [entry for entry in found if entry is not None])


class CachedForward(Swap, Switches):
    """Replaces the trunk's forward. One per wrapped model. Thread-safe."""

    is_of_trunk = True

    def __init__(
        self,
        trunk: Trunk,
        head: Head,
        payload: Payload,
        bank: Bank,
        reader: RequestReader,
        weights: Weights,
        coupling: Coupling,
        counters: Counters,
        blocks: BlockPool | None = None,
        cuts: bool = True,
        tier: Tier | None = None,
        device: torch.device | None = None,
        is_exact: bool = True,
    ) -> None:
        """Replace the trunk's forward."""
        super().__init__(trunk.module, self)
        self._trunk, self._head, self._payload, self._bank = trunk, head, payload, bank
        self._reader, self._weights, self._coupling, self._counters = reader, weights, coupling, counters
        self._depth, self._device = trunk.depth, device or torch.device("cpu")
        self._forms = Forms(trunk, self.arguments, coupling, reader, not payload.fits_any_length)
        self._observed = head.observed if payload.fits_any_length else None
        self._is_pooled = head.pooled is not None and payload.fits_any_length
        #: How to store and assemble the trunk's output, by kind of call.
        self.packings = Kinds[Packing](Packing.describe, lambda described: Packing.read(described, payload))
        self._tier = tier
        self._stored = None if tier is None else StoredEntries(tier, bank, self.packings)
        self.rungs: Sequence[Rung] = (Exact(bank, self._stored),) if is_exact else ()  # safest first
        self.prefix = None
        if blocks is not None:
            stored_blocks = None if tier is None else StoredBlocks(tier, blocks)
            self.prefix = Prefix(trunk, blocks, counters, self.arguments, cuts, stored_blocks, is_exact)
        self.eager = Eager(self)
        self.engine: Engine = self.eager
        self._observer: Observer | None = None
        self._semantic: Semantic | None = None
        self.draft: Draft | None = None
        self._audit: Audit | None = None
        self._worker: AbstractContextManager[object] = nullcontext()  # the audit's, if the audit is on
        self._sharing: SharedCalibration | None = None
        self.account: Account | None = None  # None: search in every call
        self.is_retired = False
        self._local = threading.local()
        self.prepared = Prepared()
        Switches.__init__(self)
        self.prefixes_from: ContextVar[str | None] = ContextVar("llmcache_prefixes_from", default=None)
        self.chunks: ContextVar[Chunks | None] = ContextVar("llmcache_chunks", default=None)
        self.n_read: ContextVar[int | None] = ContextVar("llmcache_n_read", default=None)
        #: Called around a language-model head: how many of the last columns it reads. None: unknown, or it has run.
        self.reads_last = self.n_read.set
        #: Within a sentence-transformers forward: functions that compute the states a hit did not. Else None.
        self.pooled: ContextVar[list[Compute] | None] = ContextVar("llmcache_pooled", default=None)

    def learn(self, observer: Observer, semantic: Semantic, audit: Audit, sharing: SharedCalibration | None) -> None:
        """Add the rung `semantic` with its observer, audit and sharing. It serves only with a calibration."""
        self._observer, self._semantic, self._audit, self._sharing = observer, semantic, audit, sharing
        self._worker = audit.worker if audit.is_on else self._worker
        self.rungs = (*self.rungs, semantic)

    def on(self, trunk: Trunk, engine: str) -> "CachedForward":
        """Replace the forward of a twin of the trunk: its calls are keyed by `engine`, observed, and never stored."""
        other = CachedForward(
            trunk, self._head, self._payload, self._bank, self._reader, self._weights, self._coupling, self._counters
        )
        other.namespace, other._observer = self.namespace, self._observer
        other.engine = other.eager = Eager(other, engine)
        return other

    @property
    def last(self) -> tuple[Outcome, ...]:
        """Outcomes of the rows of this thread's last call."""
        outcomes: tuple[Outcome, ...] = getattr(self._local, "last", ())
        return outcomes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trunk's output: hits from memory, other rows computed."""
        if self.is_retired:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()):  # no graph breaks
                self._count_compiled(args, kwargs)
            return self.original(*args, **kwargs)
        # Calls made to be observed are computed in full and not stored.
        is_collecting = self._observer is not None and self._observer.collected.get() is not None
        with nullcontext() if is_collecting else self._worker:
            before, call = getattr(self._local, "last", ()), self.open(args, kwargs, is_collecting)
            try:
                if not self.look_up(call):
                    call = self.open(args, kwargs, is_collecting)
                    self.look_up(call)
                output = self.answer(call)
            except BaseException:
                self.withdraw(call)
                if not is_collecting:
                    self._local.last = ()
                raise
            self.close(call, output)
            if call.reason == "decode":  # `last` keeps the outcome of the prefill
                self._local.last = before
            return output

    def pass_by(self, swap: Swap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of another encoder of the model, which is not cached; count its rows."""
        call = Call(args, kwargs, self.namespace.get(), arguments=swap.arguments.bind(args, kwargs))
        call.reason = "disabled" if self.is_disabled.get() else "other_encoder"
        self.look_up(call)
        output = swap.original(*args, **kwargs)
        self.close(call, output)
        return output

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_collected: bool = False) -> Call:
        """Return a `Call` with its rows and their keys, or with the reason for a bypass."""
        call = Call(args, kwargs, self.namespace.get(), is_collected)
        call.n_read, call.prefixes_from = self.n_read.get(), self.prefixes_from.get()
        self.n_read.set(None)  # the head set it for its own trunk call, which is the first
        try:
            call.reason = self._read(call, args, kwargs)
        except Exception as error:
            call.reason = "error"
            self._counters.error("read a call", error)
        call.lookup_s += perf_counter() - call.started_s
        return call

    def _read(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Fill the call's fields; return the reason for a bypass, or None."""
        weights, pooled = self._weights, self._head.pooled
        if torch.is_grad_enabled():
            weights.suspect()  # an optimizer may write to them from now on
        if self.is_disabled.get():
            return "disabled"
        if reason := find_reason_now(self._trunk):
            return reason
        if self._is_pooled and self.pooled.get() is None and not call.is_collected:
            return "token_states"
        if self._tier is not None:
            call.since = self._tier.follow()  # apply purges by other processes first
            call.epoch = self._tier.number(call.namespace)
        # Hits are checked before they are served, misses before they are stored (`_are_unchanged`).
        look = weights.look(not (call.is_collected or self._tier or self.prefix) and self.engine is self.eager)
        if look.refusal is not None:
            return look.refusal
        call.mark, call.were_weights_checked, call.is_activated = look.mark, look.is_made, look.activated is not None
        state = call.state = self._forms.state(look.digest, look.modules)
        form, call.arguments, call.mask_4d = self._forms.find(args, kwargs, state)
        if form.reason is not None or state.reason is not None:
            return form.reason or state.reason
        is_observed_anew = self._observed is not None and self._observed.has_changed(look.digest)
        if is_observed_anew or (pooled is not None and pooled.has_changed()):
            return "other_pooling"
        if self._forms.are_hooked(state):
            return "hooked"
        autocast = ""
        if torch._C._is_any_autocast_enabled():
            device = call.arguments["input_ids"].device.type
            autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        call.kind = (look.digest, autocast, *form.kind)
        if self.packings.get(call.kind, True) is None:  # known as unpackable; an unknown kind passes
            return "more_output"
        call.generation, call.is_whole = self._bank.purges.generation, bool(state.coupling)
        engine = self.engine if look.activated is None else self.eager  # a graph has no hooks
        if engine is not self.eager:
            engine = engine.choose(call.args, call.kwargs, look.digest, form.keeps_kv)
        while engine is not call.engine:  # once more if it does not cover the rows: another engine has other keys
            call.engine, named = engine, (call.namespace, look.digest, autocast, form.attention, engine.name)
            call.scope = state.scopes.get(named)
            if call.scope is None:
                if len(state.scopes) >= _MOST_SCOPES:  # e.g. one namespace per session
                    state.scopes.clear()
                call.scope = state.scopes[named] = Scope(*named)
            if self._sharing is not None and not call.is_collected:
                self._sharing.step(call.scope, call.epoch)
            known = self.prepared.take(call) if self.prepared.kept else None
            if known is not None and self._may_serve(known, call):
                call.take_over(known, range(len(known.rows)))
                return None
            call.requests = self._reader.read(
                call.arguments, call.mask_4d, call.scope, state.tables, look.activated, call.is_whole
            )
            call.rows = call.requests.rows
            engine = engine if engine is self.eager else engine.covering(call.requests)
        if form.keeps_kv:
            return "prefix_off" if self.prefix is None else self.prefix.open(call)
        return None

    def _may_serve(self, known: Call, call: Call) -> bool:
        """Whether hits of a prepared call may serve this one: same calibration, sources serve, entries in the bank."""
        semantic, hits, takes = self._semantic, known.hits.values(), self.seen.get() is not None
        if known.made is not None and (self._needs_own(call) or not (semantic and semantic.is_current(known))):
            return False
        return all((hit.rung != "exact" or hit.source in self._bank) and (takes or hit.logits is None) for hit in hits)

    def _needs_own(self, call: Call) -> bool:
        """Whether no other request's states will do: rows affect each other, or the head reads more (labels, say)."""
        if call.is_whole and len(call.rows) > 1:
            return True
        if not (beside := self.beside.get()):
            return False
        tensors = [one for one in call.arguments.values() if isinstance(one, torch.Tensor)]
        return not all(any(map(is_, tensors, repeat(value))) for value in beside)

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call) -> bool:
        """Find hits for the rows of a call. Return False, without hits, if the weights changed since it was opened.

        Raises:
            NotCachedError: Within `only_if_cached`, a row has no hit or the call bypasses the cache.
        """
        if call.reason is None and not call.is_collected:
            started = perf_counter()
            try:
                if not call.is_looked_up:
                    self._ask_rungs(call)
                if call.hits and not (call.were_weights_checked or self._are_unchanged(call)):
                    call.hits.clear()
                    return False
            except Exception as error:
                call.hits.clear()
                if call.prefill is not None:
                    call.prefill.drop()
                self._counters.error("look up a call", error)
            call.lookup_s += perf_counter() - started
        if self.prepared.is_on.get():
            self.prepared.stop(call)
        is_strict = self.is_only_if_cached.get()
        if is_strict:
            self.check_cached(call)
        if self._audit is not None and call.reason is None and call.prefill is None and not call.is_collected:
            self._audit.draw(call)
            if is_strict:  # the audit takes back hits that it cannot audit, or that a drift forbids
                self.check_cached(call)
        return True

    def _are_unchanged(self, call: Call) -> bool:
        """Whether the weights are those of the call's keys, and were since it was opened."""
        assert call.scope is not None
        return self._weights.stayed(call.mark, call.scope.weights)

    def _ask_rungs(self, call: Call) -> None:
        """Ask each rung, safest first, for the rows without a hit."""
        if call.prefill is not None:
            assert self.prefix is not None
            self.prefix.look_up(call)
            return
        is_known = call.kind in self.packings or self.packings.knows(call.kind)  # can hits be assembled?
        if not (is_known or self._stored):
            return
        for rung in self.rungs:
            rows = [row for row in call.rows if not (row.bypass_reason or row.number in call.hits)]
            if not rows:
                break
            if not rung.is_lossless and self._needs_own(call):
                continue
            if rung.is_lossless or rung is self.draft:  # a calibration decides if a draft pays
                rung.look_up(call, rows)
            elif self.account is None or self.account.pays(call):
                started, call.n_searched = perf_counter(), len(rows)
                rung.look_up(call, rows)
                call.search_s += perf_counter() - started
        # Rows that affect each other are served all or none. PEFT's hooks expect all rows of a batch.
        is_known = is_known or self.packings.knows(call.kind)  # the store may have supplied it
        if not is_known or ((call.is_whole or call.is_activated) and len(call.hits) < len(call.rows)):
            call.hits.clear()

    def withdraw(self, call: Call) -> None:
        """Withdraw the audit's draws from a call whose hits are not served."""
        if call.audited and self._audit is not None:
            self._audit.withdraw(call)

    # -- answer --------------------------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Any:
        """Return the trunk's output, as `run`."""
        if call.reason is not None:
            return self.original(*call.args, **call.kwargs)
        if call.prefill is not None:
            assert self.prefix is not None
            return self.prefix.answer(call, partial(self._compute_prefill, call), self.chunks.get())
        failure, call.copied = None, self._find_equal(call) if len(call.rows) > 1 else {}
        if call.hits or call.copied:
            try:
                return self._serve(call)
            except Exception as error:
                failure = error
                call.hits.clear()
                call.copied.clear()
                self.withdraw(call)
                self.check_cached(call)
        output = self._compute(call, range(len(call.rows)))  # an error of the model is raised again here
        if failure is not None:
            self._counters.error("serve a call", failure)
        return output

    def _find_equal(self, call: Call) -> dict[int, int]:
        """Return the first equal row of the call for each row without a hit that has one, if rows can be copied."""
        if call.is_whole or call.is_activated or call.is_collected:
            return {}
        rest = [row for row in call.rows if not (row.number in call.hits or row.bypass_reason or row.is_misread)]
        return {row.number: row.same_as for row in rest if row.same_as is not None and row.same_as not in call.hits}

    def _serve(self, call: Call) -> Any:
        packing, ids, output = self.packings.get(call.kind), call.arguments["input_ids"], None
        rest = [row.number for row in call.rows if not (row.number in call.hits or row.number in call.copied)]
        if rest and (packing is not None or len(rest) > 1):  # of one row, a part that all rows share looks like its own
            output = self._compute(call, rest)
            packing = packing or Packing.learn(output, len(rest), ids.shape[1], self._payload)
        if packing is None:
            call.copied.clear()
            return self._compute(call, range(len(call.rows)))
        if rest and not packing.fits(output, len(rest), ids.shape[1]):
            raise TypeError("the trunk returned another kind of output than before")
        places = call.computed | {number: call.computed[first] for number, first in call.copied.items()}
        made = packing.join([row.valid for row in call.rows], ids.shape[1], call.hits, output, places, ids.device)
        if call.hits and (left_out := self.pooled.get()) is not None:
            left_out.append(deferred(self.original, call.args, call.kwargs, ids.device.type))
        return made

    def _compute(self, call: Call, numbers: Sequence[int]) -> Any:
        """Run the engine on rows of a call, given by number."""
        args, kwargs = call.args, call.kwargs
        if len(numbers) < len(call.rows):
            index = torch.tensor(numbers, device=call.arguments["input_ids"].device)
            for name in DECIDING:
                value = call.arguments.get(name)
                if value is not None and len(value) == len(call.rows):
                    args, kwargs = self.arguments.replace(args, kwargs, name, value.index_select(0, index))
        if self._forms.keeps_no_kv:
            args, kwargs = self.arguments.replace(args, kwargs, "use_cache", False)
        assert call.engine is not None
        started = perf_counter()
        call.output = call.engine.run(args, kwargs, [call.rows[number] for number in numbers])
        call.computing_s = perf_counter() - started
        call.computed = {number: place for place, number in enumerate(numbers)}
        return call.output

    def _compute_prefill(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk on a call that keeps K/V; within `chunked`, in chunks."""
        chunks = self.chunks.get()
        if chunks is None or call.is_activated or not chunks.fit(self.arguments, args, kwargs):
            assert call.engine is not None and call.prefill is not None
            return call.engine.run(args, kwargs, [row for row in call.rows if row.number not in call.prefill.whole])
        with setting(self.chunks, None):  # `between` may call this model: do not chunk those calls
            return chunks.run(self.original, self.arguments, args, kwargs)

    # -- close ---------------------------------------------------------------------------------------------------------

    def close(self, call: Call, output: Any) -> None:
        """Store computed rows, update counters, record outcomes. If the rows cannot be stored, count a bypass."""
        prefill, seen = call.prefill, self.seen.get()
        if seen is not None:
            seen.append(call)
        if call.reason is None and (call.computed or (prefill is not None and len(prefill.whole) < len(call.rows))):
            started = perf_counter()
            try:
                call.reason = self._store(call, output)
            except Exception as error:
                self._counters.error("store a call", error)
            call.storing_s += perf_counter() - started
        if call.reason is not None:
            self.withdraw(call)
            n_rows = count_rows(call.arguments or self.arguments.bind(call.args, call.kwargs))
            self._counters.bypass(call.reason, n_rows)
            if call.reason != "decode" and not call.is_collected:
                self._local.last = (Outcome(bypassed=call.reason),) * n_rows
            return
        if not call.is_collected:
            self._local.last = outcomes = tuple(map(self.outcome, repeat(call), call.rows))
            n_prompt = 0 if prefill is None else sum(r.n_valid for r in call.rows if r.number not in prefill.whole)
            self._counters.done(outcomes, self._depth, call.lookup_s, call.computing_s, call.storing_s, n_prompt)
            if call.audited and self._audit is not None:
                self._audit.served(call)
            if self.account is not None and call.made is not None:
                self.account.took(call)
        if call.entries:
            self.observe(call, None)

    def _store(self, call: Call, output: Any) -> str | None:
        """Store computed rows; return the bypass reason if output or weights forbid it."""
        assert call.scope is not None and call.state is not None and call.engine is not None
        if not (call.engine.holds_weights or self._are_unchanged(call)):
            return "weights_changed"
        if call.prefill is None and self.prefix and self._forms.returning is not None and CACHE in parts_of(output):
            self._forms.notice_kv(call.arguments, call.state)
            if reason := self.prefix.open(call):
                return reason
        if call.prefill is not None:
            assert self.prefix is not None
            known, served = call.prefill.whole, call.prefill.served
            n_left = (row.n_valid - served.get(row.number, 0) for row in call.rows if row.number not in known)
            if self._tier is not None:
                self._tier.computed(sum(n_left), call.computing_s)
            return self.prefix.store(call, output)
        n_tokens = call.arguments["input_ids"].shape[1]
        packing = self.packings.get(call.kind)
        if packing is None:
            learned = Packing.learn(call.output, len(call.computed), n_tokens, self._payload)
            packing = self.packings.learn(call.kind, learned)
            if packing is None:
                return "more_output"
        elif not packing.fits(call.output, len(call.computed), n_tokens):
            return None  # differs from earlier outputs of this kind: counted as a miss, not stored
        for number, place in call.computed.items():
            row = call.rows[number]
            if not row.bypass_reason and (call.is_collected or row.same_as not in call.computed):
                fields, padding = packing.take(
                    call.output, place, row.valid, row.has_layout or bool(row.layout), self._device
                )
                call.entries[number] = Entry(row.key, call.scope, fields, padding, row.layout)
        if not call.is_collected:
            cost = 1e3 * call.computing_s / len(call.computed)
            if n_too_large := self._bank.put(call.entries.values(), call.generation, cost):
                self._counters.too_large(n_too_large)
            if self._stored is not None:
                self._stored.put(call, call.entries.values())
                self._stored.tier.computed(len(call.computed) * n_tokens, call.computing_s)
        return None

    def outcome(self, call: Call, row: Row) -> Outcome:
        """Return the outcome of a row of a call that was looked up."""
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if call.prefill is not None:
            if row.number in call.prefill.whole:
                return Outcome(row.key, "exact", self._depth - 1, call.prefill.whole[row.number][0], 1.0)
            n_prefix = call.prefill.served.get(row.number, 0)
            missed = "coupled" if call.is_whole else call.prefill.missed.get(row.number)
            return Outcome(row.key, "prefix", n_prefix=n_prefix) if n_prefix else Outcome(row.key, missed=missed)
        hit, choice = call.hits.get(row.number), call.choices.get(row.number)
        if row.number in call.copied:
            return Outcome(row.key, "exact", self._depth - 1, row.key, 1.0)
        if hit is None:
            similarity, risk = (None, None) if choice is None else (choice.similarity, choice.risk)
            missed = "coupled" if call.is_whole and len(call.rows) > 1 else None
            return Outcome(row.key, similarity=similarity, risk=risk, missed=missed)
        layer, source = (self._depth - 1, hit.source) if hit.source else (None, None)  # of a draft
        return Outcome(row.key, hit.rung, layer, source, hit.similarity, hit.risk)

    def observe(self, call: Call, output: Any) -> None:
        """Pass a closed call to the observer, with the whole model's output; None: if it reads payloads instead."""
        if self._observer is not None and self._observer.answers.reads_payload is (output is None):
            with self._counters.guard("observe an answer"):
                self._observer.see(call, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a compiled call, outside the graph, which cannot hold counters."""
        if torch.is_grad_enabled():
            self._weights.suspect()
        n_rows = count_rows(self.arguments.bind(args, kwargs))
        self._counters.bypass("compiled", n_rows)
        self._local.last = (Outcome(bypassed="compiled"),) * n_rows
