"""A call of the trunk, from the caller's arguments to its output. Nothing else knows the order of its steps.

    open      read the arguments: rows with keys, or the reason for a bypass
    look_up   ask the rungs, safest first, which rows stored requests serve
    answer    run the trunk for the rows that are left, and put the output together
    close     store what was computed, count, note what became of each row

What fails here is counted, logged once, and computed around. Errors of the model itself are raised as without a cache.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, ne, not_
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from llmcache.audit.audit import Audit
from llmcache.bank import Bank, Entry
from llmcache.calibration.observer import Observer
from llmcache.counters import Counters
from llmcache.decide import Semantic
from llmcache.engines.engine import Eager, Engine
from llmcache.errors import NotCachedError
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import Swap, are_hooked
from llmcache.models.masks import flatten
from llmcache.models.model_config import setting
from llmcache.models.packing import Packing, parts_of
from llmcache.models.payloads import Payload
from llmcache.models.sentences import Compute, later
from llmcache.models.tracing import are_strange
from llmcache.models.weights import Weights
from llmcache.prefix.chunks import Chunks
from llmcache.prefix.prefix import Prefix
from llmcache.request.bypass import find_reason_now, find_reason_of
from llmcache.request.call import Call, Form, Hit, Rung, State
from llmcache.request.kinds import Kinds
from llmcache.request.outcome import Outcome
from llmcache.request.reading import RequestReader
from llmcache.request.rows import Row, Scope
from llmcache.request.variables import setting as setting_variable
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.stores.blocks import StoredBlocks
from llmcache.stores.entries import StoredEntries
from llmcache.stores.tier import Tier

DEFAULT_NAMESPACE = "default"
DISABLE = "LLMCACHE_DISABLE"  # environment variable
_ID_DTYPES = (torch.int64, torch.int32)  # others are refused by embeddings
_MOST_STATES = 16  # of the trunk that are remembered
_MOST_FORMS = 64  # of a state
_OF_SHAPES = ("input_shape", "mask_4d", "traced")  # reasons that depend on more than a form
_PLAIN = {Tensor, type(None), bool, int, float, str}
# Read in every call.
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Stop(BaseException):
    """Ends a call of the model that was to be read, not run."""


class Exact:
    """Serves a request from what was stored under its own key. Lossless."""

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


class CachedForward(Swap):
    """Stands in for the trunk's forward. One a wrapped model. Thread-safe."""

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
    ) -> None:
        """Take the place of the trunk's forward."""
        self._trunk, self._head, self._payload, self._bank = trunk, head, payload, bank
        self._reader, self._weights, self._coupling, self._counters = reader, weights, coupling, counters
        #: What outputs are made of, by kind.
        self.packings = Kinds[Packing](Packing.describe, lambda told: Packing.read(told, payload))
        self._tier = tier
        self._stored = None if tier is None else StoredEntries(tier, bank, self.packings)
        self.rungs: Sequence[Rung] = (Exact(bank, self._stored),)  # safest first
        self.is_retired = False
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        is_off = os.environ.get(DISABLE, "0") not in ("", "0")
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=is_off)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        self.prefixes_from: ContextVar[str | None] = ContextVar("llmcache_prefixes_from", default=None)
        self.chunks: ContextVar[Chunks | None] = ContextVar("llmcache_chunks", default=None)
        self.n_read: ContextVar[int | None] = ContextVar("llmcache_n_read", default=None)
        self._only_read: ContextVar[list[Call] | None] = ContextVar("llmcache_only_read", default=None)
        self._prepared: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by identity of their input_ids
        self.eager = Eager(self)
        self.engine: Engine = self.eager
        self._local = threading.local()
        # Of the config, and no part of the weights' digest.
        self._flags = (*trunk.asks_for_more, "return_dict", "use_cache")
        self._states: OrderedDict[str, State] = OrderedDict()  # by digest, the latest last
        self._observed = head.observed if payload.fits_any_length else None
        self._keeps_no_kv = payload.fits_any_length and trunk.makes_kv
        self._returns_kv = trunk.makes_kv and not trunk.adapter.is_guess  # of others that is seen at the first call
        #: Within the forward of a sentence-transformers model, what computes states that are left out; else None.
        self.pooled: ContextVar[list[Compute] | None] = ContextVar("llmcache_pooled", default=None)
        self._is_pooled = head.pooled is not None and payload.fits_any_length
        super().__init__(trunk.module, self)
        self.prefix = None
        if blocks is not None:
            stored = None if tier is None else StoredBlocks(tier, blocks)
            self.prefix = Prefix(trunk, blocks, counters, self.arguments, cuts, stored)
        self._observer: Observer | None = None
        self._audit: Audit | None = None
        self._semantic: Semantic | None = None
        #: Calls that have ended, of the forward of the whole model that is under way.
        self.seen: ContextVar[list[Call] | None] = ContextVar("llmcache_seen", default=None)

    def learn(self, observer: Observer, semantic: Semantic, audit: Audit | None) -> None:
        """Reuse approximately as well, as far as a calibration allows it.

        Args:
            observer: Shown the rows that are computed.
            semantic: Asked after all other rungs.
            audit: Looks into approximate hits; None: into none.
        """
        self._observer, self._audit, self._semantic = observer, audit, semantic
        self.rungs = (*self.rungs, semantic)

    def on(self, trunk: Trunk) -> "CachedForward":
        """Take the place of another trunk's forward, of the same tensors: its calls are computed and observed alone."""
        assert self._observer is not None
        other = CachedForward(
            trunk, self._head, self._payload, self._bank, self._reader, self._weights, self._coupling, self._counters
        )
        other.namespace, other._observer = self.namespace, self._observer
        return other

    @property
    def last(self) -> tuple[Outcome, ...]:
        """What became of each row of this thread's last call."""
        outcomes: tuple[Outcome, ...] = getattr(self._local, "last", ())
        return outcomes

    def read_only(self, call: Callable[[], object]) -> list[Call]:
        """The first call of the trunk in a call of the model, read and not run: what comes before the trunk is run."""
        read: list[Call] = []
        with setting_variable(self._only_read, read), suppress(Stop):
            call()
        return read

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's output: from memory as far as requests are known, and computed for the rest."""
        if self.is_retired:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(args, kwargs)
            return self.original(*args, **kwargs)
        if (only_read := self._only_read.get()) is not None:
            only_read.append(self.open(args, kwargs))
            raise Stop
        if self._is_collecting:
            return self._answer(self.open(args, kwargs))
        self._local.last = ()  # until it has succeeded
        if self._audit is None:
            return self._answer(self.open(args, kwargs))
        with self._audit.busy():
            return self._answer(self.open(args, kwargs))

    def _answer(self, call: Call) -> Any:
        try:
            self.look_up(call)
            output = self.answer(call)
        except BaseException:
            self._withdraw(call)
            raise
        self.close(call, output)
        return output

    @property
    def _is_collecting(self) -> bool:
        """Whether calls are computed to be observed: nothing serves them, and nothing of them is stored or counted."""
        return self._observer is not None and self._observer.collected.get() is not None

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read a call: its rows with their keys, or the reason for a bypass."""
        call = Call(args, kwargs, self.namespace.get())
        call.n_read, call.prefixes_from = self.n_read.get(), self.prefixes_from.get()
        self.n_read.set(None)  # it is about the head's own call, which comes first
        try:
            call.reason = self._read(call)
        except Exception as error:
            call.reason = "error"
            self._counters.error("read a call", error)
        call.lookup_s += perf_counter() - call.started_s
        return call

    def _read(self, call: Call) -> str | None:
        """Fill the call; the reason for a bypass, or None."""
        weights, pooled = self._weights, self._head.pooled
        if torch.is_grad_enabled():
            weights.suspect()  # an optimizer may write them from now on
        if self.is_disabled.get():
            return "disabled"
        if reason := find_reason_now(self._trunk):
            return reason
        if self._is_pooled and self.pooled.get() is None and not self._is_collecting:
            return "token_states"
        if weights.is_trained:
            return "gradients_held"
        if self._tier is not None:
            self._tier.follow()  # purges come first
            call.number = self._tier.number(call.namespace)
        look = weights.look()
        if look.refusal is not None:
            return look.refusal
        call.mark, call.is_activated = look.mark, look.activated is not None
        state = call.state = self._states.get(look.digest) or self._look(look.digest)
        form = self._find_form(call, state)
        if form.reason is not None or state.reason is not None:
            return form.reason or state.reason
        if self._observed is not None and self._observed.has_changed(look.digest):
            return "other_pooling"
        if pooled is not None and pooled.has_changed():
            return "other_pooling"
        if (any(chain.from_iterable(map(_HOOKS, state.spaces))) or are_hooked(())) and are_hooked(
            [part for part in self._trunk.module.modules() if part is not self._trunk.module]
        ):
            return "hooked"
        device = call.arguments["input_ids"].device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        call.engine = self.engine.choose(call.args, call.kwargs, look.digest, form.keeps_kv)
        named = call.namespace, autocast, self._trunk.attention, call.engine.name
        call.scope = state.scopes.get(named)
        if call.scope is None:
            call.scope = state.scopes[named] = Scope(call.namespace, look.digest, *named[1:])
        call.kind = (look.digest, autocast, *form.kind)
        if self.packings.get(call.kind, True) is None:
            return "more_output"
        call.generation = self._bank.generation(call.namespace)
        call.is_whole = bool(state.coupling)
        known = self._prepared.pop(id(call.arguments["input_ids"]), None) if self._prepared else None
        if known is not None and self._is_still(known, call):
            call.take_over(known, range(len(known.rows)))
            return None
        call.requests = self._reader.read(
            call.arguments, call.mask_4d, call.scope, state.content, look.activated, call.is_whole
        )
        if form.keeps_kv:
            return "prefix_off" if self.prefix is None else self.prefix.open(call)
        return None

    def _look(self, digest: str) -> State:
        """What holds of the trunk as it is now."""
        trunk, parts = self._trunk, self._trunk.module.modules()
        reason = None if trunk.runs_its_layers else "other_depth"
        reason = reason or ("other_attention" if trunk.looks_otherwise else None)
        spaces = [vars(part) for part in parts if part is not trunk.module]
        flags = [space.get("is_causal") for space in spaces] + [setting(trunk.config, "is_causal")]
        coupling, content = self._coupling.reason(digest), self._reader.content_table()
        state = State(digest, reason, coupling, spaces, False in flags, content)
        self._states[digest] = state
        while len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return state

    def _find_form(self, call: Call, state: State) -> Form:
        """What is known of calls like this one; names its arguments."""
        values = (*call.args, *call.kwargs.values())
        types = tuple(map(type, values))
        key: tuple[Any, ...] = ()
        if _PLAIN.issuperset(types):  # tensors are told apart by their dtypes, other values by themselves
            are_tensors = tuple(map(is_, types, repeat(Tensor)))
            tensors = tuple(compress(values, are_tensors))
            rest = tuple(compress(values, map(not_, are_tensors)))
            flags = tuple(map(setting, repeat(self._trunk.module.config), self._flags))
            key = len(call.args), tuple(call.kwargs), types, rest, tuple(map(_DTYPE, tensors)), flags
            form = state.forms.get(key)
            if form is not None:
                call.arguments = dict(zip(form.names, values, strict=True))
                if form.reason is not None or _fit_together(call.arguments, tensors):
                    return form
        names = tuple(self.arguments.bind(call.args, call.kwargs))
        call.arguments, call.mask_4d = flatten(dict(zip(names, values, strict=True)))
        form = self._make_form(names, call.arguments)
        if key and form.reason not in _OF_SHAPES:
            if len(state.forms) >= _MOST_FORMS:
                state.forms.clear()
            state.forms[key] = form
        return form

    def _make_form(self, names: tuple[str, ...], arguments: Mapping[str, Any]) -> Form:
        trunk, config = self._trunk, self._trunk.config
        reason = "traced" if are_strange(arguments.values()) else None
        reason = reason or find_reason_of(arguments, trunk, self.arguments.defaults)
        if reason is None and self._keeps_no_kv:
            reason = self._find_reason_of_kv(arguments)
        if reason is None and arguments["input_ids"].dtype not in _ID_DTYPES:
            reason = "input_shape"
        # The trunk may refuse an unusual dtype: it is asked before a call like this one is answered without it.
        dtypes = (
            [(name, one.dtype) for name in DECIDING if (one := arguments.get(name)) is not None] if not reason else []
        )
        kind = arguments.get("return_dict"), setting(config, "return_dict"), arguments.get("use_cache"), *dtypes
        keeps_kv = trunk.makes_kv and not self._keeps_no_kv and self._is_kv_kept(arguments)
        return Form(names, reason, keeps_kv, kind)

    def _is_kv_kept(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the caller is to hold K/V afterwards."""
        if arguments.get(CACHE) is not None or not self._returns_kv:
            return arguments.get(CACHE) is not None
        asked = arguments.get("use_cache")
        return bool(setting(self._trunk.config, "use_cache") if asked is None else asked)

    def _find_reason_of_kv(self, arguments: Mapping[str, Any]) -> str | None:
        """Why a call cannot be run without the K/V that the model would make; entries hold none."""
        if arguments.get("use_cache") or arguments.get(CACHE) is not None:
            return "kv_cache_with_pooled_payload"
        asked = arguments.get("use_cache")
        makes_kv = setting(self._trunk.config, "use_cache") if asked is None else asked
        # Without K/V models look at the positions for where a text begins, and hide the texts before from it.
        is_unmasked = arguments.get("attention_mask") is None and arguments.get("position_ids") is not None
        return "packed" if makes_kv and is_unmasked else None

    # -- calls that are looked up before they are made ---------------------------------------------------------------

    def prepare(self, run: Callable[[], object]) -> Call | None:
        """Return the call that `run` makes of the trunk, looked up and not run; None if it makes none."""
        call = next(iter(() if self.is_retired else self.read_only(run)), None)
        if call is not None:
            self._ask(call)
        return call

    def can_resume(self, call: Call, batch: Mapping[str, Any]) -> bool:
        """Return whether a call with tensors like those of `batch` can be recognised when it is made."""
        is_plain = call.reason is None and call.prefill is None and call.mask_4d is None
        return is_plain and all(call.arguments.get(name) is batch.get(name) for name in DECIDING)

    def keep(self, call: Call, numbers: Sequence[int], inputs: dict[str, Any]) -> Call:
        """Remember what was found of some rows until the model is run on `inputs`, or the result is let go."""
        kept = Call((), {}, call.namespace, scope=call.scope, kind=call.kind, inputs=inputs)
        kept.generation, kept.number, kept.versions = call.generation, call.number, _versions(inputs)
        kept.take_over(call, numbers)
        self._prepared[id(inputs["input_ids"])] = kept
        return kept

    def _is_still(self, known: Call, call: Call) -> bool:
        """Return whether a call is the one that was looked up, and what was found still holds."""
        is_same = all(call.arguments.get(name) is known.inputs.get(name) for name in DECIDING)
        if not is_same or known.versions != _versions(known.inputs):
            return False
        if (known.generation, known.number) != (call.generation, call.number):
            return False
        if (known.scope, known.kind) != (call.scope, call.kind):
            return False
        if known.made is not None and not (self._semantic is not None and self._semantic.is_current(known)):
            return False
        return all(hit.rung != "exact" or hit.source in self._bank for hit in known.hits.values())

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call) -> None:
        """Ask the rungs, safest first, for the rows that are not served yet.

        Raises:
            NotCachedError: The call is to be answered from the cache or not at all, and cannot be.
        """
        if not call.is_looked_up:
            self._ask(call)
        if self.is_only_if_cached.get() and (call.reason or len(call.hits) < len(call.rows)):
            if call.prefill is None or len(call.prefill.whole) < len(call.rows):
                found = call.hits if call.prefill is None else call.prefill.whole
                raise NotCachedError(
                    None if call.reason else tuple(r.number for r in call.rows if r.number not in found)
                )
        if self._audit is not None and call.reason is None and call.prefill is None and not self._is_collecting:
            with self._counters.guard("draw for the audit") as tried:
                self._audit.draw(call)
            if tried.has_failed:
                call.hits = {number: hit for number, hit in call.hits.items() if hit.answer is None}
                self._withdraw(call)

    def _ask(self, call: Call) -> None:
        """Ask the rungs; what fails serves nothing."""
        if call.reason is None and call.prefill is not None:
            started = perf_counter()
            try:
                self.prefix.look_up(call)
            except Exception as error:
                call.prefill.whole, call.prefill.served = {}, {}
                self._counters.error("look up a prefix", error)
            call.lookup_s += perf_counter() - started
        elif call.reason is None and not self._is_collecting and (self.packings.are_known(call.kind) or self._stored):
            started = perf_counter()
            try:
                for rung in self.rungs:
                    if (rung.is_lossless or not call.is_whole) and (rows := call.open_rows()):
                        rung.look_up(call, rows)
                is_known = self.packings.are_known(call.kind)  # how an output is put together
                if not is_known or (call.is_whole and len(call.hits) < len(call.rows)):
                    call.hits.clear()
                if len(call.hits) < len(call.rows) and call.is_activated:
                    call.hits.clear()  # PEFT's hooks expect all rows of the batch
            except Exception as error:
                call.hits.clear()
                self._counters.error("look up a call", error)
            call.lookup_s += perf_counter() - started

    def _drop_hits(self, call: Call) -> None:
        call.hits.clear()
        self._withdraw(call)

    def _withdraw(self, call: Call) -> None:
        """Hits that the audit drew are not served after all."""
        if call.audited and self._audit is not None:
            self._audit.withdraw(call)

    # -- answer --------------------------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Any:
        """The trunk's output, from memory as far as rows are served."""
        if call.reason is not None:
            return self.original(*call.args, **call.kwargs)
        if call.prefill is not None:
            started = perf_counter()
            try:
                return self.prefix.answer(call, partial(self._run_prefill, call))
            except Exception as error:  # also of the model: if it is, it is raised below
                chunks = self.chunks.get()
                if not (call.prefill.whole or call.prefill.served) or (chunks is not None and chunks.error is error):
                    raise
                call.prefill.whole, call.prefill.served = {}, {}
                self._counters.error("serve a prefix", error)
                return self.prefix.answer(call, partial(self._run_prefill, call))
            finally:
                call.computing_s = perf_counter() - started
        if call.hits:
            try:
                return self._serve(call)
            except Exception as error:  # also of the model: if it is, it is raised below
                self._drop_hits(call)
                self._counters.error("serve a call", error)
        return self._run(call, range(len(call.rows)))

    def _serve(self, call: Call) -> Any:
        packing = self.packings[call.kind]
        assert packing is not None
        rest = [row.number for row in call.rows if row.number not in call.hits]
        output, ids = None, call.arguments["input_ids"]
        if rest:
            output = self._run(call, rest)
            if not packing.fits(output, len(rest), ids.shape[1]):
                raise TypeError("the trunk returned another kind of output than before")
        kept = {number: (hit.fields, hit.padding) for number, hit in call.hits.items()}
        made = packing.join(call.rows, ids.shape[1], kept, output, call.computed, ids.device)
        if (left_out := self.pooled.get()) is not None:
            left_out.append(later(self.original, call.args, call.kwargs, ids.device.type))
        return made

    def _run_prefill(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk on a call that keeps K/V, in chunks if that is asked for."""
        chunks = self.chunks.get()
        if chunks is None or self._weights.activated is not None or not chunks.fit(self.arguments, args, kwargs):
            return call.engine.run(args, kwargs, [row for row in call.rows if row.number not in call.prefill.whole])
        with setting_variable(self.chunks, None):  # others may be let in, and call the model for themselves
            return chunks.run(self.original, self.arguments, args, kwargs)

    def _run(self, call: Call, numbers: Sequence[int]) -> Any:
        """Run the trunk on some rows of a call."""
        args, kwargs = call.args, call.kwargs
        if len(numbers) < len(call.rows):
            index = torch.tensor(numbers, device=call.arguments["input_ids"].device)
            for name in DECIDING:
                value = call.arguments.get(name)
                if value is not None and len(value) == len(call.rows):
                    args, kwargs = self.arguments.replace(args, kwargs, name, value.index_select(0, index))
        if self._keeps_no_kv:
            args, kwargs = self.arguments.replace(args, kwargs, "use_cache", False)
        started = perf_counter()
        call.output = call.engine.run(args, kwargs, [call.rows[number] for number in numbers])
        call.computing_s = perf_counter() - started
        call.computed = {number: place for place, number in enumerate(numbers)}
        return call.output

    # -- close ---------------------------------------------------------------------------------------------------------

    def close(self, call: Call, output: Any) -> None:
        """Store computed rows, unless weights or namespace changed meanwhile; count; note what became of each row."""
        is_computed = call.computed or (call.prefill is not None and len(call.prefill.whole) < len(call.rows))
        if call.reason is None and is_computed:
            started = perf_counter()
            try:
                call.reason = self._store(call, output)
            except Exception as error:
                self._counters.error("store a call", error)
            call.storing_s += perf_counter() - started
        if call.reason is not None:
            n_rows = _count_rows(call.arguments or self.arguments.bind(call.args, call.kwargs))
            self._counters.bypass(call.reason, n_rows)
            if call.reason != "decode" and not self._is_collecting:
                self._local.last = (Outcome(bypassed=call.reason),) * n_rows
            return
        if not self._is_collecting:
            self._local.last = tuple(map(self._outcome, [call] * len(call.rows), call.rows))
            n_prompt = 0
            if call.prefill is not None:
                n_prompt = sum(row.n_valid for row in call.rows if row.number not in call.prefill.whole)
            self._counters.done(self._local.last, self._trunk.depth, call.lookup_s, call.storing_s, n_prompt)
            if call.audited and self._audit is not None:
                self._audit.served(call)
        if self._observer is not None and call.entries:
            if self._observer.answers.reads_payload:
                self.observe(call, None)
            elif (seen := self.seen.get()) is not None:
                seen.append(call)

    def observe(self, call: Call, output: Any) -> None:
        """Show the observer a call that was closed, and what the whole model returned."""
        assert self._observer is not None
        with self._counters.guard("see what the model answered"):
            self._observer.see(call, output)

    def _store(self, call: Call, output: Any) -> str | None:
        """Keep what was computed; the reason why it cannot be cached, where the output or the weights say so."""
        assert call.scope is not None
        if not self._weights.stayed(call.mark, call.scope.weights):
            return "weights_changed"
        if call.prefill is None and not self._returns_kv and self.prefix is not None and CACHE in parts_of(output):
            self._returns_kv = True
            call.state.forms.clear()
            if reason := self.prefix.open(call):
                return reason
            call.prefill.kv_cache = output[CACHE]
        if call.prefill is not None:
            known, served = call.prefill.whole, call.prefill.served
            n_left = (row.n_valid - served.get(row.number, 0) for row in call.rows if row.number not in known)
            self._tell_time(call, sum(n_left))
            return self.prefix.store(call, output)
        ids, output = call.arguments["input_ids"], call.output
        assert call.state is not None
        packing = self.packings.get(call.kind)
        if packing is None:
            learned = Packing.learn(output, len(call.computed), ids.shape[1], self._payload)
            packing = self.packings.learn(call.kind, learned)
            if packing is None:
                return "more_output"
        elif not packing.fits(output, len(call.computed), ids.shape[1]):
            return None
        for row in call.rows:
            if row.number in call.computed and not row.bypass_reason:
                place, key = call.computed[row.number], row.again or row.key
                fields, padding = packing.take(output, place, row), ()
                if row.has_layout or row.layout:
                    padding = packing.take_padding(output, place, row)
                fields, padding = tuple(map(_owned, fields)), tuple(map(_owned, padding))
                call.entries[row.number] = Entry(key, call.scope, fields, padding, row.layout)
        if not self._is_collecting:
            for _ in range(self._bank.put(call.entries.values(), call.generation)):
                self._counters.too_large()
            if self._stored is not None:
                self._stored.put(call, call.entries.values())
                self._tell_time(call, len(call.computed) * ids.shape[1])
        return None

    def _tell_time(self, call: Call, n_tokens: int) -> None:
        """Tell the store what computing took, where that is known without waiting for the device."""
        if self._tier is not None and call.arguments["input_ids"].device.type == "cpu":
            self._tier.break_even.computed(n_tokens, call.computing_s)

    def _outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if call.prefill is not None:
            if row.number in call.prefill.whole:
                key = call.prefill.whole[row.number][0]
                return Outcome(row.key, "exact", self._trunk.depth - 1, key, 1.0)
            n_prefix = call.prefill.served.get(row.number, 0)
            return Outcome(row.key, "prefix", n_prefix=n_prefix) if n_prefix else Outcome(row.key)
        hit, choice = call.hits.get(row.number), call.choices.get(row.number)
        risk = None if choice is None else choice.risk
        if hit is None:
            return Outcome(row.key, similarity=None if choice is None else choice.neighbour.similarity, risk=risk)
        return Outcome(row.key, hit.rung, self._trunk.depth - 1, hit.source, hit.similarity, risk)

    # -- small facts ---------------------------------------------------------------------------------------------------

    def reads_last(self, n_columns: int | None) -> None:
        """Before a head: it reads so many columns, the last ones; None: maybe all. After it: None."""
        self.n_read.set(n_columns)

    @torch.compiler.disable
    def _count_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave the compiled graph for a moment: counters cannot be part of it."""
        if torch.is_grad_enabled():
            self._weights.suspect()
        n_rows = _count_rows(self.arguments.bind(args, kwargs))
        self._counters.bypass("compiled", n_rows)
        self._local.last = (Outcome(bypassed="compiled"),) * n_rows


class ModelForward(Swap):
    """Stands in for the forward of the whole model: shows what it returned to those who learn from answers."""

    def __init__(self, model: nn.Module, forward: CachedForward) -> None:
        """Take the forward's place; `forward` is that of its trunk."""
        super().__init__(model, forward)
        self._forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        if self._forward.is_retired or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        calls: list[Call] = []
        token = self._forward.seen.set(calls)
        try:
            output = self.original(*args, **kwargs)
        finally:
            self._forward.seen.reset(token)
        if len(calls) == 1:  # of several nobody knows which of them made which answer
            self._forward.observe(calls[0], output)
        return output


def _fit_together(arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether arguments hold one number a token (B, T), or (1, T) where that stands for all rows."""
    shape = arguments["input_ids"].shape
    if len(shape) != 2:
        return False
    if any(map(ne, map(_SHAPE, tensors), repeat(shape))):
        mask = arguments.get("attention_mask")
        is_mask = mask is None or mask.shape == shape
        return is_mask and all(one.shape in (shape, (1, shape[1])) for one in tensors)
    return True


def _versions(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of tensors that are not of inference mode: edits of these are not seen."""
    return tuple(one._version for one in inputs.values() if isinstance(one, Tensor) and not one.is_inference())


def _owned(field: Tensor) -> Tensor:
    """The tensor, normal and without gradient also in inference mode, with a storage of its own size."""
    if not field.is_inference():
        return field.detach()
    with torch.inference_mode(False):
        return torch.empty(field.shape, dtype=field.dtype, device=field.device).copy_(field)


def _count_rows(arguments: Mapping[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
