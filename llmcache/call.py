"""A call of the trunk, from the caller's arguments to its output. Nothing else knows the order of its steps.

    open      read the arguments: rows with keys, or the reason for a bypass
    look_up   ask the rungs, safest first, which rows stored requests serve
    answer    run the trunk for the rows that are left, and put the output together
    close     store what was computed, count, note what became of each row

What fails here is counted, logged once, and computed around. Errors of the model itself are raised as without a cache.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from llmcache.arrays import Floats
from llmcache.audit.account import Audited
from llmcache.audit.audit import Audit
from llmcache.bank import Bank, Entry
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.observer import Observer
from llmcache.counters import Counters
from llmcache.decide import Choice, Semantic
from llmcache.engines.engine import Eager, Engine
from llmcache.errors import NotCachedError
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import Swap, are_hooked
from llmcache.models.mark import Mark
from llmcache.models.masks import flatten
from llmcache.models.model_config import setting
from llmcache.models.packing import Fields, Packing, parts_of
from llmcache.models.payloads import Payload, last_valid
from llmcache.models.pooling import Veil
from llmcache.models.weights import Weights
from llmcache.prefix.chunks import Chunks
from llmcache.prefix.prefix import Prefix
from llmcache.request.bypass import find_reason
from llmcache.request.outcome import Outcome
from llmcache.request.prefill import Prefill
from llmcache.request.reading import RequestReader, Requests
from llmcache.request.rows import Row, Scope
from llmcache.request.variables import setting as setting_variable
from llmcache.reuse.prefix.block_pool import BlockPool

DEFAULT_NAMESPACE = "default"
_ID_DTYPES = (torch.int64, torch.int32)  # others are refused by embeddings
_HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")


@dataclass(slots=True)
class Hit:
    """A stored request that serves a row."""

    rung: str
    source: str  # its key
    fields: Fields  # what is kept of it
    padding: Fields = ()  # and of its padding, which is like that of the row
    similarity: float | None = 1.0
    answer: Floats | None = None  # signature (S,) of what it was answered, of an approximate hit
    share: float = 1.0  # of the risk that is allowed, 0 to 1


@dataclass(slots=True, weakref_slot=True)
class Call:
    """What one call knows. Filled step by step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    namespace: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of the trunk, by name
    reason: str | None = None  # why it bypasses the cache: a key of `CURES`
    scope: Scope | None = None
    mark: Mark | None = None  # of the weights, when it was opened
    generation: int = 0  # of the namespace, likewise
    kind: tuple[Any, ...] = ()  # what decides how its output is packed, beside the weights
    engine: Engine | None = None  # computes what nothing serves
    is_activated: bool = False  # an activated LoRA is in force for its last columns
    is_whole: bool = False  # its rows affect each other: all are served, or none
    requests: Requests | None = None
    mask_4d: Tensor | None = None  # the mask that was passed, where it is 4-D; `arguments` holds a 2-D one
    n_read: int | None = None  # columns that the head reads, from the last on; None: maybe all
    prefixes_from: str | None = None  # a namespace whose prefixes serve it as well
    prefill: Prefill | None = None  # of a call that keeps K/V
    hits: dict[int, Hit] = field(default_factory=dict)  # by row number
    computed: dict[int, int] = field(default_factory=dict)  # place in the trunk's output, by row number
    output: Any = None  # of the trunk, for the rows that were computed
    entries: dict[int, Entry] = field(default_factory=dict)  # of the rows that were computed, by row number
    choices: dict[int, Choice] = field(default_factory=dict)  # who would serve a row approximately
    vectors: dict[int, Floats] = field(default_factory=dict)  # fingerprints (F,) of rows that were looked up so
    forecasts: dict[int, Floats] = field(default_factory=dict)  # of the output (C,), likewise
    made: Calibration | None = None  # in force when that was done
    audited: dict[int, Audited] = field(default_factory=dict)  # rows that the audit drew
    is_looked_up: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)  # of the model, where it waits to be run: see `prepare`
    versions: tuple[int, ...] = ()  # of the tensors among them
    started_s: float = field(default_factory=perf_counter)
    lookup_s: float = 0.0
    storing_s: float = 0.0

    @property
    def rows(self) -> Sequence[Row]:
        """Its requests."""
        assert self.requests is not None
        return self.requests.rows

    def open_rows(self) -> list[Row]:
        """Rows that take part in caching and have no hit."""
        return [row for row in self.rows if not row.bypass_reason and row.number not in self.hits]

    def take_over(self, known: "Call", numbers: Sequence[int]) -> None:
        """Have what was found of some rows of another call as what was found of this one's."""
        assert known.requests is not None
        place = {number: new for new, number in enumerate(numbers)}
        for name in ("hits", "choices", "vectors", "forecasts"):
            found = getattr(known, name)
            setattr(self, name, {place[number]: one for number, one in found.items() if number in place})
        self.requests, self.made, self.is_looked_up = known.requests.take(numbers), known.made, True
        self.lookup_s += known.lookup_s * len(numbers) / len(known.rows)

    def serve(self, row: Row, choice: Choice, share: float) -> None:
        """Let another request's entry serve a row; `share` is its part of the risk that is allowed, 0 to 1."""
        source, similarity = choice.neighbour.source, choice.neighbour.similarity
        self.hits[row.number] = Hit("semantic", source.key, source.entry.fields, (), similarity, source.answer, share)


class Rung(Protocol):
    """One way to serve rows from stored requests."""

    name: str
    is_lossless: bool

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Add to `call.hits` what serves these rows, which have no hit."""


class Exact:
    """Serves a request from what was stored under its own key. Lossless."""

    name = "exact"
    is_lossless = True

    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        assert call.requests is not None
        for row, entry in zip(rows, self._bank.find([call.requests.keys[row.number] for row in rows]), strict=True):
            if entry is not None:
                padding = entry.padding if entry.layout == row.layout else ()
                call.hits[row.number] = Hit("exact", entry.key, entry.fields, padding)


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
    ) -> None:
        """Take the place of the trunk's forward."""
        self._trunk, self._head, self._payload, self._bank = trunk, head, payload, bank
        self._reader, self._weights, self._coupling, self._counters = reader, weights, coupling, counters
        self.rungs: Sequence[Rung] = (Exact(bank),)  # safest first
        self.is_retired = False
        self.veil = Veil()
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=False)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        self.prefixes_from: ContextVar[str | None] = ContextVar("llmcache_prefixes_from", default=None)
        self.chunks: ContextVar[Chunks | None] = ContextVar("llmcache_chunks", default=None)
        self.n_read: ContextVar[int | None] = ContextVar("llmcache_n_read", default=None)
        self._is_preparing: ContextVar[bool] = ContextVar("llmcache_preparing", default=False)
        self._prepared: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by identity of their input_ids
        self.eager = Eager(self)
        self.engine: Engine = self.eager
        self._local = threading.local()
        self._packings: dict[tuple[Any, ...], Packing | None] = {}  # by kind and weights
        self._observed = head.observed if payload.fits_any_length else None
        self._keeps_no_kv = payload.fits_any_length and trunk.makes_kv
        self._returns_kv = trunk.makes_kv and not trunk.adapter.is_guess  # of others that is seen at the first call
        self._is_veiled = head.pooled is not None and payload.name == "mean"
        # What it is asked of is part of the digest.
        self._looks_otherwise = lru_cache(16)(lambda digest: trunk.looks_otherwise)
        self._parts: tuple[str, list[dict[str, Any]]] = ("", [])  # attributes of the trunk's modules, by digest
        super().__init__(trunk.module, self)
        self._prefix = None if blocks is None else Prefix(trunk, blocks, counters, self.arguments, cuts)
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
        """Take the place of another trunk's forward, of the same tensors, whose calls are computed and observed alone."""
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

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The trunk's output: from memory as far as requests are known, and computed for the rest."""
        if self.is_retired:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._count_compiled(args, kwargs)
            return self.original(*args, **kwargs)
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
        started = perf_counter()
        try:
            call.arguments, call.mask_4d = flatten(self.arguments.bind(args, kwargs))
            call.reason = self._read(call)
        except Exception as error:
            call.reason = "error"
            self._counters.error("read a call", error)
        call.lookup_s += perf_counter() - started
        return call

    def _read(self, call: Call) -> str | None:
        """Fill the call; the reason for a bypass, or None."""
        arguments, weights = call.arguments, self._weights
        if torch.is_grad_enabled():
            weights.suspect()  # an optimizer may write them from now on
        if self.is_disabled.get():
            return "disabled"
        if reason := find_reason(arguments, self._trunk, self.arguments.defaults):
            return reason
        if self._keeps_no_kv and (reason := self._find_reason_of_kv(arguments)):
            return reason
        if self._head.pooled is not None and self._head.pooled.has_changed():
            return "other_pooling"
        if weights.is_trained:
            return "gradients_held"
        digest = weights.digest()
        call.mark = weights.mark_of(digest)
        if reason := weights.refusal:
            return reason
        if self._observed is not None and self._observed.has_changed(digest):
            return "other_pooling"
        if self._looks_otherwise(digest):
            return "other_attention"
        if self._is_hooked(digest):
            return "hooked"
        if arguments["input_ids"].dtype not in _ID_DTYPES:
            return "input_shape"
        device = arguments["input_ids"].device.type
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        keeps_kv = self._trunk.makes_kv and not self._keeps_no_kv and self._is_kv_kept(arguments)
        call.engine = self.engine.choose(call.args, call.kwargs, digest, keeps_kv)
        call.scope = Scope(call.namespace, digest, autocast, self._trunk.attention, call.engine.name)
        # The trunk may refuse an unusual dtype: it is asked before a call like this one is answered without it.
        dtypes = [(name, one.dtype) for name in DECIDING if (one := arguments.get(name)) is not None]
        by_default = setting(self._trunk.config, "return_dict")
        call.kind = (arguments.get("return_dict"), by_default, arguments.get("use_cache"), autocast, *dtypes, digest)
        if self._packings.get(call.kind, True) is None:
            return "more_output"
        call.generation = self._bank.generation(call.namespace)
        call.is_whole = bool(self._coupling.reason(digest))
        activated = weights.activated
        call.is_activated = activated is not None
        known = self._prepared.pop(id(arguments["input_ids"]), None)
        if known is not None and self._is_still(known, call):
            call.take_over(known, range(len(known.rows)))
            return None
        call.requests = self._reader.read(arguments, call.mask_4d, call.scope, activated, call.is_whole)
        if keeps_kv:
            return "prefix_off" if self._prefix is None else self._prefix.open(call)
        return None

    # -- calls that are looked up before they are made ---------------------------------------------------------------

    def prepare(self, run: Callable[[], object]) -> Call | None:
        """Return the call that `run` makes of the trunk, looked up and not run; None if it makes none."""
        if not self.is_retired:
            try:
                with setting_variable(self._is_preparing, True):
                    run()
            except _LookedUp as prepared:
                return prepared.call
        return None

    def can_resume(self, call: Call, batch: Mapping[str, Any]) -> bool:
        """Return whether a call with tensors like those of `batch` can be recognised when it is made."""
        is_plain = call.reason is None and call.prefill is None and call.mask_4d is None
        return is_plain and all(call.arguments.get(name) is batch.get(name) for name in DECIDING)

    def keep(self, call: Call, numbers: Sequence[int], inputs: dict[str, Any]) -> Call:
        """Remember what was found of some rows until the model is run on `inputs`, or the result is let go."""
        kept = Call((), {}, call.namespace, scope=call.scope, kind=call.kind, generation=call.generation, inputs=inputs)
        kept.versions = _versions(inputs)
        kept.take_over(call, numbers)
        self._prepared[id(inputs["input_ids"])] = kept
        return kept

    def _is_still(self, known: Call, call: Call) -> bool:
        """Return whether a call is the one that was looked up, and what was found still holds."""
        is_same = all(call.arguments.get(name) is known.inputs.get(name) for name in DECIDING)
        if not is_same or known.versions != _versions(known.inputs):
            return False
        if (known.scope, known.kind, known.generation) != (call.scope, call.kind, call.generation):
            return False
        if known.made is not None and not (self._semantic is not None and self._semantic.is_current(known)):
            return False
        return all(hit.rung != "exact" or hit.source in self._bank for hit in known.hits.values())

    # -- small facts of a call ---------------------------------------------------------------------------------------

    def _is_kv_kept(self, arguments: dict[str, Any]) -> bool:
        """Whether the caller is to hold K/V afterwards."""
        if arguments.get(CACHE) is not None or not self._returns_kv:
            return arguments.get(CACHE) is not None
        asked = arguments.get("use_cache")
        return bool(setting(self._trunk.config, "use_cache") if asked is None else asked)

    def _find_reason_of_kv(self, arguments: dict[str, Any]) -> str | None:
        """Why a call cannot be run without the K/V that the model would make; entries hold none."""
        if arguments.get("use_cache") or arguments.get(CACHE) is not None:
            return "kv_cache_with_pooled_payload"
        asked = arguments.get("use_cache")
        makes_kv = setting(self._trunk.config, "use_cache") if asked is None else asked
        # Without K/V models look at the positions for where a text begins, and hide the texts before from it.
        is_unmasked = arguments.get("attention_mask") is None and arguments.get("position_ids") is not None
        return "packed" if makes_kv and is_unmasked else None

    def _is_hooked(self, digest: str) -> bool:
        """Whether hooks of others hang within the trunk, which would not run."""
        known, spaces = self._parts
        if known != digest:
            spaces = [vars(part) for part in self._trunk.module.modules() if part is not self._trunk.module]
            self._parts = digest, spaces
        if not any(any(hooks) for hooks in map(_HOOKS, spaces)):
            return are_hooked(())
        return are_hooked(part for part in self._trunk.module.modules() if part is not self._trunk.module)

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call) -> None:
        """Ask the rungs, safest first, for the rows that are not served yet.

        Raises:
            NotCachedError: The call is to be answered from the cache or not at all, and cannot be.
        """
        if not call.is_looked_up:
            self._ask(call)
        if self._is_preparing.get():
            raise _LookedUp(call)
        if self.is_only_if_cached.get() and (call.reason or len(call.hits) < len(call.rows)):
            if call.prefill is None or len(call.prefill.whole) < len(call.rows):
                found = call.hits if call.prefill is None else call.prefill.whole
                raise NotCachedError(None if call.reason else tuple(r.number for r in call.rows if r.number not in found))
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
                self._prefix.look_up(call)
            except Exception as error:
                call.prefill.whole, call.prefill.served = {}, {}
                self._counters.error("look up a prefix", error)
            call.lookup_s += perf_counter() - started
        elif call.reason is None and call.kind in self._packings and not self._is_collecting:  # known to be put together
            started = perf_counter()
            try:
                for rung in self.rungs:
                    if rung.is_lossless or not call.is_whole:
                        if rows := call.open_rows():
                            rung.look_up(call, rows)
                if call.is_whole and len(call.hits) < len(call.rows):
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
            try:
                return self._prefix.answer(call, partial(self._run_prefill, call))
            except Exception as error:  # also of the model: if it is, it is raised below
                chunks = self.chunks.get()
                if not (call.prefill.whole or call.prefill.served) or (chunks is not None and chunks.error is error):
                    raise
                call.prefill.whole, call.prefill.served = {}, {}
                self._counters.error("serve a prefix", error)
                return self._prefix.answer(call, partial(self._run_prefill, call))
        if call.hits:
            try:
                return self._serve(call)
            except Exception as error:  # also of the model: if it is, it is raised below
                self._drop_hits(call)
                self._counters.error("serve a call", error)
        return self._run(call, range(len(call.rows)))

    def _serve(self, call: Call) -> Any:
        packing = self._packings[call.kind]
        assert packing is not None
        rest = [row.number for row in call.rows if row.number not in call.hits]
        output, ids = None, call.arguments["input_ids"]
        if rest:
            output = self._run(call, rest)
            if not packing.fits(output, len(rest), ids.shape[1]):
                raise TypeError("the trunk returned another kind of output than before")
        kept = {number: (hit.fields, hit.padding) for number, hit in call.hits.items()}
        made = packing.join(call.rows, ids.shape[1], kept, output, call.computed, ids.device)
        if self._is_veiled:
            self.veil.draw(made, {number: last_valid(call.rows[number].valid) for number in call.hits})
        return made

    def _run_prefill(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk on a call that keeps K/V, in chunks if that is asked for."""
        chunks = self.chunks.get()
        if chunks is None or self._weights.activated is not None or not chunks.fit(self.arguments, args, kwargs):
            rows = [row for row in call.rows if row.number not in call.prefill.whole]
            return call.engine.run(args, kwargs, rows)
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
        call.output = call.engine.run(args, kwargs, [call.rows[number] for number in numbers])
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
            n_rows = _count_rows(call.arguments)
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
        if call.prefill is None and not self._returns_kv and self._prefix is not None and CACHE in parts_of(output):
            self._returns_kv = True
            if reason := self._prefix.open(call):
                return reason
            call.prefill.kv_cache = output[CACHE]
        if call.prefill is not None:
            return self._prefix.store(call, output)
        ids, output = call.arguments["input_ids"], call.output
        packing = self._packings.get(call.kind)
        if packing is None:
            packing = self._learn(call, output, len(call.computed), ids.shape[1])
            if packing is None:
                return "more_output"
        elif not packing.fits(output, len(call.computed), ids.shape[1]):
            return None
        for row in call.rows:
            if row.number in call.computed and not row.bypass_reason:
                place, key = call.computed[row.number], call.requests.keys[row.number][0]
                fields, padding = packing.take(output, place, row), ()
                if row.has_layout or row.layout:
                    padding = packing.take_padding(output, place, row)
                fields, padding = tuple(map(_owned, fields)), tuple(map(_owned, padding))
                call.entries[row.number] = Entry(key, call.scope, fields, padding, row.layout)
        if not self._is_collecting:
            for _ in range(self._bank.put(call.entries.values(), call.generation)):
                self._counters.too_large()
        return None

    def _learn(self, call: Call, output: Any, n_rows: int, n_tokens: int) -> Packing | None:
        packing = Packing.learn(output, n_rows, n_tokens, self._payload)
        if len(self._packings) > 64:
            self._packings.clear()
        self._packings[call.kind] = packing
        return packing

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


class _LookedUp(BaseException):
    """Ends the model's forward where the trunk would run: it was made to look a call up."""

    def __init__(self, call: Call) -> None:
        super().__init__("looked up")
        self.call = call


def _versions(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of tensors that are not of inference mode."""
    return tuple(one._version for one in inputs.values() if isinstance(one, Tensor) and not one.is_inference())


def _owned(field: Tensor) -> Tensor:
    """The tensor, normal and without gradient also in inference mode, with a storage of its own size."""
    if not field.is_inference():
        return field.detach()
    with torch.inference_mode(False):
        return torch.empty(field.shape, dtype=field.dtype, device=field.device).copy_(field)


def _count_rows(arguments: dict[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
