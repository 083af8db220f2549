"""A call of the trunk, from the caller's arguments to its output. Only this module knows the order of the steps.

    open      read the arguments: rows with exact keys, or the reason for a bypass
    look_up   ask the rungs for hits, safest first; the audit then draws among the approximate hits
    answer    run the trunk on the rows without a hit, and assemble the output
    close     store computed rows, update counters, record each row's outcome, pass answers to the observer

A failure of the cache is counted and logged, and the call is computed. Errors of the model are raised unchanged.
"""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import is_
from time import perf_counter
from typing import Any

import torch

from llmcache.calls.chunks import Chunks
from llmcache.calls.context_flags import ContextFlags
from llmcache.calls.follower import Follower
from llmcache.calls.prefix import Prefix
from llmcache.calls.prepared import Prepared, PreparedCalls
from llmcache.calls.snapshots import Snapshots
from llmcache.calls.stored_blocks import StoredBlocks
from llmcache.calls.stored_entries import StoredEntries, entry_name
from llmcache.calls.wrapped import Wrapped
from llmcache.engines.engine import Eager, Engine
from llmcache.memory.bank import Bank, Entry
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.stores.tier import Tier
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import count_rows, take_rows
from llmcache.models.hooks import Answered, Distinct, Swap, are_hooked
from llmcache.models.output_formats import OutputFormats
from llmcache.models.packing import Packing, parts_of
from llmcache.models.sentences import Compute, deferred
from llmcache.request.call_signatures import CallSignatures, find_reason_now
from llmcache.request.outcome import Outcome
from llmcache.request.reading import RequestReader
from llmcache.request.rows import Row, Scope
from llmcache.reuse.approximate import Approximate
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.calibration.observer import Observer
from llmcache.reuse.call import Bypass, Call, Hit, Path, Rung, count_tokens
from llmcache.reuse.draft import Draft
from llmcache.reuse.observation import Observation
from llmcache.reuse.search_cost import SearchCost
from llmcache.support.threads import HEAD_PRODUCTS

_MOST_SCOPES = 256  # scopes kept for each state of the trunk


class Off:
    """The null form of `Approximate`: nothing is reused approximately, and nothing is asked to do it."""

    rungs: Sequence[Rung] = ()
    draft: Draft | None = None
    search_cost: SearchCost | None = None
    calibrated: CalibratedReuse | None = None
    index_nbytes = 0
    worker: AbstractContextManager[object] = nullcontext()
    #: See `Observer.collected`.
    collected: ContextVar[list[Observation] | None] = ContextVar("llmcache_collected", default=None)

    def _nothing(self, *args: Any) -> None:
        """Do nothing."""

    step = draw = served = withdraw = observe = _nothing
    forget = forget_waiting = bury = recheck = check_engine = close = close_draft = audit_stats = fail = _nothing

    def held(self) -> AbstractContextManager[object]:
        """Hold back nothing."""
        return nullcontext()

    def is_current(self, weights: str, calibration: Calibration, hits: Iterable[Hit]) -> bool:
        """Whether hits of a calibration may still serve: there is none."""
        return False

    def join(self, calls: Sequence[Any], output: Any) -> bool:
        """Put no logits into an output; return that nothing is missing."""
        return True

    def has_part_in(self, calls: Sequence[Any]) -> bool:
        """Whether a draft has a part in an output: there is none."""
        return False

    def sources_of(self, call: Call) -> list[str]:
        """Return the sources that would serve a call: none."""
        return []

    def settle(self) -> int:
        """Do all background work: there is none."""
        return 0


class Collecting(Off):
    """Of a twin of the trunk: passes what it computes to an observer."""

    def __init__(self, observer: Observer) -> None:
        """Pass calls to `observer`."""
        self.collected, self.observe = observer.collected, observer.see  # type: ignore[method-assign]


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
            if entry is not None and not (row.has_layout and not entry.padding and call.reads_padding(row)):
                padding = entry.padding if entry.layout == row.layout else ()
                call.hits[row.number] = Hit("exact", entry.key, entry.fields, padding)
        if self._stored is not None:
            self._stored.offer_again(call, [entry for entry in found if entry is not None])


class Rows(Path):
    """The path of calls that keep no K/V: every row is served or computed as a whole."""

    keeps_kv = False

    def __init__(
        self, forward: "CachedForward", wrapped: Wrapped, bank: Bank, tier: Tier | None, own: Sequence[Rung]
    ) -> None:
        """Serve from `bank`, from the store `tier`, and by `own` rungs of the user."""
        self._forward, self._bank, self._counters = forward, bank, wrapped.counters
        self._payload, self._device, self._depth = wrapped.payload, wrapped.device, wrapped.trunk.depth
        #: How to store and assemble the trunk's output, by kind of call.
        self.packings = OutputFormats[Packing](Packing.describe, partial(Packing.read, payload=wrapped.payload))
        self._stored = None if tier is None else StoredEntries(tier, bank, self.packings)
        self.rungs = (*((Exact(bank, self._stored),) if wrapped.config.serves_exact else ()), *own)  # safest first

    def look_up(self, call: Call) -> None:
        """Ask each rung, safest first, for the rows without a hit."""
        reuse, within, n_coupled = self._forward.reuse, self._forward.model_call.get(), call.is_coupled * len(call.rows)
        has_more = within is not None and bool(within.beside)
        is_known = call.kind in self.packings or self.packings.knows(call.kind)  # can hits be assembled?
        if not (is_known or self._stored):
            return
        for rung in (*self.rungs, *reuse.rungs):
            rows = [row for row in call.rows if not (row.bypass_reason or row.number in call.hits)]
            if not rows:
                break
            if (has_more or n_coupled > 1) and not rung.is_lossless and self.needs_own(call.arguments, n_coupled):
                continue
            if rung.is_lossless or rung is reuse.draft:  # a calibration decides if a draft pays
                rung.look_up(call, rows)
            elif reuse.search_cost is None or reuse.search_cost.pays(call):
                started, call.n_searched = perf_counter(), len(rows)
                rung.look_up(call, rows)
                call.search_s += perf_counter() - started
        # Rows that affect each other are served all or none. PEFT's hooks expect all rows of a batch.
        is_known = is_known or self.packings.knows(call.kind)  # the store may have supplied it
        if not is_known or ((call.is_coupled or call.is_activated) and len(call.hits) < len(call.rows)):
            call.hits.clear()

    def needs_own(self, arguments: Mapping[str, Any], n_coupled: int) -> bool:
        """Whether no other request's states will do: rows affect each other, or the head reads more (labels, say)."""
        if n_coupled > 1:
            return True
        if (within := self._forward.model_call.get()) is None or not within.beside:
            return False
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        return not all(any(map(is_, tensors, repeat(value))) for value in within.beside)

    def served(self, call: Call) -> Collection[int]:
        return call.hits.keys()

    def drop(self, call: Call) -> None:
        call.hits.clear()

    def names(self, call: Call) -> list[str]:
        return [entry_name(row.key) for row in call.rows if row.key]

    def answer(self, call: Call) -> Any:
        failure, call.copied = None, self._find_equal(call) if len(call.rows) > 1 else {}
        if call.hits or call.copied:
            try:
                return self._serve(call)
            except Exception as error:
                failure = error
                call.hits.clear()
                call.copied.clear()
                self._forward.withdraw(call)
                self._forward.check_cached(call)
        output = self._compute(call, range(len(call.rows)))  # an error of the model is raised again here
        if failure is not None:
            self._counters.error("serve a call", failure)
        return output

    def _find_equal(self, call: Call) -> dict[int, int]:
        """Return the first equal row of the call for each row without a hit that has one, if rows can be copied."""
        if call.is_coupled or call.is_activated or call.is_collected:
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
        for number, hit in call.hits.items():
            if not hit.has_states:
                hit.fields = packing.blank(call.rows[number].n_valid, self._device)
        if rest and not packing.fits(output, len(rest), ids.shape[1]):
            raise TypeError("the trunk returned another kind of output than before")
        places = call.computed | {number: call.computed[first] for number, first in call.copied.items()}
        made = packing.join([row.valid for row in call.rows], ids.shape[1], call.hits, output, places, ids.device)
        if call.hits and (left_out := self._forward.pooled.get()) is not None:
            left_out.append(deferred(self._forward.original, call.args, call.kwargs, ids.device.type))
        return made

    def _compute(self, call: Call, numbers: Sequence[int]) -> Any:
        """Compute rows of a call, given by number: of a causal model together, where they share beginnings."""
        started, call.computed = perf_counter(), {number: place for place, number in enumerate(numbers)}
        prefix, call.beginnings, failure = self._forward.prefix, None, None
        if prefix is not None and prefix.share(call, [*call.computed]):
            try:
                call.output, call.beginnings = prefix.answer(call), prefix
            except Exception as error:
                failure = error
        if call.beginnings is None:
            args, kwargs, arguments = call.args, call.kwargs, self._forward.arguments
            if len(numbers) < len(call.rows):
                index = torch.tensor(numbers, device=call.arguments["input_ids"].device)
                args, kwargs = arguments.replace(args, kwargs, take_rows(call.arguments, index))
            if self._forward.signatures.keeps_no_kv:
                args, kwargs = arguments.replace(args, kwargs, {"use_cache": False})
            # An error of the model is raised again here.
            call.output = call.engine.run(args, kwargs, [call.rows[number] for number in numbers])
        if failure is not None:
            self._counters.error("share beginnings", failure)
        call.computing_s = perf_counter() - started
        return call.output

    def store(self, call: Call, output: Any) -> str | None:
        n_tokens = call.arguments["input_ids"].shape[1]
        packing = self.packings.get(call.kind)
        if packing is None:
            learned = Packing.learn(call.output, len(call.computed), n_tokens, self._payload)
            packing = self.packings.learn(call.kind, learned)
            if packing is None:
                return "more_output"
        elif not packing.fits(call.output, len(call.computed), n_tokens):
            return None  # differs from earlier outputs of this kind: counted as a miss, not stored
        if call.beginnings is not None:
            call.beginnings.store(call, call.output)
        for number, place in call.computed.items():
            row = call.rows[number]
            if call.beginnings is not None and self._is_cheap(call, call.beginnings, row):
                continue
            if not row.bypass_reason and (call.is_collected or row.same_as not in call.computed):
                is_padding_made = call.beginnings is None or call.reads_padding(row)
                keeps_padding = bool(row.layout) or (row.has_layout and is_padding_made)
                fields, padding = packing.take(call.output, place, row.valid, keeps_padding, self._device)
                call.entries[number] = Entry(row.key, call.scope, fields, padding, row.layout)
        if not call.is_collected:
            cost = 1e3 * call.computing_s / len(call.computed)
            if n_too_large := self._bank.put(call.entries.values(), call.generation, cost):
                self._counters.too_large(n_too_large)
            if self._stored is not None:
                self._stored.put(call, call.entries.values())
        return None

    def _is_cheap(self, call: Call, beginnings: Path, row: Row) -> bool:
        """Whether no more than a block of a row had to be computed, as in each step of a decoding without K/V."""
        prefix = self._forward.prefix
        if prefix is None or self._payload.fits_any_length:
            return False
        return beginnings.outcome(call, row).n_prefix + prefix.blocks.size >= row.n_valid

    def n_computed(self, call: Call) -> int:
        return count_tokens(call, call.computed) if call.beginnings is None else call.beginnings.n_computed(call)

    def outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if row.number in call.copied:
            return Outcome(row.key, "exact", self._depth - 1, row.key, 1.0)
        hit, choice = call.hits.get(row.number), call.choices.get(row.number)
        if hit is None and call.beginnings is not None and (found := call.beginnings.outcome(call, row)).rung:
            return found
        if hit is None:
            similarity, risk = (None, None) if choice is None else (choice.similarity, choice.risk)
            missed = "coupled" if call.is_coupled and len(call.rows) > 1 else None
            return Outcome(row.key, similarity=similarity, risk=risk, missed=missed)
        layer, source = (self._depth - 1, hit.source) if hit.source else (None, None)  # of a draft
        return Outcome(row.key, hit.rung, layer, source, hit.similarity, hit.risk)


class CachedForward(Swap, ContextFlags):
    """Replaces the trunk's forward. One per wrapped model. Thread-safe."""

    is_of_trunk = True

    def __init__(
        self,
        wrapped: Wrapped,
        bank: Bank,
        blocks: BlockPool | None = None,
        tier: Tier | None = None,
        rungs: Sequence[Rung] = (),
        twin_of: "CachedForward | None" = None,
        engine: str = "",
    ) -> None:
        """Replace the trunk's forward.

        Args:
            wrapped: The model.
            bank: Where requests are kept.
            blocks: Where K/V is kept; None: calls that keep K/V are bypassed.
            tier: The store behind both.
            rungs: The user's own.
            twin_of: The forward whose model this one is a twin of: calls are keyed by `engine`, and only observed.
            engine: Name of the engine that keys are made for.
        """
        trunk = wrapped.trunk
        Swap.__init__(self, trunk.module, self)
        ContextFlags.__init__(self, None if twin_of is None else twin_of.namespace)
        self._trunk, self._bank, self._tier, self._depth = trunk, bank, tier, trunk.depth
        self._weights, self._counters = wrapped.weights, wrapped.counters
        self._is_pooled = wrapped.head.pooled is not None and not wrapped.keeps_tokens
        self._reader = RequestReader(trunk, wrapped.head, wrapped.payload, wrapped.tokenizer)
        self.signatures = CallSignatures(
            trunk, self.arguments, wrapped.coupling, wrapped.causality, self._reader, wrapped.head, wrapped.keeps_tokens
        )
        self.eager = Eager(self, engine)
        self.engine: Engine = self.eager
        self.reuse: Off | Approximate = Off()
        self.is_retired = False
        self._local = threading.local()
        self.prepared = PreparedCalls(wrapped.weights.adapted)
        self.prefixes_from: ContextVar[str | None] = ContextVar("llmcache_prefixes_from", default=None)
        self.chunks: ContextVar[Chunks | None] = ContextVar("llmcache_chunks", default=None)
        #: How many of the last columns a language-model head reads, while it runs; 0: each, for itself; None: unknown.
        self.n_read: ContextVar[int | None] = ContextVar("llmcache_n_read", default=None)
        #: The states that were returned last within a language-model head, if some are equal.
        self.distinct: ContextVar[Distinct | None] = ContextVar("llmcache_distinct", default=None)
        #: Within a sentence-transformers forward: functions that compute the states a hit did not. Else None.
        self.pooled: ContextVar[list[Compute] | None] = ContextVar("llmcache_pooled", default=None)
        self.rows = Rows(self, wrapped, bank, tier, rungs)
        self.prefix = self.snapshots = None
        self.follower = Follower(wrapped.weights.stayed)
        self._serves_prefixes = wrapped.config.prefix is not None
        if blocks is not None:
            stored = None if tier is None else StoredBlocks(tier, blocks)
            of_call = self.arguments, self.eager, self.chunks, self.distinct
            self.prefix = Prefix(wrapped, blocks, stored, *of_call, self.follower)
            self.snapshots = Snapshots(bank, self.prefix.blocks, self.arguments, self.follower)

    def use(self, reuse: "Off | Approximate") -> None:
        """Reuse approximately from now on; nothing is served so before it is calibrated."""
        self.reuse = reuse

    def compute_by(self, engine: Engine | None) -> None:
        """Compute by an engine from now on; None: by the trunk itself."""
        self.engine = engine or self.eager

    @property
    def last(self) -> tuple[Outcome, ...]:
        """Outcomes of the rows of this thread's last call."""
        outcomes: tuple[Outcome, ...] = getattr(self._local, "last", ())
        return outcomes

    def join(self, kv_cache: Any, rows: Sequence[tuple[Any, int]]) -> None:
        """Store what decode steps add to a K/V cache that rows of others were copied into; see `Follower.join`."""
        with self._counters.guard("follow a K/V cache"):
            self.follower.join(kv_cache, rows)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trunk's output: hits from memory, other rows computed."""
        if self.is_retired:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()):  # no graph breaks
                self._count_compiled(args, kwargs)
            return self.original(*args, **kwargs)
        # Calls made to be observed are computed in full and not stored.
        is_collecting = self.reuse.collected.get() is not None
        with nullcontext() if is_collecting else self.reuse.worker:
            before, call = getattr(self._local, "last", ()), self.open(args, kwargs, is_collecting)
            try:
                if not self.look_up(call):
                    call = self.open(args, kwargs, is_collecting)
                    self.look_up(call)
                within = self.model_call.get()
                is_answered, output = within is not None and within.answer_by(call), None
                if not is_answered:
                    output = self._pass(call) if isinstance(call, Bypass) else call.path.answer(call)
                    if not isinstance(call, Bypass) and call.engine.holds_weights:
                        HEAD_PRODUCTS.narrow()  # those of the head, which runs next
            except BaseException:
                self.withdraw(call)
                if not is_collecting:
                    self._local.last = ()
                raise
            self.close(call, output)
            if is_answered:
                raise Answered
            if isinstance(call, Bypass) and call.reason == "decode":  # `last` keeps the outcome of the prefill
                self._local.last = before
            return output

    def _pass(self, call: Bypass) -> Any:
        """Run a call that bypasses the cache; of a decode step, store what it adds to the K/V of a prompt."""
        if self.prefix is None:
            return self.original(*call.args, **call.kwargs)
        arguments = self.arguments.bind(call.args, call.kwargs)
        with self._counters.guard("follow a K/V cache"):
            if call.reason == "decode" and self._weights.activated is None:
                self.follower.check(arguments.get(CACHE), self.signatures.computes_alike)
            else:
                self.follower.drop(arguments.get(CACHE))
        output = self.original(*call.args, **call.kwargs)
        if call.reason == "decode":
            with self._counters.guard("follow a K/V cache"):
                self.follower.grow(arguments, output)
        return output

    def pass_by(self, swap: Swap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of another encoder of the model, which is not cached; count its rows."""
        call = Bypass(args, kwargs, "disabled" if self.is_disabled.get() else "other_encoder", swap.arguments)
        self.look_up(call)
        output = swap.original(*args, **kwargs)
        self.close(call, output)
        return output

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_collected: bool = False) -> Call | Bypass:
        """Return a call with its rows and their keys, or the reason for a bypass."""
        started, n_read = perf_counter(), self.n_read.get()
        self.n_read.set(None)  # the head set it for its own trunk call, which is the first
        try:
            if n_read is not None and are_hooked([self._trunk.module]):
                n_read = None
            call = self._read(args, kwargs, n_read, is_collected)
        except Exception as error:
            self._counters.error("read a call", error)
            call = "error"
        if isinstance(call, str):
            return Bypass(args, kwargs, call, self.arguments, is_collected)
        call.started_s = started
        call.lookup_s += perf_counter() - started
        return call

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], n_read: int | None, is_collected: bool
    ) -> Call | str:
        """Return an opened call, or the reason for a bypass."""
        if reason := self._find_reason_now(is_collected):
            return reason
        namespace, since, epoch = self.namespace.get(), "", 0
        if self._tier is not None:
            since = self._tier.follow()  # apply purges by other processes first
            epoch = self._tier.number(namespace)
        # Hits are checked before they are served, misses before they are stored (`Weights.stayed`).
        look = self._weights.look(not (is_collected or self._tier or self.prefix) and self.engine is self.eager)
        if look.refusal is not None:
            return look.refusal
        opened = self.signatures.open(args, kwargs, look)
        if isinstance(opened, str):
            return opened
        state, signature, arguments, mask_4d, autocast = opened
        kind = (look.digest, autocast, *signature.kind)
        if self.rows.packings.get(kind, True) is None:  # known as unpackable; an unknown kind passes
            return "more_output"
        generation, is_coupled = self._bank.purges.generation, bool(state.coupling)
        engine: Engine = self.engine if look.activated is None else self.eager  # a graph has no hooks
        if engine is not self.eager:
            engine = engine.choose(args, kwargs, look.digest, signature.keeps_kv)
        while True:  # once more if the engine does not cover the rows: another one has other keys
            named = (namespace, look.digest, autocast, signature.attention, engine.name)
            scope = state.scopes.get(named)
            if scope is None:
                if len(state.scopes) >= _MOST_SCOPES:  # e.g. one namespace per session
                    state.scopes.clear()
                scope = state.scopes[named] = Scope(*named)
            if not is_collected:
                self.reuse.step(scope, epoch)
            known = self.prepared.take(arguments, (scope, kind, generation, epoch)) if self.prepared.kept else None
            if known is not None and not self._may_serve(known, arguments, is_coupled):
                known = None
            if known is not None:
                requests = known.requests
                break
            read = (
                arguments,
                mask_4d,
                scope,
                state.tables,
                look.activated,
                signature.causal,
                is_coupled,
                signature.keeps_kv,
            )
            requests = self._reader.read(*read)
            covering = engine if engine is self.eager else engine.covering(requests)
            if covering is engine:
                break
            engine = covering
        base = None if look.activated is None or look.snapshot is None else look.snapshot.base
        is_single = len(requests.rows) == 1 and requests.valid is None  # of a batch, PEFT's hooks expect all rows
        blocks_scope = replace(scope, weights=base) if base is not None and is_single else scope
        call = Call(
            args,
            kwargs,
            arguments,
            mask_4d,
            state,
            signature.causal,
            look.snapshot,
            scope,
            blocks_scope,
            kind,
            engine,
            requests,
            requests.rows,
            self.rows,
            n_read,
            self.prefixes_from.get(),
            generation,
            epoch,
            since,
            is_collected,
            look.activated is not None,
            is_coupled,
            look.is_made,
        )
        if known is not None:
            known.resume(call)
            return call
        return self._keep_kv(call) or call if signature.keeps_kv else call

    def _find_reason_now(self, is_collected: bool) -> str | None:
        """Return the reason for a bypass that needs no look at the arguments, or None."""
        if torch.is_grad_enabled():
            self._weights.suspect()  # an optimizer may write to them from now on
        if self.is_disabled.get():
            return "disabled"
        if reason := find_reason_now(self._trunk):
            return reason
        return "token_states" if self._is_pooled and self.pooled.get() is None and not is_collected else None

    def _may_serve(self, known: Prepared, arguments: Mapping[str, Any], is_coupled: bool) -> bool:
        """Whether hits of a prepared call may serve this one: same calibration, sources serve, entries in the bank."""
        hits, takes = known.hits.values(), self.model_call.get() is not None
        if known.calibration is not None:
            needs_own = self.rows.needs_own(arguments, is_coupled * len(known.requests.rows))
            if needs_own or not self.reuse.is_current(known.when[0].weights, known.calibration, hits):
                return False
        return all((hit.rung != "exact" or hit.source in self._bank) and (takes or hit.has_states) for hit in hits)

    def _keep_kv(self, call: Call) -> str | None:
        """Have a call be served by blocks of K/V, or by copies of K/V caches; return a bypass reason, or None."""
        if self.prefix is None:
            return "prefix_off"
        copies = call.causal.copies and self._serves_prefixes
        path = self.snapshots if self.snapshots is not None and copies else self.prefix
        if (reason := path.open(call)) is None:
            call.path = path
        return reason

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call | Bypass) -> bool:
        """Find hits for the rows of a call. Return False, without hits, if the weights changed since it was opened.

        Raises:
            NotCachedError: Within `only_if_cached`, a row has no hit or the call bypasses the cache.
        """
        cached = None if isinstance(call, Bypass) or call.is_collected else call
        if cached is not None:
            started = perf_counter()
            try:
                if not cached.is_looked_up:
                    cached.path.look_up(cached)
                is_current = cached.were_weights_checked or not cached.hits
                if not (is_current or self._weights.stayed(cached.snapshot, cached.scope.weights)):
                    cached.hits.clear()
                    return False
            except Exception as error:
                cached.path.drop(cached)
                self._counters.error("look up a call", error)
            cached.lookup_s += perf_counter() - started
        if self.prepared.is_on.get():
            self.prepared.stop(call)
        is_strict = self.is_only_if_cached.get()
        if is_strict:
            self.check_cached(call)
        if cached is not None and not cached.path.keeps_kv:
            self.reuse.draw(cached)
            if is_strict:  # the audit takes back hits that it cannot audit, or that a drift forbids
                self.check_cached(call)
        return True

    def withdraw(self, call: Call | Bypass) -> None:
        """Withdraw the audit's draws from a call whose hits are not served."""
        if isinstance(call, Call) and call.audited:
            self.reuse.withdraw(call)

    # -- close ---------------------------------------------------------------------------------------------------------

    def close(self, call: Call | Bypass, output: Any) -> None:
        """Store computed rows, update counters, record outcomes. If the rows cannot be stored, count a bypass."""
        if (within := self.model_call.get()) is not None:
            within.calls.append(call)
        if isinstance(call, Bypass):
            self._bypass(call)
            return
        started, reason = perf_counter(), None
        try:
            if call.computed or (call.path.keeps_kv and len(call.path.served(call)) < len(call.rows)):
                reason = self._store(call, output)
            if call.path.keeps_kv and reason is None:
                call.path.follow(call, output)
        except Exception as error:
            self._counters.error("store a call", error)
        call.storing_s += perf_counter() - started
        if reason is not None:
            self.withdraw(call)
            self._bypass(Bypass(call.args, call.kwargs, reason, self.arguments, call.is_collected))
            return
        if not call.is_collected:
            self._local.last = outcomes = tuple(map(call.path.outcome, repeat(call), call.rows))
            n_tokens: tuple[int, ...] = ()
            if self.prefix is not None:
                n_tokens = (count_tokens(call, range(len(call.rows))), call.path.n_computed(call))
            self._counters.done(outcomes, self._depth, call.lookup_s, call.computing_s, call.storing_s, *n_tokens)
            if call.audited:
                self.reuse.served(call)
            if self.reuse.search_cost is not None and call.calibration is not None:
                self.reuse.search_cost.took(call)
        if call.entries:
            self.reuse.observe(call, None)

    def _bypass(self, call: Bypass) -> None:
        n_rows = count_rows(call.parameters.bind(call.args, call.kwargs))
        self._counters.bypass(call.reason, n_rows)
        if call.reason != "decode" and not call.is_collected:
            self._local.last = (Outcome(bypassed=call.reason),) * n_rows

    def _store(self, call: Call, output: Any) -> str | None:
        """Store computed rows; return the bypass reason if output or weights forbid it."""
        if not (call.engine.holds_weights or self._weights.stayed(call.snapshot, call.scope.weights)):
            return "weights_changed"
        if (
            not call.path.keeps_kv
            and self.prefix
            and self.signatures.returning is not None
            and CACHE in parts_of(output)
        ):
            self.signatures.notice_kv(call.arguments, call.state)
            if reason := self._keep_kv(call):
                return reason
        reason, is_on_cpu = call.path.store(call, output), call.arguments["input_ids"].device.type == "cpu"
        if self._tier is not None and is_on_cpu and not call.is_collected:  # elsewhere times are those of waiting
            self._tier.break_even.computed(call.path.n_computed(call), call.computing_s)
        return reason

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a compiled call, outside the graph, which cannot hold counters."""
        if torch.is_grad_enabled():
            self._weights.suspect()
        self._bypass(Bypass(args, kwargs, "compiled", self.arguments))
