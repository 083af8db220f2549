"""Stores K/V and states in blocks: those of computed rows, and of tokens that are generated after them.

Of calls that keep no K/V, it is stored only where it is needed again: for beginnings that rows of the call share, or
that an earlier call had.

Sizes: T tokens per row (padding included), n tokens, H K/V heads, D_h width of a head, D hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmcache.calls.follower import Followed
from llmcache.calls.prefill import Blocks, Prefill
from llmcache.calls.tree import stack
from llmcache.memory.blocks.block import NAMES, Block, Link, Slab, links
from llmcache.memory.blocks.slabs import slab_blocks
from llmcache.models.packing import padding_of
from llmcache.request.rows import Row
from llmcache.reuse.call import Call
from llmcache.support.arrays import Positions


@dataclass(frozen=True, slots=True)
class _Layer:
    """Some columns of a layer's K/V (1, H, n, D_h)."""

    keys: Tensor
    values: Tensor


class BlockWriter:
    """Stores rows of one wrapped decoder in blocks. Thread-safe.

    A `Writer` for K/V caches of layers that keep all columns, or a window of the last.
    """

    joins = True

    def __init__(self, blocks: Blocks) -> None:
        """Put blocks into the pool of `blocks`, and into its store."""
        self.size, self._blocks, self._pool = blocks.size, blocks, blocks.pool

    def store(self, call: Call, plan: Prefill, row: Row, states: Tensor) -> None:
        """Store the blocks of a row that are not held, with the trunk's output states (T, D).

        A row computed by itself, at its blocks' positions, is stored bit for bit. If held blocks of another request
        differ from it in the last bits, its tail begins before them.
        """
        pool, chain = self._pool, self._blocks.planned(call, plan, row)
        branch = plan.tree.branches.get(row.number) if plan.tree is not None else None
        if not plan.hands_out:
            chain = chain[: (0 if branch is None else branch.n_kept()) // pool.size]
        held = pool.match(chain)
        is_computed = branch is None and not plan.n_cut
        n_before = 0 if is_computed else len(held)
        made = self._make_blocks(call, plan, row, states, chain, n_before)
        new = {link.key: block for link, block in zip(chain[n_before:], made, strict=True)}
        if not plan.hands_out or (row.duplicate_key and branch is not None):
            if new:
                self._put(call, chain, new)
            return
        n_own = len(chain)
        if call.is_activated or (is_computed and row.start is not None and self._blocks.offset(row)):
            n_own = 0  # a tail after blocks may serve others; or these blocks have rotated keys
        elif is_computed:
            n_own = next((i for i, block in enumerate(held) if not block.is_equal(made[i])), n_own)
        tail = self._make_tail(call, plan, row, states, n_own * pool.size)
        first = pool.whole(row.key, row.ids) if row.duplicate_key else []
        if first and n_own == len(chain) and first[-1].is_equal(tail):
            return  # equal to a duplicate earlier in the call
        if n_own < len(chain):
            self._put(call, chain, new)
        link = Link(row.duplicate_key or row.key, tail.ids)
        if not self._put(call, (*chain[:n_own], link), {**new, link.key: tail}):
            self._blocks.wrapped.counters.too_large(1)

    def write(self, followed: Followed, is_all: bool) -> int:
        """Store the blocks of generated tokens; see `Writer`. The end of an answer has a key of its own."""
        call, row, size, n_tokens = followed.call, followed.row, self.size, followed.n_tokens
        is_current = self._pool.purges.is_current(call.scope.namespace, row.key, call.generation)
        if not (is_current and _has_columns(followed, followed.n_kept // size * size)):
            return n_tokens
        followed.states = [torch.cat(followed.states)]
        grown = replace(row, ids=followed.ids, n_valid=n_tokens)
        chain, made = [*self._blocks.chain(call.scope, grown)], dict[str, Block]()
        for number in range(followed.n_kept // size, len(chain)):
            slab = self._copy_followed(followed, number * size, (number + 1) * size)
            made[chain[number].key] = Block(chain[number].ids, call.scope, slab, 0, size)
        begin = len(chain) * size
        if is_all and chain and n_tokens > max(begin, row.n_valid):
            rest = replace(grown, ids=grown.ids[begin * row.id_width :], n_valid=n_tokens - begin)
            scope = replace(call.scope, attention=f"{call.scope.attention} after {chain[-1].key}")
            chain += links(scope, rest, rest.n_valid, 0)
            slab = self._copy_followed(followed, begin, n_tokens)
            made[chain[-1].key] = Block(rest.ids, call.scope, slab, 0, rest.n_valid)
        if made:
            self._put(call, chain, made)
        followed.states = [followed.states[0][-size:].clone()]
        return n_tokens if is_all else begin

    def detach(self, followed: Followed) -> None:
        """Copy the columns of a row that are in no full block, in place of its K/V cache."""
        begin = followed.n_kept // self.size * self.size
        if _has_columns(followed, begin):
            views = _columns(followed, begin, followed.n_tokens)
            followed.layers = [_Layer(one.keys.clone(), one.values.clone()) for one in views]
            followed.n_columns, followed.place = followed.column + followed.n_tokens, 0
            followed.look()

    def _put(self, call: Call, chain: Sequence[Link], made: Mapping[str, Block]) -> bool:
        """Put blocks of a chain into the pool and queue new ones for the store; return whether all are held."""
        known = {link.key for link in chain if link.key in self._pool}
        is_whole = self._pool.put(chain, made, call.generation)
        if (stored := self._blocks.stored) is not None:
            kinds = self._blocks.kinds
            kind = kinds.describe(call.kind) if kinds.knows(call.kind) else None
            for before, link in zip([None, *(link.key for link in chain)], chain, strict=False):
                # No other process looks for the end of an answer.
                is_looked_for = link.key in made and (made[link.key].is_tail or made[link.key].n_tokens == self.size)
                if is_looked_for and link.key not in known:
                    stored.put(call, link.key, made[link.key], before, kind)
        return is_whole

    def _make_blocks(
        self, call: Call, plan: Prefill, row: Row, states: Tensor, chain: Sequence[Link], n_before: int
    ) -> list[Block]:
        """Make the full blocks of a row after the first `n_before`, in slabs."""
        size, made = self.size, list[Block]()
        for first in range(n_before, len(chain), slab_blocks(size)):
            held = chain[first : first + slab_blocks(size)]
            slab = self._take(plan, row, states, first * size, (first + len(held)) * size)
            made += [Block(link.ids, call.blocks_scope, slab, i * size, (i + 1) * size) for i, link in enumerate(held)]
        return made

    def _make_tail(self, call: Call, plan: Prefill, row: Row, states: Tensor, n_before: int) -> Block:
        """Make the tail of a row after `n_before` tokens, with its padding if that is served as well."""
        layers, number = plan.kv_cache.layers, row.number
        if row.start is None:
            rest = self._copy(layers, number, row.valid, states[row.valid])
        else:
            rest = self._take(plan, row, states, n_before, row.n_valid, keeps_positions=n_before == 0)
        padding = {}
        if (row.has_layout or row.layout) and (plan.tree is None or number not in plan.tree.branches):
            places = padding_of(row.valid, len(states))
            taken = self._copy(layers, number, places, states[places])
            padding = dict(zip(NAMES, taken.cut(0, taken.n_tokens), strict=True))
        ids = row.ids[n_before * row.id_width :]
        return Block(ids, call.scope, rest, 0, rest.n_tokens, is_tail=True, padding=padding, layout=row.layout)

    def _take(
        self, plan: Prefill, row: Row, states: Tensor, begin: int, end: int, keeps_positions: bool = False
    ) -> Slab:
        """Copy tokens of a row, with keys at the positions of blocks, or with `keeps_positions` at those of the row."""
        branch, offset = plan.tree.branches.get(row.number) if plan.tree is not None else None, self._blocks.offset(row)
        if branch is None:
            columns = slice(row.first + begin, row.first + end)
            slab = self._copy(plan.kv_cache.layers, row.number, columns, states[columns])
            return slab if keeps_positions else self._blocks.rotate(slab, -offset)
        with torch.inference_mode(False), torch.no_grad():
            parts = branch.parts(begin, end)
            keys, values = (stack(parts, name, self._blocks.trunk.depth) for name in NAMES[:2])
            own = torch.cat([columns.states[:, first : first + n] for columns, first, n in parts], dim=1)
            slab = Slab(*(one.to(self._pool.device) for one in (keys, values, own)))
        return self._blocks.rotate(slab, offset) if keeps_positions else slab

    def _copy_followed(self, followed: Followed, begin: int, end: int) -> Slab:
        """Copy tokens from `begin` to before `end`, with keys at the positions of blocks."""
        (states,) = followed.states
        own = states[begin - followed.n_tokens : len(states) + end - followed.n_tokens]
        slab = self._copy(_columns(followed, begin, end), 0, slice(None), own)
        return self._blocks.rotate(slab, -self._blocks.offset(followed.row))

    def _copy(self, layers: Sequence[Any], place: int, columns: Positions, states: Tensor) -> Slab:
        """Copy a row's K/V at some columns, and its states there (n, D), to the pool's device, as normal tensors."""
        with torch.inference_mode(False), torch.no_grad():
            only = slice(place, place + 1)
            keys, values = (torch.cat([getattr(one, name)[only, :, columns] for one in layers]) for name in NAMES[:2])
            return Slab(*(one.to(self._pool.device) for one in (keys, values, states[None].clone())))


def _first(followed: Followed, layer: Any) -> int:
    """Return where a row's first token stands among the columns that a layer keeps; a window has left it: negative."""
    return followed.column - (followed.n_columns - int(layer.keys.shape[2]))


def _has_columns(followed: Followed, begin: int) -> bool:
    """Whether all layers keep a row's tokens from `begin` on."""
    return all(_first(followed, layer) + begin >= 0 for layer in followed.layers)


def _columns(followed: Followed, begin: int, end: int) -> list[_Layer]:
    """Return views of the K/V of a row's tokens from `begin` to before `end`, by layer."""
    only, views = slice(followed.place, followed.place + 1), []
    for layer in followed.layers:
        first = _first(followed, layer)
        where = only, slice(None), slice(first + begin, first + end)
        views.append(_Layer(layer.keys[where], layer.values[where]))
    return views
