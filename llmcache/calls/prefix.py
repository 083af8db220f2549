"""The path of decoder calls that keep K/V: computed from blocks of tokens and from each other.

    open       choose the K/V cache to fill, or name the reason for a bypass
    look_up    find what is stored, and plan how the rest is computed (`planner.py`)
    answer     run the trunk on the rest, and assemble output and K/V (`columns.py`)
    store      put what is new into blocks (`block_writer.py`)
    follow     store what is generated after the prompts too (`follower.py`)

Calls that keep no K/V share beginnings, by the same parts: `share` plans them.
"""

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from llmcache.calls.block_writer import BlockWriter
from llmcache.calls.chunks import Chunks
from llmcache.calls.columns import ColumnRunner
from llmcache.calls.follower import Follower
from llmcache.calls.kv_fill import is_by_column, last_states, names_of
from llmcache.calls.planner import Planner
from llmcache.calls.prefill import Blocks, Prefill
from llmcache.calls.stored_blocks import StoredBlocks, block_name
from llmcache.calls.stored_entries import entry_name
from llmcache.calls.wrapped import Wrapped
from llmcache.engines.engine import Eager
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import Arguments
from llmcache.models.hooks import Distinct
from llmcache.models.kv_state import cache_in, new_cache
from llmcache.request.bypass import find_reason_of_cache, is_plain_cache, keeps_windows
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call, Path, count_tokens


class Prefix(Path):
    """Serves and stores calls of one wrapped decoder, each by its `Prefill`, `call.plan`. Thread-safe."""

    keeps_kv = True

    def __init__(
        self,
        wrapped: Wrapped,
        pool: BlockPool,
        stored: StoredBlocks | None,
        arguments: Arguments,
        eager: Eager,
        chunks: ContextVar[Chunks | None],
        distinct: ContextVar[Distinct | None],
        follower: Follower,
    ) -> None:
        """Serve from `pool` and from the store `stored`, and run what is left in `chunks`, if any, by `eager`.

        `distinct` is told which of the states that a language-model head gets are equal.
        """
        self.blocks = Blocks(wrapped, pool, stored)
        self._causal, self._trunk, self._counters = wrapped.causal, wrapped.trunk, wrapped.counters
        self._eager, self._chunks, self._follower = eager, chunks, follower
        self._planner, self._writer = Planner(self.blocks), BlockWriter(self.blocks)
        self._runner = ColumnRunner(self.blocks, arguments, eager, chunks, distinct)

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, call: Call) -> str | None:
        """Begin the plan of a call that keeps K/V; return the reason for a bypass, or None."""
        passed, refusals = call.arguments, call.state.kv_refusals
        kv_cache, windowed = passed.get(CACHE), None
        if kv_cache is None:
            kv_cache = self._new_cache(call)
            reason = refusals.get(False)
            if kv_cache is not None and any(self._causal.windows):
                windowed = new_cache(self._trunk)
        elif self._causal.is_causal and keeps_windows(kv_cache):
            kv_cache, windowed, reason = DynamicCache(), kv_cache, refusals.get(True)
        else:
            reason = refusals.get(True) or find_reason_of_cache(kv_cache)
            if not (reason or _has_room(kv_cache, passed["input_ids"].shape[1])):
                reason = "kv_cache_kind"
        if reason:
            return reason
        if passed.get("token_type_ids") is not None:
            return "token_types"
        if self.blocks.kinds.get(call.kind, ()) is None:
            return "more_output"
        call.plan = Prefill(kv_cache, self._has_chains(call), range(len(call.rows)), windowed=windowed)
        return None

    def share(self, call: Call, numbers: Sequence[int], is_made: bool = True) -> bool:
        """Plan rows of a call that keeps no K/V if they can share beginnings; return whether that pays.

        Nothing is recorded of a call that is not made.
        """
        if not (self._planner.cuts and self._has_chains(call)) or call.is_collected or call.engine is not self._eager:
            return False
        if call.is_activated or call.mask_4d is not None or call.arguments.get("token_type_ids") is not None:
            return False
        call.plan = plan = Prefill(None, True, numbers, hands_out=False)
        with self._counters.guard("look up a prefix"):
            self._planner.look_up_beginnings(call, plan, is_made)
        return plan.tree is not None

    def _has_chains(self, call: Call) -> bool:
        is_padding_known = call.causal.knows_padding or call.requests.valid is None
        is_known = is_padding_known and call.causal == self._causal
        is_apart = call.is_activated and call.blocks_scope is call.scope
        return is_known and not (is_apart or call.is_coupled or call.state.sees_later)

    def _new_cache(self, call: Call) -> DynamicCache | None:
        """Make a K/V cache like the trunk does if it is passed none; None: it makes another kind, or none was seen."""
        refusals = call.state.kv_refusals
        if False not in refusals:
            if call.causal.makes_dynamic_cache:
                usual = new_cache(self._trunk)
                refusals[False] = "" if self._causal.is_causal and keeps_windows(usual) else find_reason_of_cache(usual)
            elif self.blocks.kinds.knows(call.kind) and (known := self.blocks.kinds[call.kind]) and known[2]:
                refusals[False] = ""
        return DynamicCache() if refusals.get(False) == "" else None

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call) -> None:
        self._follower.settle(call.rows)
        plan: Prefill = call.plan
        self._planner.recall(call, plan)
        if plan.kv_cache is None:
            plan.kv_cache = self._new_cache(call)  # the store may have named its kind
        if plan.kv_cache is not None:  # else its kind is learned from this call
            self._planner.look_up(call, plan)

    def served(self, call: Call) -> Collection[int]:
        numbers: Collection[int] = call.plan.whole.keys()
        return numbers

    def drop(self, call: Call) -> None:
        call.plan.drop()

    def n_held(self, row: Row, scope: Scope) -> int:
        """Return how many of a request's first tokens are held."""
        if self.blocks.pool.whole(row.key, row.ids):
            return row.n_valid
        if row.start is None or not row.n_valid:
            return 0
        return self.blocks.pool.reach(self.blocks.chain(scope, row), row.plain_ids, row.id_width)[1]

    # -- answer --------------------------------------------------------------------------------------------------------

    def answer(self, call: Call) -> Any:
        """Return the trunk's output after `look_up`, and fill the caller's K/V cache. On an error that is emptied.

        Within `chunked`, the trunk is run in chunks. Errors raised between chunks are raised here.
        """
        started, chunks, plan = perf_counter(), self._chunks.get(), call.plan
        try:
            output = self._runner.answer(call, plan)
        except Exception as error:
            if not (plan.is_served and plan.hands_out) or (chunks is not None and chunks.error is error):
                raise
            plan.drop()
            output = self._runner.answer(call, plan)  # an error of the model is raised again here
            self._counters.error("serve a prefix", error)
        finally:
            call.computing_s = perf_counter() - started
        return self._runner.hand_over(plan, output)

    # -- store ---------------------------------------------------------------------------------------------------------

    def store(self, call: Call, output: Any) -> str | None:
        """Store blocks of computed rows; return the bypass reason if its output or K/V is not understood."""
        plan, states = call.plan, last_states(output)
        if states is None:
            self.blocks.kinds.learn(call.kind, None)
            return "more_output"
        if plan.hands_out:
            refusals = call.state.kv_refusals
            reason = refusals[call.arguments.get(CACHE) is not None] = self._check_kv(call, plan, output, states)
            if reason:
                return reason
            self.blocks.kinds.learn(call.kind, (type(output), names_of(output), refusals.get(False) == ""))
        for place, number in enumerate(plan.numbers):
            if number not in plan.whole and not call.rows[number].bypass_reason:
                self._writer.store(call, plan, call.rows[number], states[place])
        return None

    def _check_kv(self, call: Call, plan: Prefill, output: Any, states: Tensor) -> str:
        """Take the K/V cache that the trunk returned; return why it cannot be kept with these states, "" if it can."""
        if plan.windowed is None:
            plan.kv_cache = cache_in(output, plan.kv_cache)
        if reason := find_reason_of_cache(plan.kv_cache):
            return reason
        is_alike = states.shape[:2] == call.arguments["input_ids"].shape
        return "" if is_alike and is_by_column(plan.kv_cache, states, self._trunk.depth) else "kv_layout"

    def follow(self, call: Call, output: Any) -> None:
        plan, states = call.plan, last_states(output)
        kv_cache = plan.kv_cache if plan.windowed is None else plan.windowed
        is_plain = is_plain_cache(kv_cache) and {type(one).__name__ for one in kv_cache.layers} == {"DynamicLayer"}
        is_growing = is_plain or (self._causal.steps and keeps_windows(kv_cache))
        if self._planner.cuts and plan.has_chains and states is not None and is_growing and not call.is_activated:
            self._follower.begin(call, kv_cache, states[:, -self.blocks.size :], self._writer)

    # -- close ---------------------------------------------------------------------------------------------------------

    def outcome(self, call: Call, row: Row) -> Outcome:
        plan: Prefill = call.plan
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if row.number in plan.whole:
            return Outcome(row.key, "exact", self._trunk.depth - 1, plan.whole[row.number][0], 1.0)
        n_known = plan.n_known.get(row.number, 0)
        if n_prefix := plan.served_tokens.get(row.number, 0):
            missed = "last_token" if n_prefix >= row.n_valid - 1 else "differs"
            return Outcome(row.key, "prefix", n_prefix=n_prefix, n_known=n_known, missed=missed)
        missed = "coupled" if call.is_coupled else plan.missed.get(row.number, "new")
        return Outcome(row.key, n_known=n_known, missed=missed)

    def names(self, call: Call) -> list[str]:
        rows = [row for row in call.rows if not row.bypass_reason]
        chains = [link.key for row in rows for link in self.blocks.planned(call, call.plan, row)]
        tails = [key for row in rows for key in (row.key, row.duplicate_key) if key]
        for row in rows:
            if row.n_valid < self.blocks.size:  # its answer may have filled its first block
                chains += self.blocks.pool.beginning_with(call.blocks_scope, row.plain_ids)
        return [*(entry_name(row.key) for row in call.rows if row.key), *map(block_name, (*chains, *tails))]

    def n_computed(self, call: Call) -> int:
        plan: Prefill = call.plan
        return count_tokens(call, [number for number in plan.numbers if number not in plan.whole]) - plan.n_saved


def _has_room(kv_cache: Any, n_columns: int) -> bool:
    """Whether a K/V cache of fixed length can hold a call; if not, the model raises the error."""
    limits = [int(layer.get_max_length()) for layer in kv_cache.layers]  # negative if there is no limit
    return all(limit < 0 or n_columns <= limit for limit in limits)
