"""Computes prompts from blocks of tokens and from each other: whole requests, known prefixes, shared beginnings.

A single prompt without padding is cut at the last known token, and the trunk runs on the remaining columns with the
caller's K/V cache, like the second chunk of a chunked prefill. The rows of a batch, and rows with padding, become a
tree (`tree.py`), which computes each different token once; the caller's K/V cache is filled from its columns. States at
padding are zeros then. Rows whose padding may be read, or whose positions are not consecutive, are computed apart.

Calls that keep no K/V share beginnings too. Of these, K/V is stored only where it is needed again: for beginnings that
rows of the call share, or that an earlier call had.

All blocks hold keys at positions that count from 0 if the trunk's keys can be rotated, else from the first token's own.

Sizes: B rows, T tokens per row (padding included), n valid tokens, C columns cut, L layers, H K/V heads, D_h width of
a head, D hidden width, b tokens per block.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.generic import ModelOutput

from llmcache.calls.chunks import Chunks
from llmcache.calls.kv_fill import (
    Pieces,
    empty,
    fill,
    is_by_column,
    join,
    last_states,
    make_output,
    names_of,
    put,
    with_cache,
    with_states,
)
from llmcache.calls.stored_blocks import StoredBlocks, Wanted, block_name
from llmcache.calls.stored_entries import entry_name
from llmcache.calls.tree import PAYS, Branch, Columns, Known, Part, Pool, Tree, stack
from llmcache.calls.turns import Turns
from llmcache.calls.wrapped import Wrapped
from llmcache.engines.engine import Eager
from llmcache.memory.blocks.block import NAMES, Block, Link, Slab, first_tokens, links, runs
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.blocks.slabs import slab_blocks
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import BY_COLUMN, DECIDING, Arguments
from llmcache.models.hooks import Distinct
from llmcache.models.kv_state import new_cache
from llmcache.models.masks import cut
from llmcache.models.output_formats import OutputFormats, name_of, type_of
from llmcache.models.packing import STATES, padding_of, parts_of
from llmcache.models.rope import rotate
from llmcache.request.bypass import find_reason_of_cache, keeps_windows
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call, Path, count_tokens
from llmcache.support.arrays import Ids, Positions
from llmcache.support.context import scoped
from llmcache.support.threads import forkable

_MOST_SEEN = 2**16  # keys of blocks
Kind = tuple[type, tuple[str, ...], bool]  # see `Prefix.kinds`


class Prefix:
    """Serves and stores calls of one wrapped decoder. Thread-safe."""

    def __init__(
        self,
        wrapped: Wrapped,
        blocks: BlockPool,
        stored: StoredBlocks | None,
        arguments: Arguments,
        eager: Eager,
        chunks: ContextVar[Chunks | None],
        distinct: ContextVar[Distinct | None],
    ) -> None:
        """Serve from `blocks` and from the store `stored`, and run what is left in `chunks`, if any, by `eager`.

        `distinct` is told which of the states that a language-model head gets are equal.
        """
        config, trunk = wrapped.config, wrapped.trunk
        self._causal = wrapped.causal
        self._cuts = config.prefix is not None and self._causal.cuts
        self._stored, self._is_exact, self._counters = stored, config.serves_exact, wrapped.counters
        self._trunk, self.blocks, self._arguments, self._eager = trunk, blocks, arguments, eager
        self.depth = trunk.depth
        self._chunks, self._distinct = chunks, distinct
        self._seen: OrderedDict[str, None] = OrderedDict()  # keys of blocks that calls without K/V began with
        self._lock = forkable(threading.Lock())
        self.turns = Turns(blocks.size, self._origin, self._turn, wrapped.weights.stayed, self._put)
        #: By kind of call: class and field names of its output, and whether the trunk was seen to make a plain
        #: `DynamicCache`; None if the output is not understood.
        self.kinds = OutputFormats[Kind](lambda known: [name_of(known[0]), *known[1:]], _read_kind)

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, call: Call) -> "Prefill | str":
        """Return the path of a call that keeps K/V, or the reason for a bypass."""
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
        if self.kinds.get(call.kind, ()) is None:
            return "more_output"
        return Prefill(self, kv_cache, self._has_chains(call), range(len(call.rows)), windowed=windowed)

    def share(self, call: Call, numbers: Sequence[int]) -> "Prefill | None":
        """Return the plan for rows of a call that keeps no K/V; None if they do not share beginnings."""
        prefill = self.plan_beginnings(call, numbers)
        return prefill if prefill is not None and prefill.tree is not None else None

    def plan_beginnings(self, call: Call, numbers: Sequence[int], is_made: bool = True) -> "Prefill | None":
        """Return a plan for rows of a call that keeps no K/V, without a tree if sharing does not pay.

        None if no row can share a beginning. Nothing is recorded of a call that is not made.
        """
        if not (self._cuts and self._has_chains(call)) or call.is_collected or call.engine is not self._eager:
            return None
        if call.mask_4d is not None or call.arguments.get("token_type_ids") is not None:
            return None
        prefill = Prefill(self, None, True, numbers, hands_out=False)
        try:
            self._look_up_beginnings(call, prefill, is_made)
        except Exception as error:
            self._counters.error("look up a prefix", error)
        return prefill

    def _has_chains(self, call: Call) -> bool:
        is_padding_known = call.causal.knows_padding or call.requests.valid is None
        is_known = is_padding_known and call.causal == self._causal
        return is_known and not (call.is_activated or call.is_coupled or call.state.sees_later)

    def _new_cache(self, call: Call) -> DynamicCache | None:
        """Make a K/V cache like the trunk does if it is passed none; None: it makes another kind, or none was seen."""
        refusals = call.state.kv_refusals
        if False not in refusals:
            if call.causal.makes_dynamic_cache:
                usual = new_cache(self._trunk)
                refusals[False] = "" if self._causal.is_causal and keeps_windows(usual) else find_reason_of_cache(usual)
            elif self.kinds.knows(call.kind) and (known := self.kinds[call.kind]) and known[2]:
                refusals[False] = ""
        return DynamicCache() if refusals.get(False) == "" else None

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call, prefill: "Prefill") -> None:
        """Find rows that are held in full, and what is known of the others."""
        self.turns.settle()
        if self._stored is not None:
            self._recall(call, prefill, self._stored)
        if prefill.kv_cache is None:
            prefill.kv_cache = self._new_cache(call)  # the store may have named its kind
        if prefill.kv_cache is None:
            return  # its kind is learned from this call
        tried = [
            (row, key) for row in call.rows if not row.bypass_reason for key in (row.key, row.duplicate_key) if key
        ]
        if self._is_exact and self.kinds.knows(call.kind):
            prefill.whole = {
                row.number: (key, held)
                for row, key in tried
                if (held := self.blocks.whole(key, row.ids)) and (held[-1].padding or not call.reads_padding(row))
            }
        if self._stored is not None and self._stored.tier.has_dropped:
            for number, (key, held) in prefill.whole.items():
                keys = [link.key for link in self._chain(call, prefill, call.rows[number])[: len(held) - 1]]
                self._stored.offer_again(call, [*keys, key], held, self.kinds.describe(call.kind))
        if len(prefill.whole) == len(call.rows):
            return
        if call.is_coupled:
            prefill.whole = {}
        if self._cuts and prefill.has_chains:
            self._plan(call, prefill)
        else:
            n_known = {row.number: self.blocks.n_held(self._chain(call, prefill, row)) for row in call.rows}
            prefill.n_known = {number: n * self.blocks.size for number, n in n_known.items()}
            prefill.missed = {number: "whole_prompts" for number, n in n_known.items() if n}

    def _look_up_beginnings(self, call: Call, prefill: "Prefill", is_made: bool) -> None:
        """Find what is known of the rows of a call that keeps no K/V."""
        if self._stored is not None:
            self._recall(call, prefill, self._stored)
        chains = {number: self._chain(call, prefill, call.rows[number]) for number in prefill.numbers}
        self._plan(call, prefill, self._count_seen(chains) if is_made else {})

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
        return {number: n * self.blocks.size for number, n in n_seen.items()}

    def _recall(self, call: Call, prefill: "Prefill", stored: StoredBlocks) -> None:
        """Read blocks from the store for rows that are not held in full.

        Looks in the call's own namespace (None) for blocks and tails, in the namespace that it shares for blocks alone.
        """
        shared = {None, call.prefixes_from} - {call.scope.namespace}
        wanted = []
        for row in map(call.rows.__getitem__, prefill.numbers):
            tails = [key for key in (row.duplicate_key, row.key) if key] if prefill.hands_out else []
            if row.bypass_reason or any(key in self.blocks for key in tails):
                continue
            for name in shared:
                chain = self._chain(call, prefill, row, name) if self._cuts or name is None else ()
                scope = call.scope if name is None else replace(call.scope, namespace=name)
                own_tails = tails if name is None else []
                if chain or own_tails:
                    wanted.append(Wanted(scope, row, chain, self.blocks.n_held(chain), own_tails))
        for kind in stored.recall(wanted, call.generation) if wanted else ():
            self.kinds.add_described(*kind)

    def n_held(self, row: Row, scope: Scope) -> int:
        """Return how many of a request's first tokens are held."""
        if self.blocks.whole(row.key, row.ids):
            return row.n_valid
        if row.start is None or not row.n_valid:
            return 0
        chain = links(scope, row, self.blocks.size, self._origin(row))
        return self.blocks.reach(chain, row.ids, row.id_width)[1]

    def keys_of(self, call: Call, prefill: "Prefill") -> list[str]:
        """Return the keys of all blocks and tails that may have served a call."""
        rows = [row for row in call.rows if not row.bypass_reason]
        chains = [link.key for row in rows for link in self._chain(call, prefill, row)]
        return [*chains, *(key for row in rows for key in (row.key, row.duplicate_key) if key)]

    def _plan(self, call: Call, prefill: "Prefill", wanted: Mapping[int, int] | None = None) -> None:
        """Choose how the rows that are not held in full are computed: cut, as a tree, or as they are."""
        n_tokens, size = call.arguments["input_ids"].shape[1], self.blocks.size
        rest = [call.rows[number] for number in prefill.numbers if number not in prefill.whole]
        apart = {row.number for row in rest if self._is_apart(call, row)}
        rows = [row for row in rest if row.number not in apart]
        left_out = [row for row in rest if row.number in apart and not row.bypass_reason]
        held = {row.number: self.blocks.n_held(self._chain(call, prefill, row)) for row in left_out}
        prefill.n_known = {number: n * size for number, n in held.items()}
        prefill.missed = {number: "padding" for number, n in held.items() if n}
        if not rows or any(row.bypass_reason == "mask_4d" for row in rest):
            return
        reached = {row.number: self._reach(call, prefill, row) for row in rows}
        n_known = {number: min(n, call.rows[number].n_valid - 1) for number, (_, n) in reached.items()}
        prefill.n_known = {**prefill.n_known, **n_known}
        if prefill.hands_out and len(call.rows) == 1 and rows[0].n_valid == n_tokens:
            if n_known[0] >= size - 1:
                prefill.matched, prefill.n_cut = reached[0][0], n_known[0]
                prefill.served_tokens, prefill.n_saved = n_known, n_known[0]
            return
        wanted = wanted or {}
        tree = Tree(
            [
                self._branch(
                    call,
                    row,
                    n_known[row.number],
                    partial(_between, reached[row.number][0], prefill.slabs),
                    wanted.get(row.number, 0),
                )
                for row in rows
            ]
        )
        n_columns = tree.cost(self._causal.packs) + (len(rest) - len(rows)) * n_tokens
        is_wanted = any(n_known[number] + size <= n for number, n in wanted.items() if number in n_known)
        n_plain = len(rest) * n_tokens
        if is_wanted or (n_plain - n_columns >= size - 1 and (len(rest) == 1 or n_columns <= PAYS * n_plain)):
            prefill.tree, served = tree, tree.served_tokens()
            prefill.served_tokens = {number: n for number, n in served.items() if n >= size - 1}
            prefill.n_saved = sum(served.values())
        else:
            prefill.missed |= {number: "too_short" for number, n in n_known.items() if n}

    def _is_apart(self, call: Call, row: Row) -> bool:
        """Whether a row is computed as it is: its tokens are not consecutive, or its padding may be read."""
        if row.bypass_reason or row.start is None or not row.n_valid or not isinstance(row.valid, slice):
            return True
        return row.n_valid < call.arguments["input_ids"].shape[1] and (row.is_misread or call.reads_padding(row))

    def _branch(self, call: Call, row: Row, n_known: int, known: Known, n_wanted: int) -> Branch:
        ids = call.requests.ids[row.number, row.valid]
        return Branch(row.number, ids, row.ids, self._origin(row), n_known, known, min(n_wanted, row.n_valid))

    def _origin(self, row: Row) -> int:
        """Return the position of a row's first token in blocks and in the tree."""
        return 0 if self._causal.rotates else row.start or 0

    def _reach(self, call: Call, prefill: "Prefill", row: Row) -> tuple[list[Block], int]:
        """Return `BlockPool.reach` of a row in its namespace, or in `call.prefixes_from` if that reaches further."""
        shared = call.prefixes_from
        own = self.blocks.reach(self._chain(call, prefill, row), row.ids, row.id_width)
        if shared in (None, call.scope.namespace) or own[1] == row.n_valid:
            return own
        chain = self._chain(call, prefill, row, shared)
        return max(own, self.blocks.reach(chain, row.ids, row.id_width), key=lambda reached: reached[1])

    def _chain(self, call: Call, prefill: "Prefill", row: Row, shared: str | None = None) -> tuple[Link, ...]:
        """Return the full blocks of a row, in its namespace or in the namespace `shared`."""
        if not prefill.has_chains or row.start is None:  # gaps between tokens, or positions that are not consecutive
            return ()
        if (row.number, shared) not in prefill.chains:
            scope = call.scope if shared is None else replace(call.scope, namespace=shared)
            prefill.chains[row.number, shared] = links(scope, row, self.blocks.size, self._origin(row))
        return prefill.chains[row.number, shared]

    # -- answer --------------------------------------------------------------------------------------------------------

    def answer(self, call: Call, prefill: "Prefill") -> Any:
        """Return the trunk's output after `look_up`, and fill the caller's K/V cache. On an error that is emptied.

        Within `chunked`, the trunk is run in chunks. Errors raised between chunks are raised here.
        """
        return self._hand_over(prefill, self._serve(call, prefill))

    def _serve(self, call: Call, prefill: "Prefill") -> Any:
        started, chunks = perf_counter(), self._chunks.get()
        try:
            return self._answer(call, prefill)
        except Exception as error:  # if it is the model's, the second run below raises it again
            if not (prefill.is_served and prefill.hands_out) or (chunks is not None and chunks.error is error):
                raise
            prefill.drop(call)
            self._counters.error("serve a prefix", error)
            return self._answer(call, prefill)
        finally:
            call.computing_s = perf_counter() - started

    def _hand_over(self, prefill: "Prefill", output: Any) -> Any:
        """Fill a caller's K/V cache that keeps windows with all columns, of which it keeps the last."""
        if prefill.windowed is None:
            return output
        for number, layer in enumerate(prefill.kv_cache.layers):
            prefill.windowed.update(layer.keys, layer.values, number)
        return with_cache(output, prefill.windowed) if len(output) > 1 else output

    def _run(self, call: Call, prefill: "Prefill", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (output := self._run_in_chunks(call, prefill, args, kwargs)) is not None:
            return output
        return call.engine.run(args, kwargs, [row for row in call.rows if row.number not in prefill.whole])

    def _run_in_chunks(self, call: Call, prefill: "Prefill", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk in chunks if the caller asked for it; None: it did not, or the call has no chunks."""
        chunks = self._chunks.get()
        if chunks is None or call.is_activated or not prefill.hands_out:
            return None
        if not chunks.fit(self._arguments, args, kwargs):
            return None
        with scoped(self._chunks, None):  # `between` may call this model: do not chunk those calls
            return chunks.run(self._eager, self._arguments, args, kwargs)

    def _answer(self, call: Call, prefill: "Prefill") -> Any:
        args, kwargs = call.args, call.kwargs
        if prefill.kv_cache is not None:
            args, kwargs = self._arguments.replace(args, kwargs, CACHE, prefill.kv_cache)
        try:
            if prefill.whole or prefill.tree is not None:
                return self._answer_by_columns(call, prefill)
            if not prefill.n_cut:
                return self._run(call, prefill, args, kwargs)
            states = self._fill(call, prefill)
            output = self._run(call, prefill, *self.cut(call, prefill.n_cut, args, kwargs))
            whole = join([*(piece.to(output[0].dtype) for piece in states), output[0]])
            return with_states(output, whole)
        except BaseException:
            if prefill.is_served and prefill.kv_cache is not None:
                empty(prefill.kv_cache)
            raise

    def cut(
        self, call: Call, n_cut: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the trunk's arguments without the first `n_cut` columns, which are known."""
        arguments = self._arguments
        for name in BY_COLUMN:
            if (value := arguments.get(args, kwargs, name)) is not None:
                args, kwargs = arguments.replace(args, kwargs, name, value[..., n_cut:])
        mask = arguments.get(args, kwargs, "attention_mask")
        if call.mask_4d is not None:  # has one row per token that is run; a 2-D mask covers all tokens
            args, kwargs = arguments.replace(args, kwargs, "attention_mask", cut(mask, n_cut))
        elif isinstance(mask, dict):  # {kind: None}, all tokens valid; with a later start the trunk must make a mask
            args, kwargs = arguments.replace(args, kwargs, "attention_mask", None)
        return args, kwargs

    def _fill(self, call: Call, prefill: "Prefill") -> Pieces:
        """Fill the K/V cache of a single prompt with C columns; return their states as pieces of (1, C, D)."""
        row, device = call.rows[0], call.arguments["input_ids"].device
        slabs = [
            self._turn(Slab(*(one.to(device) for one in piece)), (row.start or 0) - self._origin(row))
            for piece in runs(first_tokens(prefill.matched, prefill.n_cut))
        ]
        for layer in range(self.depth):
            keys, values = ([getattr(slab, name)[layer][None] for slab in slabs] for name in NAMES[:2])
            fill(prefill.kv_cache, layer, keys, values)
        return [slab.states for slab in slabs]

    def _answer_by_columns(self, call: Call, prefill: "Prefill") -> Any:
        """Return the output of rows that are held in full, computed as a tree, or computed apart."""
        ids, place = call.arguments["input_ids"], {number: i for i, number in enumerate(prefill.numbers)}
        pool, output = Pool((len(place), ids.shape[1])), None
        turns = np.zeros(pool.index.shape, np.int64)  # positions by which keys are turned
        if prefill.tree is not None:
            run = partial(self._run_step, call, prefill)
            output = prefill.tree.compute(run, self._trunk, self._causal.packs, ids.device, prefill.hands_out)
        parts = {
            number: one.parts(0, len(one.ids))
            for number, one in (prefill.tree.branches if prefill.tree else {}).items()
        }
        parts |= {
            number: _between(blocks, prefill.slabs, 0, call.rows[number].n_valid)
            for number, (_, blocks) in prefill.whole.items()
        }
        for number, own in parts.items():
            row = call.rows[number]
            pool.place(place[number], row.valid, own)
            is_turned = number in prefill.whole and len(prefill.whole[number][1]) == 1  # a tail alone is as its row was
            turns[place[number], row.valid] = 0 if is_turned else (row.start or 0) - self._origin(row)
            if number in prefill.whole and (tail := prefill.whole[number][1][-1]).padding and tail.layout == row.layout:
                columns = Columns(tail.padding["keys"], tail.padding["values"], tail.padding["states"][0])
                pool.place(place[number], padding_of(row.valid, ids.shape[1]), [(columns, 0, len(columns))])
        if apart := [number for number in prefill.numbers if number not in parts]:
            output, kv_cache = self._run_rows(call, prefill, apart)
            for i, number in enumerate(apart):
                keys, values = ([getattr(layer, name)[i] for layer in kv_cache.layers] for name in NAMES[:2])
                pool.place(place[number], slice(None), [(Columns(keys, values, output[0][i]), 0, ids.shape[1])])
        return self._lay_out(call, prefill, pool, turns, output)

    def _lay_out(self, call: Call, prefill: "Prefill", pool: Pool, turns: Ids, output: Any) -> Any:
        """Fill the caller's K/V cache from columns, and return an output like the trunk's."""
        device = call.arguments["input_ids"].device
        index = torch.from_numpy(pool.index).to(device)
        turned = torch.from_numpy(turns).to(device) if turns.any() else None
        if prefill.kv_cache is not None:
            for layer in range(self.depth):
                keys, values = (pool.layer(name, layer, index) for name in NAMES[:2])
                if turned is not None:
                    keys = rotate(keys, turned, self._trunk.module, self._causal.rotates)
                put(prefill.kv_cache, layer, keys, values)
        distinct = pool.states(device)
        states = distinct.index_select(0, index.flatten()).view(*index.shape, -1)
        if call.n_read is not None:
            self._distinct.set(Distinct(states, distinct, index))
        if output is None:
            of, names, _ = self.kinds[call.kind] or (tuple, (STATES, CACHE), True)
        else:
            of, names = type(output), names_of(output)
        return make_output(of, (STATES,) if prefill.kv_cache is None else names, states, prefill.kv_cache)

    def _run_step(self, call: Call, prefill: "Prefill", **changes: Any) -> Any:
        """Run the trunk with a call's arguments, some of them replaced."""
        args, kwargs = call.args, call.kwargs
        for name, value in {**changes, "use_cache": True, "cache_position": None, "token_type_ids": None}.items():
            if name in kwargs or (
                name in self._arguments.names and value is not self._arguments.get(args, kwargs, name)
            ):
                args, kwargs = self._arguments.replace(args, kwargs, name, value)
        output = self._run_in_chunks(call, prefill, args, kwargs)
        return self._eager.run(args, kwargs, ()) if output is None else output

    def _run_rows(self, call: Call, prefill: "Prefill", rows: Sequence[int]) -> tuple[Any, Any]:
        """Run the trunk on some rows; return its output and the K/V cache that it filled."""
        index, kv_cache = torch.tensor(rows, device=call.arguments["input_ids"].device), DynamicCache()
        args, kwargs = self._arguments.replace(call.args, call.kwargs, CACHE, kv_cache)
        if not prefill.hands_out:
            args, kwargs = self._arguments.replace(args, kwargs, "use_cache", True)
        for name in DECIDING:  # a 4-D mask fits the caller's K/V cache; the 2-D mask used here is equivalent
            value = call.arguments.get(name)
            if value is not None:
                value = value.index_select(0, index) if len(value) == len(call.arguments["input_ids"]) else value
                args, kwargs = self._arguments.replace(args, kwargs, name, value)
            elif name == "attention_mask":
                args, kwargs = self._arguments.replace(args, kwargs, name, None)
        return self._run(call, prefill, args, kwargs), kv_cache

    # -- store ---------------------------------------------------------------------------------------------------------

    def store(self, call: Call, prefill: "Prefill", output: Any) -> str | None:
        """Store blocks of computed rows; return the bypass reason if its output or K/V is not understood."""
        states = last_states(output)
        if states is None:
            self.kinds.learn(call.kind, None)
            return "more_output"
        if prefill.hands_out:
            state, names = call.state, names_of(output)
            reason = state.kv_refusals[call.arguments.get(CACHE) is not None] = self._check_kv(
                call, prefill, output, states
            )
            if reason:
                return reason
            self.kinds.learn(call.kind, (type(output), names, state.kv_refusals.get(False) == ""))
        for place, number in enumerate(prefill.numbers):
            if number not in prefill.whole and not call.rows[number].bypass_reason:
                self._store(call, prefill, call.rows[number], states[place])
        return None

    def follow(self, call: Call, prefill: "Prefill", output: Any) -> None:
        """Keep the K/V of what is generated after the prompts of a call that keeps K/V."""
        states = last_states(output)
        if self._cuts and prefill.has_chains and states is not None:
            kv_cache = prefill.kv_cache if prefill.windowed is None else prefill.windowed
            self.turns.begin(call, kv_cache, states)

    def _check_kv(self, call: Call, prefill: "Prefill", output: Any, states: Tensor) -> str:
        """Take the K/V cache that the trunk returned; return why it cannot be kept with these states, "" if it can."""
        parts = parts_of(output)
        kv_cache = prefill.kv_cache
        if prefill.windowed is None:
            kv_cache = prefill.kv_cache = parts.get(CACHE, parts.get(1, prefill.kv_cache))
        if reason := find_reason_of_cache(kv_cache):
            return reason
        is_alike = states.shape[:2] == call.arguments["input_ids"].shape
        return "" if is_alike and is_by_column(kv_cache, states, self._trunk.depth) else "kv_layout"

    def _put(self, call: Call, chain: Sequence[Link], made: Mapping[str, Block]) -> bool:
        """Put blocks of a chain into the pool and queue new ones for the store; return whether all are held."""
        known = {link.key for link in chain if link.key in self.blocks}
        is_whole = self.blocks.put(chain, made, call.generation)
        if self._stored is not None:
            kind = self.kinds.describe(call.kind) if self.kinds.knows(call.kind) else None
            for before, link in zip([None, *(link.key for link in chain)], chain, strict=False):
                if link.key in made and link.key not in known:
                    self._stored.put(call, link.key, made[link.key], before, kind)
        return is_whole

    def _store(self, call: Call, prefill: "Prefill", row: Row, states: Tensor) -> None:
        """Store the blocks of a row that are not held, with the trunk's output states (T, D).

        A row computed by itself, at its blocks' positions, is stored bit for bit. If held blocks of another request
        differ from it in the last bits, its tail begins before them.
        """
        blocks, chain = self.blocks, self._chain(call, prefill, row)
        branch = prefill.tree.branches.get(row.number) if prefill.tree is not None else None
        if not prefill.hands_out:
            chain = chain[: (0 if branch is None else branch.n_kept()) // blocks.size]
        held = blocks.match(chain)
        is_computed = branch is None and not prefill.n_cut
        n_before = 0 if is_computed else len(held)
        made = self._make_blocks(call, prefill, row, states, chain, n_before)
        new = {link.key: block for link, block in zip(chain[n_before:], made, strict=True)}
        if not prefill.hands_out or (row.duplicate_key and branch is not None):
            if new:
                self._put(call, chain, new)
            return
        n_own = len(chain)
        if is_computed and row.start not in (None, self._origin(row)):
            n_own = 0  # the blocks' keys are turned
        elif is_computed:
            n_own = next((i for i, block in enumerate(held) if not block.is_equal(made[i])), n_own)
        tail = self._make_tail(call, prefill, row, states, n_own * blocks.size)
        first = blocks.whole(row.key, row.ids) if row.duplicate_key else []
        if first and n_own == len(chain) and first[-1].is_equal(tail):
            return  # equal to a duplicate earlier in the call
        if n_own < len(chain):
            self._put(call, chain, new)
        link = Link(row.duplicate_key or row.key, tail.ids)
        if not self._put(call, (*chain[:n_own], link), {**new, link.key: tail}):
            self._counters.too_large(1)

    def _make_blocks(
        self, call: Call, prefill: "Prefill", row: Row, states: Tensor, chain: Sequence[Link], n_before: int
    ) -> list[Block]:
        """Make the full blocks of a row after the first `n_before`, in slabs."""
        size, made = self.blocks.size, list[Block]()
        for first in range(n_before, len(chain), slab_blocks(size)):
            held = chain[first : first + slab_blocks(size)]
            slab = self._take(prefill, row, states, first * size, (first + len(held)) * size)
            made += [Block(link.ids, call.scope, slab, i * size, (i + 1) * size) for i, link in enumerate(held)]
        return made

    def _make_tail(self, call: Call, prefill: "Prefill", row: Row, states: Tensor, n_before: int) -> Block:
        """Make the tail of a row after `n_before` tokens, with its padding if that is served as well."""
        if row.start is None:
            rest = self._copy(prefill, row, states, row.valid)
        else:
            rest = self._take(prefill, row, states, n_before, row.n_valid, row.start if n_before == 0 else None)
        padding = {}
        if (row.has_layout or row.layout) and (prefill.tree is None or row.number not in prefill.tree.branches):
            taken = self._copy(prefill, row, states, padding_of(row.valid, len(states)))
            padding = dict(zip(NAMES, taken.cut(0, taken.n_tokens), strict=True))
        ids = row.ids[n_before * row.id_width :]
        return Block(ids, call.scope, rest, 0, rest.n_tokens, is_tail=True, padding=padding, layout=row.layout)

    def _take(
        self, prefill: "Prefill", row: Row, states: Tensor, begin: int, end: int, start: int | None = None
    ) -> Slab:
        """Copy tokens of a row to the pool's device, as normal tensors.

        The keys' positions count from `start`; None: as in blocks.
        """
        start = self._origin(row) if start is None else start
        branch = prefill.tree.branches.get(row.number) if prefill.tree is not None else None
        if branch is None:
            taken = self._copy(prefill, row, states, slice(row.first + begin, row.first + end))
            return self._turn(taken, start - (row.start or 0))
        with torch.inference_mode(False), torch.no_grad():
            parts = branch.parts(begin, end)
            keys, values = (stack(parts, name, self.depth).to(self.blocks.device) for name in NAMES[:2])
            own = torch.cat([columns.states[first : first + n] for columns, first, n in parts])
            slab = Slab(keys, values, own[None].clone().to(self.blocks.device))
            return self._turn(slab, start - self._origin(row))

    def _turn(self, slab: Slab, offset: int) -> Slab:
        """Return a slab with its keys at positions that are larger by `offset`."""
        if not offset:
            return slab
        with torch.inference_mode(False), torch.no_grad():
            offsets = torch.full((1, slab.n_tokens), offset, device=slab.keys.device)
            keys = rotate(slab.keys, offsets, self._trunk.module, self._causal.rotates)
        return Slab(keys, slab.values, slab.states)

    def _copy(self, prefill: "Prefill", row: Row, states: Tensor, places: Positions) -> Slab:
        """Copy the K/V and states at some positions of a row to the pool's device, as normal tensors."""
        device = self.blocks.device
        with torch.inference_mode(False), torch.no_grad():
            only = slice(row.number, row.number + 1)
            layers = prefill.kv_cache.layers
            keys = torch.cat([layer.keys[only, :, places] for layer in layers])
            values = torch.cat([layer.values[only, :, places] for layer in layers])
            taken = states[None, places].clone()
            return Slab(keys.to(device), values.to(device), taken.to(device))


@dataclass(slots=True)
class Prefill(Path):
    """The path of one call that keeps K/V, or the plan for rows of a call that keeps none. Rows are named by number."""

    prefix: Prefix  # serves and stores it
    kv_cache: Any  # the caller's, which the call fills
    has_chains: bool  # its rows may share prefixes with other requests
    numbers: Sequence[int]  # its rows
    hands_out: bool = True  # its K/V is the caller's
    windowed: Any = None  # the caller's K/V cache if its layers keep windows; `kv_cache` keeps all columns
    chains: dict[tuple[int, str | None], tuple[Link, ...]] = field(default_factory=dict)  # and by namespace, None: own
    whole: Mapping[int, tuple[str, Any]] = field(default_factory=dict)  # key and blocks of rows that are stored whole
    served_tokens: Mapping[int, int] = field(default_factory=dict)  # how many of a row are not computed for it
    matched: Sequence[Any] = ()  # the stored blocks that a single prompt begins with
    n_cut: int = 0  # C
    n_saved: int = 0  # tokens of all rows that are not computed for them; rows that are stored whole are left out
    n_known: Mapping[int, int] = field(default_factory=dict)  # tokens at the beginning of a row that are stored
    slabs: dict[Slab, Columns] = field(default_factory=dict)  # the columns of stored blocks
    tree: Tree | None = None  # of rows that are neither whole nor computed apart
    missed: dict[int, str] = field(default_factory=dict)  # why a stored prefix does not serve, a key of `MISSES`

    @property
    def is_served(self) -> bool:
        """Whether not everything is computed as the caller asked."""
        return bool(self.whole or self.n_cut or self.tree is not None)

    keeps_kv = True

    def look_up(self, call: Call) -> None:
        self.prefix.look_up(call, self)

    def served(self, call: Call) -> Collection[int]:
        return self.whole.keys()

    def drop(self, call: Call) -> None:
        self.whole, self.served_tokens, self.n_cut, self.n_saved, self.tree = {}, {}, 0, 0, None

    def answer(self, call: Call) -> Any:
        return self.prefix.answer(call, self)

    def store(self, call: Call, output: Any) -> str | None:
        return self.prefix.store(call, self, output)

    def follow(self, call: Call, output: Any) -> None:
        self.prefix.follow(call, self, output)

    def outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if row.number in self.whole:
            return Outcome(row.key, "exact", self.prefix.depth - 1, self.whole[row.number][0], 1.0)
        n_known = self.n_known.get(row.number, 0)
        if n_prefix := self.served_tokens.get(row.number, 0):
            missed = "last_token" if n_prefix >= row.n_valid - 1 else "differs"
            return Outcome(row.key, "prefix", n_prefix=n_prefix, n_known=n_known, missed=missed)
        missed = "coupled" if call.is_coupled else self.missed.get(row.number, "new")
        return Outcome(row.key, n_known=n_known, missed=missed)

    def names(self, call: Call) -> list[str]:
        keys = [row.key for row in call.rows if row.key]
        return [*map(entry_name, keys), *map(block_name, self.prefix.keys_of(call, self))]

    def n_computed(self, call: Call) -> int:
        return count_tokens(call, [number for number in self.numbers if number not in self.whole]) - self.n_saved


def _read_kind(described: Any) -> Kind | None:
    name, names, *is_own_known = described
    found = type_of(name) if is_own_known else None  # without: made before the K/V was checked
    is_output = found is not None and (found is tuple or issubclass(found, ModelOutput))
    return (found, tuple(names), *is_own_known) if found is not None and is_output else None


def _between(blocks: Sequence[Block], slabs: dict[Slab, Columns], begin: int, end: int) -> list[Part]:
    """Return the tokens of consecutive blocks from `begin` to before `end`, in columns that `slabs` collects."""
    parts, at = list[Part](), 0
    for block in blocks:
        low, high = max(begin - at, 0), min(end - at, block.n_tokens)
        if low < high:
            slab = block.slab
            if slab not in slabs:
                slabs[slab] = Columns(slab.keys, slab.values, slab.states[0])
            parts.append((slabs[slab], block.begin + low, high - low))
        at += block.n_tokens
    return parts


def _has_room(kv_cache: Any, n_columns: int) -> bool:
    """Whether a K/V cache of fixed length can hold a call; if not, the model raises the error."""
    limits = [int(layer.get_max_length()) for layer in kv_cache.layers]  # negative if there is no limit
    return all(limit < 0 or n_columns <= limit for limit in limits)
