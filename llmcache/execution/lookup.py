"""From a call to decisions: what is read of it on the host, and what the rungs say may be reused.

Trouble here costs speed, never correctness: it is counted, logged once, and computed around. All time spent here is the
lookup's.

Sizes: B rows, T tokens, D hidden width.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.errors import NotCachedError
from llmcache.execution.components import Components
from llmcache.execution.old_call import Call, Reuse
from llmcache.execution.reader import RequestReader
from llmcache.execution.revalidation import Revalidation
from llmcache.execution.store_queue import StoreQueue
from llmcache.models.arguments import can_select_rows
from llmcache.models.hooks import LayerSwap
from llmcache.models.mark import Mark
from llmcache.request.rows import Row
from llmcache.reuse.base import Rung


class Lookup:
    """Reads calls of one wrapped model and asks its rungs. Thread-safe."""

    def __init__(self, parts: Components, revalidation: Revalidation, tokenizer: Any = None) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            revalidation: Sets decisions aside that are to be compared.
            tokenizer: Names the special tokens; without one the config and the family do.
        """
        self._components = parts
        self._revalidation = revalidation
        self._reader = RequestReader(parts, tokenizer)
        self._last = parts.trunk.depth - 1
        self._observed = parts.head.observed if parts.payload.fits_any_length else None
        # What it is asked of is part of the digest.
        self._looks_otherwise = lru_cache(16)(lambda digest: parts.trunk.looks_otherwise)
        self._asked_later: tuple[Sequence[Rung], bool] | None = None  # of which rungs, whether one is asked above 0

    @property
    def needs_states(self) -> bool:
        """Whether nothing can be told before layer 0: fingerprints are made of states, or K/V has to be filled."""
        fingerprint, trunk = self._components.fingerprint, self._components.trunk
        fills_kv = trunk.makes_kv and not self._components.payload.fits_any_length
        return fills_kv or (fingerprint is not None and fingerprint.reads_states)

    @property
    def decides_early(self) -> bool:
        """Whether calls may be decided before the layers, with nothing left to do at them; see `is_settled`."""
        parts = self._components
        return not self.needs_states and parts.banks.layers == (self._last,) and not parts.is_per_layer

    def read(self, call: Call, hidden: Tensor | None, entering: torch.dtype) -> str | None:
        """Read the call's rows and fingerprints.

        Args:
            call: It has just begun.
            hidden: States that enter layer 0 (B, T, D); None before it is reached.
            entering: Their dtype.

        Returns:
            Why the call must bypass the cache, or None.
        """
        started = perf_counter()
        reason = self._components.counters.find_reason("read the request", self._read, call, hidden, entering)
        call.progress.lookup_s += perf_counter() - started
        return reason

    def read_early(self, call: Call, entering: torch.dtype) -> bool:
        """Read them before layer 0 is reached; False when that is better left until then, which will tell why."""
        started = perf_counter()
        try:
            return self._read(call, None, entering) is None
        except Exception:
            return False
        finally:
            call.progress.lookup_s += perf_counter() - started

    def is_settled(self, call: Call) -> bool:
        """Whether nothing is left to do at the layers of a call that the rungs were asked about before them."""
        parts = self._components
        if parts.banks.layers != (self._last,) or parts.is_per_layer or parts.is_collecting:
            return False
        if call.inputs.mask_4d is not None or any(reuse.layer != self._last for reuse in call.plan.reused.values()):
            return False
        if self._asked_later is None or self._asked_later[0] is not parts.rungs:
            numbers = range(1, self._last + 1)
            self._asked_later = parts.rungs, any(rung.applies_at(n) for rung in parts.rungs for n in numbers)
        return not self._asked_later[1]

    def leaves_alone(self, number: int) -> bool:
        """Whether nothing can happen at a layer in a call that reuses nothing: none is asked there, and none stored."""
        asks = any(rung.applies_at(number) for rung in self._components.rungs)
        return number > 0 and not asks and number not in self._components.banks.layer_banks

    def decide(self, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide at one layer, if that was not done before it was reached.

        Args:
            call: It was read.
            swap: Of the layer.
            args: What the layer is passed by position.
            kwargs: What it is passed by name.
        """
        number = swap.number
        if self._components.is_per_layer and number > 0 and number in self._components.banks.layer_banks:
            self._read_layer(call, swap, args, kwargs)
        before, n_before = ({}, 0) if number == 0 else (dict(call.plan.reused), len(call.plan.reused_at))
        if number > 0 or not call.plan.was_asked:
            self.ask(call, number)
        decided = len(call.plan.reused_at) > n_before and not call.plan.is_served  # else no row is run
        if decided and not can_select_rows(swap.arguments, args, kwargs, call.n_rows):
            call.plan.reused, call.plan.is_served = before, False  # rows could not be taken out of the batch safely
            del call.plan.reused_at[n_before:]
            self.withdraw(call)

    def ask(self, call: Call, number: int) -> None:
        """Ask each rung in turn for the rows that none has served at this depth.

        Raises:
            NotCachedError: The call is to be answered from the cache or not at all, and cannot be.
        """
        call.plan.was_asked = True
        if self._components.is_collecting:
            return
        is_whole = call.read.is_whole  # what is near to one of its rows says nothing of the call
        rungs = [rung for rung in self._components.rungs if rung.applies_at(number)]
        rungs = [rung for rung in rungs if rung.is_lossless or not is_whole]
        for rung in rungs:
            started = perf_counter()
            decided = self._decide(call, rung, number)
            if not rung.is_lossless:
                decided = self._admit(call, decided)
            call.plan.reused |= {reuse.row: reuse for reuse in decided}
            call.plan.reused_at += [reuse.layer for reuse in decided]
            call.progress.lookup_s += perf_counter() - started
        if is_whole:
            _hold_together(call)
        if _may_leave_out(call) and call.plan.reused and all(rung.is_lossless for rung in rungs):
            _serve_alone(call, call.plan.reused)
        call.plan.is_served = 0 < len(call.plan.reused) == call.n_rows and all(
            reuse.layer == self._last for reuse in call.plan.reused.values()
        )
        if call.plan.reused and not call.plan.is_served and self._components.weights.activated is not None:
            call.plan.cancel()  # PEFT's hooks expect all rows of the batch
            self.withdraw(call)

    def withdraw(self, call: Call) -> None:
        """Hits of the call that the audit drew are not served after all."""
        if self._components.audit is not None and call.plan.audited:
            self._components.audit.withdraw(call)

    def _decide(self, call: Call, rung: Rung, number: int) -> list[Reuse]:
        """What a rung would serve."""
        with self._components.counters.guard(f"look up ({rung.name})"):
            rows = _open_rows(call, rung, number)
            if call.inputs.is_computed:
                rows = [row for row in rows if self._revalidation.is_due(row)]
            if rows and not rung.is_lossless:
                call.read.project()
                rows = [row for row in rows if not row.bypass_reason]  # some may have no fingerprint
            return rung.decide(call, rows, number) if rows else []
        return []

    def _admit(self, call: Call, decided: list[Reuse]) -> list[Reuse]:
        """Approximate reuses that are carried out: others are computed, to be checked or audited."""
        may_leave_out = _may_leave_out(call)
        if may_leave_out and not call.inputs.is_looked_up and not self._are_alike(call):
            decided = []
        found = {**call.plan.reused, **{reuse.row: reuse for reuse in decided}}
        if call.inputs.is_only_if_cached and len(found) < call.n_rows and not may_leave_out:
            call.plan.reused = found
            raise not_cached(call)  # before the audit draws: the call that computes these requests counts them
        if may_leave_out:
            if any(reuse.layer < self._last for reuse in found.values()):
                call.plan.reused = found
                raise NotCachedError  # layers are to be run, and whoever runs them looks up again
            _serve_alone(call, found)
        admitted = self._draw(call, self._revalidation.select(call, decided))
        if may_leave_out:
            _serve_alone(call, {*call.plan.reused, *(reuse.row for reuse in admitted)})
        return admitted

    def _are_alike(self, call: Call) -> bool:
        """Whether the requests of a call are like those of the calibration, as far as the audit can tell."""
        if self._components.audit is None:
            return True
        with self._components.counters.guard("compare requests with those of the calibration"):
            return self._components.audit.are_alike(call)
        return False

    def _draw(self, call: Call, decided: list[Reuse]) -> list[Reuse]:
        """Let the audit draw among approximate reuses; returns those to carry out."""
        if self._components.audit is None:
            return decided
        with self._components.counters.guard("draw for the audit"):
            return self._components.audit.draw(call, decided)
        return []

    def _read(self, call: Call, hidden: Tensor | None, entering: torch.dtype) -> str | None:
        weights, queue, tier = self._components.weights, self._components.store_queue, self._components.tier
        if weights.is_trained:
            return "gradients_held"
        is_collecting = self._components.is_collecting  # which is served from nowhere
        if not is_collecting:
            self._components.follow()
        n_purges = self._components.banks.purges.now
        n_before = 0 if queue is None else queue.n_added
        scope = self._reader.scope(call, entering)
        if queue:
            self._settle(call, queue, n_before, weights.mark_of(scope.weights))
        if (reason := weights.refusal) is not None:
            return reason
        if self._observed is not None and self._observed.has_changed(scope.weights):
            return "other_pooling"
        if self._looks_otherwise(scope.weights):
            return "other_attention"
        call.read = self._reader.read(call, scope, hidden, entering)
        call.read.purges = n_purges
        if tier is not None:
            call.read.generation = tier.generation(scope.namespace)
        if self._components.sharing is not None and not is_collecting:
            self._components.sharing.step(scope)
        return None

    def _settle(self, call: Call, queue: StoreQueue, n_before: int, mark: Mark | None) -> None:
        """Store what calls before this one computed; the time it takes is theirs."""
        spent_s = queue.settle("next_call", n_before, mark)
        call.progress.lookup_s -= spent_s
        if call.progress.started is not None:
            call.progress.started += spent_s

    def _read_layer(self, call: Call, swap: LayerSwap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the fingerprint that this layer's bank is searched with; without one the layer is computed."""
        started = perf_counter()
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        with self._components.counters.guard("take a layer's fingerprint"):
            self._reader.read_layer(call, swap.number, hidden)
        call.progress.lookup_s += perf_counter() - started


def not_cached(call: Call) -> NotCachedError:
    """Of a call that is to be answered from the cache or not at all."""
    rows = call.read.rows if call.plan.was_asked else ()
    return NotCachedError(tuple(row.number for row in rows if row.number not in call.plan.reused) or None)


def _may_leave_out(call: Call) -> bool:
    """Whether it may be answered without some of its rows."""
    return call.inputs.may_leave_out and call.plan.prefill is None


def _hold_together(call: Call) -> None:
    """Reuse all rows at one layer, or none: computed without the others, the rest would come out otherwise."""
    reused = call.plan.reused.values()
    if len(reused) < len(call.read.rows) or len({reuse.layer for reuse in reused}) > 1:
        call.plan.cancel()


def _serve_alone(call: Call, found: Collection[int]) -> None:
    """Go on with these rows, by number, alone.

    Raises:
        NotCachedError: There are none.
    """
    if not found:
        raise not_cached(call)
    call.leave_out_all_but(found)


def _open_rows(call: Call, rung: Rung, number: int) -> list[Row]:
    """Rows that a rung may still decide at a layer."""
    return [
        row
        for row in call.active_rows
        if ((reuse := call.plan.reused.get(row.number)) is None or reuse.layer < number)
        and row.number not in call.plan.revalidated
        and (rung.is_lossless or not row.is_misread)
    ]
