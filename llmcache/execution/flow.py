"""The order of a call, from the trunk's first argument to the stats. Every step is a function of another module.

    opened   -> may this call use the cache at all, and would it pay? A stored prefix is put in, the rest run plainly
    early    -> where tokens are all that fingerprints are made of, what follows is done here, and hits end here
    run      -> where nothing is left to do at the layers, the trunk is run as it is, for rows that nothing serves; else
    layer 0  -> rows and exact keys, fingerprint, then the rungs decide
    layer l  -> rows to compute are computed, stored states put in, misses captured
    closed   -> revalidated states compared, misses stored or left to the next call, counters updated, times told to
                the cost model

Trouble here costs speed, never correctness: a failing lookup or store is counted, logged once, and computed around.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from llmcache.audit.audit import Audit
from llmcache.errors import NotCachedError
from llmcache.execution.bypass_check import BypassCheck
from llmcache.execution.capture import StateCapture
from llmcache.execution.components import Components
from llmcache.execution.fast_path import FastPath, OutputTemplate
from llmcache.execution.frames import Frame, Frames
from llmcache.execution.lookup import Lookup, not_cached
from llmcache.execution.meter import Meter
from llmcache.execution.old_call import OUT_OF_ORDER, WITHIN, Call, Inputs
from llmcache.execution.recorder import BypassRecorder
from llmcache.execution.revalidation import Revalidation
from llmcache.execution.runner import Runner
from llmcache.execution.store_queue import StoreQueue
from llmcache.models.adapters import CACHE, unpack
from llmcache.models.arguments import Arguments
from llmcache.models.hooks import LayerSwap
from llmcache.models.masks import flatten
from llmcache.models.payloads import last_valid
from llmcache.models.pooling import Veil
from llmcache.prefix.chunks import Chunks
from llmcache.request.outcome import Outcome, bypassed, outcomes
from llmcache.request.variables import setting
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.reuse.prefix.block_tier import BlockTier
from llmcache.reuse.prefix.kv_fill import empty
from llmcache.reuse.prefix.rung import Prefix

DEFAULT_NAMESPACE = "default"
_PASSED = (bypassed("not_worthwhile"),)


class Flow:
    """Listens to one wrapped model. Thread-safe: what a call knows is kept per context, what is shared is locked."""

    def __init__(self, parts: Components, tokenizer: Any = None) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            tokenizer: Names the special tokens; without one the config and the family do.
        """
        self._components = parts
        self._arguments = Arguments(parts.trunk.module.forward)
        self._bypass_check = BypassCheck(parts, self._arguments)
        self._runner = Runner(parts.payload, parts.trunk.adapter)
        self._meter = Meter(parts)
        self._revalidation = Revalidation(parts.banks, parts.counters)
        self._lookup = Lookup(parts, self._revalidation, tokenizer)
        self._call_rungs = [rung for rung in parts.rungs if rung.serves_calls]
        if parts.prefix is not None:
            self._call_rungs.append(self._make_prefix(parts.prefix))
        self._fast_path = FastPath(parts.trunk, parts.payload)
        self._capture = StateCapture(parts)
        self._store_queue = parts.store_queue = StoreQueue(self._capture.store_later, parts.counters, self._meter.spent)
        self._is_veiled = parts.head.pooled is not None and parts.payload.name == "mean"
        self.veil = Veil()
        if parts.cost is not None:
            parts.recorder = BypassRecorder(parts, self._lookup, self._fast_path, self._capture)
        self._last = parts.trunk.depth - 1
        self._is_retired = False
        self._frames = Frames()
        self.innermost = self._frames.innermost
        self._n_read: ContextVar[int | None] = ContextVar("llmcache_n_read", default=None)
        # Context variables follow async tasks too: a tenant's namespace must not leak into another's request.
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.prefixes_from: ContextVar[str | None] = ContextVar("llmcache_prefixes_from", default=None)
        self.chunks: ContextVar[Chunks | None] = ContextVar("llmcache_chunks", default=None)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=False)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        self.may_leave_out: ContextVar[bool] = ContextVar("llmcache_leave_out", default=False)
        self.is_looked_up: ContextVar[bool] = ContextVar("llmcache_looked_up", default=False)

    @property
    def last(self) -> tuple[Outcome, ...]:
        """Outcome of each row of this thread's last call; see `LLMCache.last`."""
        return self._frames.last

    # -- called by the hooks -------------------------------------------------------------------------------------------

    def lets_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward of the trunk is plain, and only counted: so are most of those that bypass the cache.

        Whatever is not plain to see takes the longer way, which finds out why. It is 20 Python functions longer, each
        of which the model has driven out of the processor's caches.
        """
        if torch.compiler.is_compiling() or self._is_retired or len(args) > 1 or kwargs.get(CACHE) is not None:
            return False
        if self.innermost() is not None or self.is_disabled.get() or self._n_read.get() is not None:
            return False
        if self.is_only_if_cached.get() or self.is_looked_up.get():
            return False
        try:
            return self._meter.lets_pass(self._arguments.get(args, kwargs, "input_ids"), self.namespace.get())
        except Exception:  # of ids that cannot be hashed; the longer way fails as well, and counts it
            return False

    def has_passed(self) -> None:
        """Tell of a forward that was let pass: after it, since others may have been made within."""
        self._frames.last = _PASSED

    def entered(self, is_whole: bool = False) -> Frame | None:
        """Note that a forward of the trunk, or of the whole model, is under way; None where it is none of ours."""
        if torch.compiler.is_compiling() or self._is_retired:
            return None
        return self._frames.begin(is_whole)

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a forward of the trunk that is being compiled, but for a strict export, which is to have one graph."""
        is_strict_export = torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()
        if not (self._is_retired or is_strict_export):
            self._count_compiled(_count_rows(self._arguments.bind(args, kwargs)))

    def opened(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a forward of the trunk, unless it must bypass the cache; returns the arguments to run it with."""
        arguments = self._arguments.bind(args, kwargs)
        self._begin_work(frame)
        namespace, n_read, is_disabled = self.namespace.get(), self._n_read.get(), self.is_disabled.get()
        self._n_read.set(None)  # it is about the head's own call, which comes first
        if torch.is_grad_enabled():
            self._components.weights.suspect()
        arguments, mask_4d = flatten(arguments)
        call = Call(
            Inputs(
                arguments,
                namespace,
                mask_4d,
                n_read,
                self.is_only_if_cached.get(),
                self.may_leave_out.get(),
                self.is_looked_up.get(),
                self.prefixes_from.get(),
            )
        )
        reason = "disabled" if is_disabled else self._bypass_check.by_arguments(arguments)
        if reason is None and self._components.audit is not None and not call.inputs.is_only_if_cached:
            self._make_way(frame, call, self._components.audit)
        if call.inputs.is_only_if_cached:  # what it cost and gained is told once it is looked up
            if reason is not None or not self._meter.may_be_held(call):
                raise not_cached(call)
        elif call.inputs.is_looked_up:
            if reason is None:
                with self._components.counters.guard("start the clock"):
                    self._meter.begin(call)
        else:
            reason = reason or self._components.counters.find_reason("ask whether it pays", self._meter.ask, call)
        if reason is not None:
            self._bypass(frame, reason, arguments)
            frame.passing = None if call.progress.passing is None else call
            return args, kwargs
        if not self._components.is_collecting:
            frame.last = ()  # until the call has succeeded
        frame.call = call
        if self._bypass_check.keeps_no_kv:
            return self._arguments.replace(args, kwargs, "use_cache", False)
        for rung in self._call_rungs:
            with self._components.counters.guard(f"begin a call ({rung.name})"):
                args, kwargs = rung.begin(call, args, kwargs)
        return args, kwargs

    def answer_early(self, frame: Frame) -> Any:
        """The trunk's output for a call that is served before the trunk runs; else None."""
        call = frame.call
        if call is None or not self._fast_path.may_open:
            return None
        prefill = call.plan.prefill
        if self._lookup.needs_states if prefill is None else len(prefill.repeats) < call.n_rows:
            return None
        if (template := self._fast_path.template(call)) is None:
            self._has_hooks(call)
            return None
        if not call.is_read and not self._lookup.read_early(call, template.entering):
            return None
        if template.weights != call.read.scope.weights:  # another trunk puts out something else
            self._fast_path.forget()
            return None
        if template.entering != call.read.entering:
            return None
        try:
            self._lookup.ask(call, 0)
        except NotCachedError:
            self._missed(call)
            raise
        if call.plan.reused and self._has_hooks(call):
            return None
        if call.plan.is_served:
            if call.inputs.is_only_if_cached:
                self._meter.ask_late(call)
            return self._answer(call, template)
        frame.template = template if self._lookup.is_settled(call) else None
        return None

    def run(self, frame: Frame, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trunk's output, of a call that was not answered before it.

        Args:
            frame: The call's.
            forward: The trunk's own.
            args: What to run it with, by position.
            kwargs: What to run it with, by name.
        """
        call, template = frame.call, frame.template
        if call is not None and call.inputs.is_only_if_cached:
            self._missed(call)
            raise not_cached(call)
        chunks = self.chunks.get()
        if chunks is not None and self._components.weights.activated is not None:
            chunks = None  # activated LoRA counts columns from the end, and would take that of a chunk for it
        # What bypasses the cache may ask for more than last states, or encode positions by the length of the whole.
        if chunks is not None and call is not None and call.passes_layers and chunks.fit(self._arguments, args, kwargs):
            return self._completed(frame, self._run_chunks(chunks, call, frame, forward, args, kwargs))
        if call is None or template is None:
            output = forward(*args, **kwargs)
            return self._completed(frame, forward(*args, **kwargs) if self._is_undone(frame) else output)
        frame.call = None  # the layers are run as they are
        try:
            output = self._run_rest(call, frame, forward, args, kwargs)
        finally:
            frame.call = call
        if call.progress.states is not None:
            self._capture.capture(call, self._last, call.progress.states)
        return output

    def layer(self, frame: Frame, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer for the rows that need it."""
        call = frame.call
        if call is None or call.served:  # of what comes after a prefix all is computed
            return swap.original(*args, **kwargs)
        number = call.progress.turn
        if number not in swap.turns:  # run by hand, or within another one, and none of the trunk's own steps
            if number != WITHIN:
                call.progress.turn, call.progress.is_complete = OUT_OF_ORDER, False
            return swap.original(*args, **kwargs)
        call.progress.turn = WITHIN
        output = self._layer(frame, call, swap.turns[number], args, kwargs)
        call.progress.turn = number + 1
        return output

    def normed(self, entering: Tensor | None, output: Tensor) -> Tensor | None:
        """After the final norm: where payloads of normed states are put in and taken."""
        frame = self._under_way()
        if frame is not None and frame.template is not None and frame.template.is_normed:
            frame.entered_norm = entering
        call = None if frame is None else frame.call
        if call is None or not self._ends_after_norm or not call.progress.has_begun:
            return None
        if call.progress.turn <= self._last:
            return None
        output = call.progress.states = self._runner.place(call, self._last, output)
        call.progress.is_complete = True
        self._capture.capture(call, self._last, output)
        return output

    def attended(self, output: Any) -> None:
        """After layer 0's self-attention, where the fingerprint reads it."""
        frame = self._under_way()
        if frame is not None and frame.call is not None:
            frame.call.progress.attention = unpack(output)

    def _is_undone(self, frame: Frame) -> bool:
        """Whether decisions could not be carried out, so that the trunk has to be run again, as if unwrapped.

        Layers were skipped, but the state that stands for them was not put in: the cache was unwrapped meanwhile, or
        layers were not run each once and in order.
        """
        call = frame.call
        if call is None or call.progress.is_complete or not call.plan.reused:
            return False
        frame.call = None
        self._lookup.withdraw(call)
        if call.progress.kv_cache is not None:
            empty(call.progress.kv_cache)
            assert int(call.progress.kv_cache.get_seq_length()) == 0, "K/V of the first run would be taken for a past"
        self._bypass(frame, self._bypass_check.after_a_failure(self._is_retired), call.inputs.arguments)
        return True

    def _completed(self, frame: Frame, output: Any) -> Any:
        """The output at all positions, where the trunk ran on those after a stored prefix."""
        if frame.call is not None:
            for rung in self._call_rungs:
                output = rung.complete(frame.call, output)
        return output

    def closed(self, frame: Frame, output: Any) -> None:
        """End a forward: store what was computed, count what was done. A call that failed half-way leaves nothing."""
        call, frame.call = frame.call, None
        try:
            self._end_work(frame)
            if call is not None and not (call.progress.has_begun and call.progress.is_complete):
                self._lookup.withdraw(call)
                self._abandon(call)
                if output is not None:  # it did not fail
                    self._bypass(frame, self._bypass_check.after_a_failure(self._is_retired), call.inputs.arguments)
                call = None
            if call is not None:
                self._end(frame, call, output)
            elif frame.passing is not None:
                self._let_pass(frame.passing, output)
        finally:
            if frame.outer is not None and frame.outer.ended is not None:
                frame.outer.ended.append(call)
            self._frames.last = frame.last
            self._frames.end(frame)

    def answered(self, frame: Frame, output: Any) -> None:
        """After the whole model: what it put out for the call that was made within."""
        ended = frame.ended or []
        calls = [call for call in ended if call is not None]
        if self._components.observer is None or self._components.observer.answers.reads_payload or not calls:
            return
        if len(ended) == 1:
            self._observe(calls[0], output)
        else:
            error = TypeError(f"{len(ended)} forwards of the trunk went into one answer")
            self._components.counters.error("read an answer", error)

    def left(self, frame: Frame) -> None:
        """A forward has ended, whatever came of it."""
        self._frames.end(frame)

    def reads_last(self, n_columns: int | None) -> None:
        """Before a head: it reads so many columns, the last ones; None: maybe all. After it: None."""
        self._n_read.set(n_columns)

    def retire(self) -> None:
        """The hooks are about to be taken off: forwards that begin from now on are plain."""
        self._is_retired = True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _under_way(self) -> Frame | None:
        """The innermost forward that is under way."""
        return None if torch.compiler.is_compiling() else self.innermost()

    def _layer(self, frame: Frame, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer whose turn it is."""
        if call.progress.give_way is not None:
            call.progress.give_way()
        if swap.number == 0 and not self._begin(frame, call, swap, args, kwargs):
            frame.call = None
            self._lookup.withdraw(call)
            return swap.original(*args, **kwargs) if call.progress.first_output is None else call.progress.first_output
        is_last = swap.number == self._last
        if not (is_last or call.plan.reused) and self._lookup.leaves_alone(swap.number):
            return swap.original(*args, **kwargs)
        if call.plan.is_served and not is_last:
            return self._runner.skip(call, swap, args, kwargs)
        self._lookup.decide(call, swap, args, kwargs)
        ends_here = not (is_last and self._ends_after_norm)
        output = self._runner.run(call, swap, args, kwargs, places=ends_here)
        if ends_here:
            call.progress.is_complete = is_last
            if not self._runner.cannot_skip:  # what is kept now would never be served
                call.progress.states = unpack(output)
                self._capture.capture(call, swap.number, call.progress.states)
        return output

    def _end(self, frame: Frame, call: Call, output: Any) -> None:
        """Store and count what was done in a call that has succeeded."""
        started = self._meter.now(call)
        is_later = self._capture.may_wait(call) and self._store_queue.takes
        if not is_later:
            self._capture.check_weights(call)
        self._learn_template(call, output)
        self._revalidation.compare(call)
        for row in call.rows:
            if row.bypass_reason:
                self._components.counters.bypass(row.bypass_reason, 1)
        if self._is_veiled and call.plan.reused:
            self.veil.draw(output, {number: last_valid(call.read.rows[number].valid) for number in call.plan.reused})
        if not self._components.is_collecting:
            frame.last = outcomes(call)
            if not is_later:
                self._capture.store(call, started)
            for rung in self._call_rungs:
                with self._components.counters.guard(f"store a call ({rung.name})"):
                    rung.store(call, output)
            self._have_looked_into(call)
            ended = self._meter.now(call)
            call.progress.storing_s += ended - started
            self._components.counters.call(call)
            self._meter.took(call, ended)
        if self._components.observer is not None and self._components.observer.answers.reads_payload:
            self._observe(call, None)
        if is_later:
            call.progress.states = None  # the largest of what the call holds
            self._store_queue.add(call, started)

    def _make_prefix(self, blocks: BlockPool) -> Prefix:
        """The rung that serves prefixes."""
        parts = self._components
        return Prefix(
            parts.trunk,
            parts.payload,
            blocks,
            parts.counters,
            self._arguments,
            read=self._lookup.read_early,
            is_repeat=lambda row: parts.serves_repeats and parts.banks.known(row),
            is_alone=lambda: parts.fingerprint is None and parts.observer is None,
            keeps_requests=parts.is_in_blocks,
            tier=None if parts.tier is None else BlockTier(parts.tier, blocks),
        )

    def _begin(self, frame: Frame, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """See to it that rows and fingerprints are read; False when the call must bypass the cache after all."""
        counters, check = self._components.counters, self._bypass_check.by_states
        call.progress.kv_cache = swap.arguments.get(args, kwargs, CACHE)
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        reason = counters.find_reason("read the request", check, call, hidden, self._runner.cannot_skip)
        if reason is None and call.is_read and call.read.entering != hidden.dtype:  # read early, of another model
            self._fast_path.forget()
            self._lookup.withdraw(call)
            call.drop()
        if reason is None and not call.is_read:
            if self._components.attention is not None:  # not guarded: what fails here is the model itself
                call.progress.first_output = swap.original(*args, **kwargs)
            reason = self._lookup.read(call, hidden, hidden.dtype)
        if reason is not None:
            self._bypass(frame, reason, call.inputs.arguments)
        call.progress.has_begun = reason is None
        return call.progress.has_begun

    def _have_looked_into(self, call: Call) -> None:
        """Hand hits that were drawn to the audit."""
        with self._components.counters.guard("have a hit audited"):
            if self._components.audit is not None and call.plan.audited:
                self._components.audit.served(call)

    def _answer(self, call: Call, template: OutputTemplate) -> Any:
        """Output of a call that is served before the layers; None where that fails, and it is computed."""
        with self._components.counters.guard("answer before the layers"):
            return self._fast_path.answer(call, template)
        self._fast_path.forget()
        self._lookup.withdraw(call)
        self._abandon(call)
        call.plan.cancel()
        return None

    def _has_hooks(self, call: Call) -> bool:
        """Whether hooks of others have to see a call pass through the layers, which is counted."""
        has_hooks = call.plan.prefill is None and self._fast_path.is_watched  # with blocks, that was seen to before
        if has_hooks:
            self._components.counters.hooked(_count_rows(call.inputs.arguments))
        return has_hooks

    def _run_rest(
        self,
        call: Call,
        frame: Frame,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the trunk for the rows that nothing serves; for all of them where that fails."""
        if call.plan.reused:
            with self._components.counters.guard("run a part of a batch"):
                return self._fast_path.run_rest(call, frame, forward, args, kwargs)
            self._lookup.withdraw(call)
            self._abandon(call)
            call.plan.cancel()
        return self._fast_path.run(call, frame, forward, args, kwargs)

    def _run_chunks(
        self,
        chunks: Chunks,
        call: Call,
        frame: Frame,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the trunk on all of a call in chunks, with its layers as they are."""
        frame.call = None
        try:
            with setting(self.chunks, None):  # others may be let in, and call the model for themselves
                output, waited_s = chunks.run(forward, self._arguments, args, kwargs), 0.0
        finally:
            frame.call = call
        call.progress.has_begun = call.progress.is_complete = True
        self._meter.waited(call, waited_s)
        return output

    def _abandon(self, call: Call) -> None:
        """Tell the rungs that nothing comes of a call."""
        for rung in self._call_rungs:
            with self._components.counters.guard(f"abandon a call ({rung.name})"):
                rung.abandon(call)

    def _learn_template(self, call: Call, output: Any) -> None:
        with self._components.counters.guard("look at the trunk's output"):
            # Where requests are collected it may be a twin, which is not to be compared with the trunk's own pooler.
            if output is not None and not self._components.is_collecting:
                self._fast_path.learn(call, output)

    def forget(self) -> None:
        """What was learned of the model no longer holds."""
        self._fast_path.forget()

    def _observe(self, call: Call, output: Any) -> None:
        assert self._components.observer is not None
        started = self._meter.now(call)
        with self._components.counters.guard("read an answer"):
            self._components.observer.see(call, output)
        if call.progress.is_metered and not self._components.is_collecting:
            self._meter.spent(call, self._meter.now(call) - started)

    def _bypass(self, frame: Frame, reason: str, arguments: dict[str, Any]) -> None:
        """Count and note rows of a call that bypasses the cache as a whole."""
        n_rows = _count_rows(arguments)
        self._components.counters.bypass(reason, n_rows)
        # A step of a generation belongs to the request that its prefill was; what is only computed, to nobody.
        if reason != "decode" and not self._components.is_collecting:
            frame.last = (bypassed(reason),) * n_rows

    def _missed(self, call: Call) -> None:
        """Tell the cost model of a lookup that is not answered."""
        with self._components.counters.guard("tell what a lookup took"):
            self._meter.missed(call)

    def _make_way(self, frame: Frame, call: Call, audit: Audit) -> None:
        """Have the audit's own calls stop for others, and let it catch up before a call, if it has waited for long."""
        if self._components.is_collecting:
            call.progress.give_way = audit.worker.give_way if audit.worker.may_stop else None
        elif frame.is_outermost and (spent_s := audit.catch_up()):  # no call within another one
            self._meter.spent(call, spent_s)

    def _let_pass(self, passing: Call, output: Any) -> None:
        """Take in a call that has bypassed the cache."""
        with self._components.counters.guard("record a call"):
            self._meter.passed(passing, output)

    def _begin_work(self, frame: Frame) -> None:
        """Tell the audit that the processor is needed. A call may be made within another one."""
        audit = None if self._components.is_collecting else self._components.audit
        if audit is not None:
            audit.worker.enter()
            frame.audit = audit

    def _end_work(self, frame: Frame) -> None:
        """Tell it that it no longer is, if it was told so."""
        if frame.audit is not None:
            frame.audit.worker.leave()

    # -- small facts ---------------------------------------------------------------------------------------------------

    @property
    def _ends_after_norm(self) -> bool:
        return self._components.payload.after_norm and self._components.trunk.norm is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_compiled(self, n_rows: int) -> None:
        """Leave the compiled graph for a moment: counters cannot be part of it."""
        if torch.is_grad_enabled():
            self._components.weights.suspect()
        self._components.counters.bypass("compiled", n_rows)
        if not self._components.is_collecting:
            self._frames.last = (bypassed("compiled"),) * n_rows


def _count_rows(arguments: dict[str, Any]) -> int:
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
