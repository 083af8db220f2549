"""Runs the trunk on what a plan leaves, and assembles output and K/V by columns, known and computed.

After a cut the trunk runs on the remaining columns with the caller's K/V cache, like the second chunk of a chunked
prefill. Otherwise output and K/V cache are laid out from the columns of a tree, of blocks, and of rows computed apart.
States at padding that is not computed are zeros.

Sizes: B rows, T tokens per row (padding included), C columns cut, D hidden width.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from llmcache.calls.chunks import Chunks
from llmcache.calls.kv_fill import Pieces, empty, fill, join, make_output, names_of, put, with_cache, with_states
from llmcache.calls.prefill import Blocks, Prefill, between
from llmcache.calls.tree import Columns, Pool
from llmcache.engines.engine import Eager
from llmcache.memory.blocks.block import NAMES, Slab, first_tokens, runs
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import BY_COLUMN, Arguments, take_rows
from llmcache.models.hooks import Distinct
from llmcache.models.masks import cut
from llmcache.models.packing import STATES, padding_of
from llmcache.models.rope import rotate
from llmcache.reuse.call import Call
from llmcache.support.arrays import Ids
from llmcache.support.context import scoped


class ColumnRunner:
    """Computes what plans leave, for one wrapped decoder. Thread-safe."""

    def __init__(
        self,
        blocks: Blocks,
        arguments: Arguments,
        eager: Eager,
        chunks: ContextVar[Chunks | None],
        distinct: ContextVar[Distinct | None],
    ) -> None:
        """Run what is left in `chunks`, if any, by `eager`.

        `distinct` is told which of the states that a language-model head gets are equal.
        """
        self._blocks, self._trunk, self._causal = blocks, blocks.trunk, blocks.causal
        self._arguments, self._eager, self._chunks, self._distinct = arguments, eager, chunks, distinct

    def answer(self, call: Call, plan: Prefill) -> Any:
        """Return the trunk's output, and fill the caller's K/V cache. On an error that is emptied."""
        args, kwargs = call.args, call.kwargs
        if plan.kv_cache is not None:
            args, kwargs = self._arguments.replace(args, kwargs, {CACHE: plan.kv_cache})
        try:
            if plan.whole or plan.tree is not None:
                return self._lay(call, plan)
            if not plan.n_cut:
                return self._run(call, plan, args, kwargs)
            states = self._fill(call, plan)
            output = self._run(call, plan, *cut_off(self._arguments, call, plan.n_cut, args, kwargs))
            return with_states(output, join([*(piece.to(output[0].dtype) for piece in states), output[0]]))
        except BaseException:
            if plan.is_served and plan.kv_cache is not None:
                empty(plan.kv_cache)
            raise

    def hand_over(self, plan: Prefill, output: Any) -> Any:
        """Fill a caller's K/V cache that keeps windows with all columns, of which it keeps the last; see `answer`."""
        if plan.windowed is None:
            return output
        try:
            for number, layer in enumerate(plan.kv_cache.layers):
                plan.windowed.update(layer.keys, layer.values, number)
        except BaseException:
            empty(plan.windowed)
            raise
        return with_cache(output, plan.windowed) if len(output) > 1 else output

    def _run(self, call: Call, plan: Prefill, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk, in chunks if the caller asked for it and the call has some."""
        chunks = self._chunks.get()
        if chunks is None or call.is_activated or not (plan.hands_out and chunks.fit(self._arguments, args, kwargs)):
            return call.engine.run(args, kwargs, [row for row in call.rows if row.number not in plan.whole])
        with scoped(self._chunks, None):  # `between` may call this model: do not chunk those calls
            return chunks.run(self._eager, self._arguments, args, kwargs)

    def _fill(self, call: Call, plan: Prefill) -> Pieces:
        """Fill the K/V cache of a single prompt with C columns; return their states as pieces of (1, C, D)."""
        offset, device = self._blocks.offset(call.rows[0]), call.arguments["input_ids"].device
        pieces = runs(first_tokens(plan.matched, plan.n_cut))
        slabs = [self._blocks.rotate(Slab(*(one.to(device) for one in piece)), offset) for piece in pieces]
        for layer in range(self._trunk.depth):
            keys, values = ([getattr(slab, name)[layer][None] for slab in slabs] for name in NAMES[:2])
            fill(plan.kv_cache, layer, keys, values)
        return [slab.states for slab in slabs]

    def _lay(self, call: Call, plan: Prefill) -> Any:
        """Return the output of rows that are held in full, computed as a tree, or computed apart."""
        ids, place = call.arguments["input_ids"], {number: i for i, number in enumerate(plan.numbers)}
        pool, output, branches = Pool((len(place), ids.shape[1])), None, {}
        offsets = np.zeros(pool.index.shape, np.int64)  # positions by which keys are rotated
        if plan.tree is not None:
            run, branches = partial(self._run_with, call, plan), plan.tree.branches
            output = plan.tree.compute(run, self._trunk, self._causal.packs, ids.device, plan.hands_out)
        for number in (*branches, *plan.whole):
            row, (_, blocks) = call.rows[number], plan.whole.get(number, ("", ()))
            parts = between(blocks, 0, row.n_valid) if blocks else branches[number].parts(0, row.n_valid)
            pool.place(place[number], row.valid, parts)
            if len(blocks) != 1:  # the keys of a tail alone are as its row's were
                offsets[place[number], row.valid] = self._blocks.offset(row)
            if blocks and (tail := blocks[-1]).padding and tail.layout == row.layout:
                padding = Slab(*(tail.padding[name] for name in NAMES))
                pool.place(place[number], padding_of(row.valid, ids.shape[1]), [(padding, 0, padding.n_tokens)])
        if apart := [number for number in plan.numbers if number not in branches and number not in plan.whole]:
            output, kv_cache = self._run_rows(call, plan, apart)
            for i, number in enumerate(apart):
                keys, values = ([getattr(layer, name)[i] for layer in kv_cache.layers] for name in NAMES[:2])
                pool.place(place[number], slice(None), [(Columns(keys, values, output[0][i : i + 1]), 0, ids.shape[1])])
        return self._lay_out(call, plan, pool, offsets, output)

    def _lay_out(self, call: Call, plan: Prefill, pool: Pool, offsets: Ids, output: Any) -> Any:
        """Fill the caller's K/V cache from columns, and return an output like the trunk's."""
        device = call.arguments["input_ids"].device
        index = torch.from_numpy(pool.index).to(device)
        by = torch.from_numpy(offsets).to(device) if offsets.any() else None
        for layer in range(self._trunk.depth if plan.kv_cache is not None else 0):
            keys, values = (pool.layer(name, layer, index) for name in NAMES[:2])
            if by is not None:
                keys = rotate(keys, by, self._trunk.module, self._causal.rotates)
            put(plan.kv_cache, layer, keys, values)
        distinct = pool.states(device)
        states = distinct.index_select(0, index.flatten()).view(*index.shape, -1)
        if call.n_read is not None:
            self._distinct.set(Distinct(states, distinct, index))
        if output is None:
            of, names, _ = self._blocks.kinds[call.kind] or (tuple, (STATES, CACHE), True)
        else:
            of, names = type(output), names_of(output)
        return make_output(of, (STATES,) if plan.kv_cache is None else names, states, plan.kv_cache)

    def _run_with(self, call: Call, plan: Prefill, **changes: Any) -> Any:
        """Run the trunk with a call's arguments, some of them replaced, and without those that follow from columns."""
        passed, names = self._arguments.bind(call.args, call.kwargs), self._arguments.names
        changes = {"cache_position": None, "token_type_ids": None, **changes, "use_cache": True}
        taken = {name: one for name, one in changes.items() if name in passed or (name in names and one is not None)}
        return self._run(call, plan, *self._arguments.replace(call.args, call.kwargs, taken))

    def _run_rows(self, call: Call, plan: Prefill, rows: Sequence[int]) -> tuple[Any, Any]:
        """Run the trunk on some rows; return its output and the K/V cache that it filled."""
        index, kv_cache = torch.tensor(rows, device=call.arguments["input_ids"].device), DynamicCache()
        # A 4-D mask fits the caller's K/V cache; the 2-D mask used here is equivalent.
        changes = {"attention_mask": None, **take_rows(call.arguments, index), CACHE: kv_cache}
        return self._run_with(call, plan, **changes), kv_cache


def cut_off(
    arguments: Arguments, call: Call, n_cut: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the trunk's arguments without the first `n_cut` columns, which are known."""
    passed, changes = arguments.bind(args, kwargs), dict[str, Any]()
    for name in BY_COLUMN:
        if passed.get(name) is not None:
            changes[name] = passed[name][..., n_cut:]
    mask = passed.get("attention_mask")
    if call.mask_4d is not None:  # has one row per token that is run; a 2-D mask covers all tokens
        changes["attention_mask"] = cut(mask, n_cut)
    elif isinstance(mask, dict):  # {kind: None}, all tokens valid; with a later start the trunk must make a mask
        changes["attention_mask"] = None
    return arguments.replace(args, kwargs, changes)
