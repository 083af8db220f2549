"""Looks up what is known of a decoder's rows, and chooses how the rest is computed: cut, as a tree, or as it is.

A single prompt without padding is cut at the last known token. The rows of a batch, and rows with padding, become a
tree (`tree.py`), which computes each different token once. Rows whose padding may be read, or whose positions are not
consecutive, are computed apart.

Sizes: T tokens per row (padding included), b tokens per block.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from llmcache.calls.prefill import Blocks, Prefill, between
from llmcache.calls.stored_blocks import Wanted
from llmcache.calls.tree import PAYS, Branch, Tree
from llmcache.memory.blocks.block import Block, Link
from llmcache.request.rows import Row
from llmcache.reuse.call import Call
from llmcache.support.threads import forkable

_MOST_SEEN = 2**16  # keys of blocks


class Planner:
    """Plans calls of one wrapped decoder. Thread-safe."""

    def __init__(self, blocks: Blocks) -> None:
        """Look up in the pool of `blocks`, and first in its store."""
        config = blocks.wrapped.config
        self.cuts = config.prefix is not None and blocks.causal.cuts
        self._is_exact, self._blocks, self._pool = config.serves_exact, blocks, blocks.pool
        self._seen: OrderedDict[str, None] = OrderedDict()  # keys of blocks that calls without K/V began with
        self._lock = forkable(threading.Lock())

    def look_up(self, call: Call, plan: Prefill) -> None:
        """Find rows that are held in full, and plan the others."""
        tried = [
            (row, key) for row in call.rows if not row.bypass_reason for key in (row.key, row.duplicate_key) if key
        ]
        if self._is_exact and self._blocks.kinds.knows(call.kind):
            plan.whole = {
                row.number: (key, held)
                for row, key in tried
                if (held := self._pool.whole(key, row.ids)) and (held[-1].padding or not call.reads_padding(row))
            }
        stored = self._blocks.stored
        if stored is not None and stored.tier.has_dropped:
            for number, (key, held) in plan.whole.items():
                keys = [link.key for link in self._blocks.planned(call, plan, call.rows[number])[: len(held) - 1]]
                stored.offer_again(call, [*keys, key], held, self._blocks.kinds.describe(call.kind))
        if len(plan.whole) == len(call.rows):
            return
        if call.is_coupled:
            plan.whole = {}
        if self.cuts and plan.has_chains:
            self._plan(call, plan, {})
        else:
            self._miss(call, plan, call.rows, "whole_prompts")

    def look_up_beginnings(self, call: Call, plan: Prefill, is_made: bool) -> None:
        """Plan rows of a call that keeps no K/V; record it if it `is_made`."""
        self.recall(call, plan)
        chains = {number: self._blocks.planned(call, plan, call.rows[number]) for number in plan.numbers}
        self._plan(call, plan, self._count_seen(chains) if is_made else {})

    def _count_seen(self, chains: Mapping[int, Sequence[Link]]) -> dict[int, int]:
        """Return how many tokens of each row an earlier call without K/V began with; record the rows' blocks."""
        with self._lock:
            n_seen = {
                number: next((i for i, link in enumerate(links) if link.key not in self._seen), len(links))
                for number, links in chains.items()
            }
            for key in (link.key for links in chains.values() for link in links):
                self._seen[key] = None
                self._seen.move_to_end(key)
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return {number: n * self._pool.size for number, n in n_seen.items()}

    def recall(self, call: Call, plan: Prefill) -> None:
        """Read blocks from the store for rows that are not held in full.

        Looks in the call's own namespace (None) for blocks and tails, in the namespace that it shares for blocks alone.
        """
        if (stored := self._blocks.stored) is None:
            return
        shared, wanted = {None, call.prefixes_from} - {call.scope.namespace}, []
        for row in map(call.rows.__getitem__, plan.numbers):
            tails = [key for key in (row.duplicate_key, row.key) if key] if plan.hands_out else []
            if row.bypass_reason or any(key in self._pool for key in tails):
                continue
            for name in shared:
                chain = self._blocks.planned(call, plan, row, name) if self.cuts or name is None else ()
                scope = call.blocks_scope if name is None else replace(call.blocks_scope, namespace=name)
                own_tails = tails if name is None else []
                if call.is_activated:  # its tails follow no blocks, and are in its own scope
                    wanted += [Wanted(call.scope, row, (), 0, own_tails)] if own_tails else []
                    own_tails = []
                if chain or own_tails:
                    wanted.append(Wanted(scope, row, chain, self._pool.n_held(chain), own_tails))
        for kind in stored.recall(wanted, call.generation) if wanted else ():
            self._blocks.kinds.add_described(*kind)

    def _plan(self, call: Call, plan: Prefill, wanted: Mapping[int, int]) -> None:
        """Choose how the rows that are not held in full are computed.

        `wanted`: tokens at the beginning of rows whose K/V is to be stored, though the call keeps none.
        """
        rest = [call.rows[number] for number in plan.numbers if number not in plan.whole]
        apart = {row.number for row in rest if _is_apart(call, row)}
        rows = [row for row in rest if row.number not in apart]
        left_out = [row for row in rest if row.number in apart and not row.bypass_reason]
        self._miss(call, plan, left_out, "padding")
        if not rows or any(row.bypass_reason == "mask_4d" for row in rest):
            return
        reached = {row.number: self._reach(call, plan, row) for row in rows}
        blocks = {number: held for number, (held, _) in reached.items()}
        n_known = {row.number: min(reached[row.number][1], row.n_valid - 1) for row in rows}
        plan.n_known |= n_known
        if not plan.hands_out or len(call.rows) > 1 or rows[0].n_valid < call.arguments["input_ids"].shape[1]:
            self._plan_tree(call, plan, rows, len(apart), blocks, wanted)
        elif n_known[0] >= self._pool.size - 1:
            plan.matched, plan.n_cut, plan.n_saved, plan.served_tokens = blocks[0], n_known[0], n_known[0], n_known

    def _plan_tree(
        self,
        call: Call,
        plan: Prefill,
        rows: Sequence[Row],
        n_apart: int,
        blocks: Mapping[int, Sequence[Block]],
        wanted: Mapping[int, int],
    ) -> None:
        """Plan a tree of rows, beside `n_apart` others, if that takes less than a batch, or its K/V is wanted."""
        n_tokens, size, n_known = call.arguments["input_ids"].shape[1], self._pool.size, plan.n_known
        branches = []
        for row in rows:
            known = n_known[row.number], partial(between, blocks[row.number])
            n_wanted, ids = min(wanted.get(row.number, 0), row.n_valid), call.requests.ids[row.number, row.valid]
            branches.append(Branch(row.number, ids, row.ids, self._blocks.origin(row), *known, n_wanted))
        tree = Tree(branches)
        n_plain = (len(rows) + n_apart) * n_tokens
        n_columns = tree.cost(self._blocks.causal.of_segment) + n_apart * n_tokens
        is_single = len(rows) + n_apart == 1
        pays = n_plain - n_columns >= size - 1 and (is_single or n_columns <= PAYS * n_plain)
        # A batch leaves no K/V: what an earlier call began with too is stored now, and pays in later calls.
        if pays or any(n_known[row.number] + size <= wanted.get(row.number, 0) for row in rows):
            plan.tree, served = tree, tree.served_tokens()
            plan.served_tokens = {number: n for number, n in served.items() if n >= size - 1}
            plan.n_saved = sum(served.values())
        else:
            plan.missed |= {row.number: "too_short" for row in rows if n_known[row.number]}

    def _miss(self, call: Call, plan: Prefill, rows: Sequence[Row], why: str) -> None:
        """Note what is known of rows that it does not serve."""
        for row in rows:
            plan.n_known[row.number] = self._pool.size * self._pool.n_held(self._blocks.planned(call, plan, row))
            if plan.n_known[row.number]:
                plan.missed[row.number] = why

    def _reach(self, call: Call, plan: Prefill, row: Row) -> tuple[list[Block], int]:
        """Return `BlockPool.reach` of a row in its namespace, or in `call.prefixes_from` if that reaches further."""
        shared = call.prefixes_from
        own = self._pool.reach(self._blocks.planned(call, plan, row), row.plain_ids, row.id_width)
        if shared in (None, call.scope.namespace) or own[1] == row.n_valid:
            return own
        chain = self._blocks.planned(call, plan, row, shared)
        return max(own, self._pool.reach(chain, row.plain_ids, row.id_width), key=lambda reached: reached[1])


def _is_apart(call: Call, row: Row) -> bool:
    """Whether a row is computed as it is: its tokens are not consecutive, or its padding may be read."""
    if row.bypass_reason or row.start is None or not row.n_valid or not isinstance(row.valid, slice):
        return True
    return row.n_valid < call.arguments["input_ids"].shape[1] and (row.is_misread or call.reads_padding(row))
