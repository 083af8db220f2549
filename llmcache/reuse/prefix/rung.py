"""Puts stored prefixes into calls: fills the caller's K/V cache, cuts the arguments, completes the output.

The trunk then runs on the columns that are left, as it would in the second half of a prefill in two chunks; masks and
positions it makes itself. Rows of a batch are cut at one column, so the one with the shortest known prefix decides; of
a block that reaches beyond it, the first tokens are used. Columns in which a row has padding are cut only if the head
tells that it does not read them: `generate()` does, which asks for the last logits alone.

Rows that are held as a whole are handed to the exact rung. Where all rows of a call are, nothing is run at all; where
nothing is cut, such rows skip the layers, and their part of the trunk's output is put in at the end.

Sizes: B rows, T tokens a row (padding included), n valid ones, C columns cut, L layers, H K/V heads, D_h width of a
head, D hidden width, b tokens a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.arrays import Positions
from llmcache.counters import Counters
from llmcache.execution.old_call import Call, Reuse
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import BY_COLUMN, Arguments
from llmcache.models.hooks import are_hooked, parts_of
from llmcache.models.masks import cut
from llmcache.models.payloads import Payload, padding_of, place_padding
from llmcache.request.bypass import is_plain_cache
from llmcache.request.prefill import Link, Prefill
from llmcache.request.rows import Row
from llmcache.reuse.base import Passed, Rung
from llmcache.reuse.prefix.block import NAMES, Block, Slab, first_tokens, runs
from llmcache.reuse.prefix.block_hash import links
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.reuse.prefix.block_tier import BlockTier
from llmcache.reuse.prefix.kv_fill import Pieces, empty, fill, join, lay
from llmcache.reuse.prefix.slabs import slab_blocks

_OUTPUT = {"last_hidden_state", CACHE}  # what a trunk may put out: more might be made of all positions


@dataclass(eq=False)
class Prefix(Rung):
    """Serves the beginnings of one wrapped model's calls from stored prefixes. Thread-safe."""

    name = "prefix"
    is_lossless = True
    serves_calls = True

    trunk: Trunk
    payload: Payload
    blocks: BlockPool
    counters: Counters
    arguments: Arguments  # of the trunk
    read: Callable[[Call, torch.dtype], bool]  # reads rows before the layers, with the dtype that enters these
    is_repeat: Callable[[Row], bool]  # whether the exact rung has an entry of a row, so that no prefix is needed
    is_alone: Callable[[], bool]  # whether nothing is reused approximately, which needs all rows as they came
    keeps_requests: bool  # see `Prefill`
    tier: BlockTier | None  # what lies behind the memory of `blocks`
    _is_understood: bool = field(init=False, default=True)  # what the trunk puts out
    _is_grown: bool = field(init=False, default=False)  # layers of the trunk's K/V caches all hold all K/V

    def applies_at(self, layer: int) -> bool:
        return False

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        return []

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Serve the beginning of a call's rows, if it is known and the exact rung does not know all of them.

        The trunk is to be run on those of its columns that are left; the K/V cache is then filled with the others.
        After a failure, which is counted, the arguments are as they were and the cache is empty.
        """
        try:
            call.plan.prefill = prefill = self._prepare(call)
            if prefill is None:
                return args, kwargs
            args, kwargs = self.arguments.replace(args, kwargs, CACHE, prefill.kv_cache)
            started = perf_counter()
            if self.tier is not None:
                self._promote(self.tier, prefill, call.inputs.prefixes_from)
            whole = self._find(prefill)
            is_known = all(row.number in whole or self.is_repeat(row) for row in call.rows)
            if not is_known and all(prefill.fits(row) and not row.bypass_reason for row in call.rows):
                args, kwargs = self._cut(call, args, kwargs)
            if not prefill.served:
                repeats = (self._repeat(call.rows[number], *held) for number, held in whole.items())
                prefill.repeats = {reuse.row: reuse for reuse in repeats}
            call.progress.lookup_s += perf_counter() - started
        except BaseException as error:  # an interruption must not leave half a past either
            self.abandon(call)
            call.plan.prefill = None
            if not isinstance(error, Exception):
                raise
            self.counters.error("serve a prefix", error)
        return args, kwargs

    def complete(self, call: Call, output: Any) -> Any:
        """The trunk's output at all positions and of all rows, of a call whose trunk ran on some."""
        if call.plan.prefill is None:
            return output
        cut, repeats = call.plan.prefill.states, [reuse for reuse in call.plan.reused.values() if reuse.is_output]
        if cut is None and not repeats:
            return output
        call.progress.is_complete = False  # a call that fails here was not served
        whole = output[0].clone() if cut is None else join([*(piece.to(output[0].dtype) for piece in cut), output[0]])
        for reuse in repeats:
            hidden, valid = whole[reuse.row], call.rows[reuse.row].valid
            self.payload.place(reuse.entry.to(hidden.device), hidden, valid)
            place_padding(reuse.padding, hidden, valid)
        output = with_states(output, whole)
        call.progress.has_begun = call.progress.is_complete = True
        return output

    def abandon(self, call: Call) -> None:
        """Leave the caller an empty K/V cache: what was put there of a call that failed would be taken for a past."""
        if call.plan.prefill is not None and (call.plan.prefill.served or call.plan.reused):
            empty(call.plan.prefill.kv_cache)

    def store(self, call: Call, output: Any) -> None:
        """Keep blocks of rows that were computed, at least in part, and of others as a whole."""
        prefill = call.plan.prefill
        if prefill is None or not call.progress.may_store or output is None:
            return
        if prefill.n_purges != self.blocks.n_purges:  # it began with what was to be forgotten
            return
        states = last_states(output)
        self._is_understood = states is not None  # else no block is ever stored, and entries serve repeats
        if states is None:
            return
        with self.counters.guard("store a prefix"):
            for row in call.active_rows:
                # What was reused is stored already, or not this request's own.
                if row.number not in call.plan.reused and prefill.fits(row):
                    self._store(prefill, prefill.rows[row.number], states[row.number])

    def _prepare(self, call: Call) -> Prefill | None:
        """What a call has to do with blocks; None when it must not, or approximate reuse is asked as well."""
        passed = call.inputs.arguments
        if not (self._is_understood and self.is_alone()) or passed.get("token_type_ids") is not None:
            return None
        kv_cache = self._kv_cache(passed)
        if kv_cache is None or not is_plain_cache(kv_cache) or not _has_room(kv_cache, passed["input_ids"].shape[1]):
            return None
        if not self._can_be_cut(len(passed["input_ids"])):  # last of these: it looks at every module
            return None
        if not self.read(call, next(self.trunk.module.parameters()).dtype) or call.read.is_whole:
            return None
        n_purges = self.blocks.n_purges  # not before: what others purged in the store was forgotten just now
        return Prefill(kv_cache, call.read.scope, call.rows, call.read.generation, self.keeps_requests, n_purges)

    def _promote(self, tier: BlockTier, prefill: Prefill, shared: str | None) -> None:
        """Hold what the store has of a call's rows; where that fails, there is less to serve from."""
        with self.counters.guard("read blocks from the store"):
            for row in prefill.rows:
                if prefill.fits(row) and not row.bypass_reason:
                    own = self._chain(prefill, row)
                    tier.promote(prefill.scope, row, own, prefill.generation, 0, prefill.keeps_requests)
                    if shared is not None and shared != prefill.scope.namespace:
                        scope, n_own = replace(prefill.scope, namespace=shared), self.blocks.n_held(own)
                        chain, generation = self._chain(prefill, row, shared), tier.generation(scope)
                        tier.promote(scope, row, chain, generation, n_own, wants_tail=False)

    def _find(self, prefill: Prefill) -> dict[int, tuple[str, list[Block]]]:
        """Key and blocks of rows that are held as a whole, by number."""
        if not prefill.keeps_requests:
            return {}
        fitting = (row for row in prefill.rows if prefill.fits(row) and not row.bypass_reason)
        tried = ((row, key) for row in fitting for key in (row.key, row.again) if key)
        return {row.number: (key, held) for row, key in tried if (held := self.blocks.whole(key, row.ids))}

    def _repeat(self, row: Row, key: str, held: Sequence[Block]) -> Reuse:
        """What serves a row that is held as a whole, in tensors of its own."""
        tail = held[-1]
        keys, values, states = zip(*runs(held), strict=True)
        padding = tail.padding if tail.layout == row.layout else {}
        return Reuse(
            row.number,
            self.trunk.depth - 1,
            "exact",
            torch.cat(states, dim=-2)[0],
            _by_layer(keys, values),
            key,
            padding=padding["states"][0] if padding else None,
            padding_kv=_by_layer([padding["keys"]], [padding["values"]]) if padding else {},
            is_output=True,
        )

    def _reach(self, prefill: Prefill, row: Row, shared: str | None) -> tuple[list[Block], int]:
        """`BlockPool.reach` for a row, in its own namespace or, where that reaches further, in one that it may read."""
        own = self.blocks.reach(self._chain(prefill, row), row.ids, _id_width(row))
        if shared in (None, prefill.scope.namespace) or own[1] == row.n_valid:
            return own
        chain = self._chain(prefill, row, shared)
        return max(own, self.blocks.reach(chain, row.ids, _id_width(row)), key=lambda one: one[1])

    def _chain(self, prefill: Prefill, row: Row, shared: str | None = None) -> tuple[Link, ...]:
        """The full blocks of a row, in its own namespace or in one that it may read."""
        if (row.number, shared) not in prefill.chains:
            scope = prefill.scope if shared is None else replace(prefill.scope, namespace=shared)
            prefill.chains[row.number, shared] = links(scope, row, self.blocks.size)
        return prefill.chains[row.number, shared]

    def _can_be_cut(self, n_rows: int) -> bool:
        """Whether each token sees earlier ones only, and nobody hung hooks within the trunk, who expect all tokens."""
        trunk = self.trunk
        within = parts_of(trunk.module)
        sees_all = getattr(trunk.config, "is_causal", True) is False
        if sees_all or any(part.__dict__.get("is_causal") is False for part in within):
            return False
        is_watched = are_hooked(within)
        if is_watched:
            self.counters.hooked(n_rows)
        return not is_watched

    def _kv_cache(self, passed: Mapping[str, Any]) -> Any:
        """The cache that the trunk is to fill: the caller's, else one as the trunk would make it, or None."""
        config, use_cache = self.trunk.config, passed.get("use_cache")
        if passed.get(CACHE) is not None:
            return passed[CACHE]
        return self._new_cache(config) if (config.use_cache if use_cache is None else use_cache) else None

    def _new_cache(self, config: Any) -> Any:
        """A cache as the trunk would make it; without its config, which takes 0.3 ms to read, if that is no other."""
        from transformers import DynamicCache

        if self._is_grown:
            return DynamicCache()
        made = DynamicCache(config=config)
        self._is_grown = all(type(layer).__name__ == "DynamicLayer" for layer in made.layers)
        return made

    def _cut(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Fill the K/V cache with what is known, and take those columns off the arguments."""
        blocks, prefill, ids = self.blocks, call.plan.prefill, call.inputs.arguments["input_ids"]
        assert prefill is not None
        reached = [self._reach(prefill, row, call.inputs.prefixes_from) for row in call.rows]
        matched, n_known = zip(*reached, strict=True)
        n_cut = cut_column(call.rows, n_known, ids.shape[1])
        if call.inputs.n_read is None or n_cut > ids.shape[1] - call.inputs.n_read or are_hooked([self.trunk.module]):
            n_cut = min(n_cut, _first_padding(call.rows))  # what the model makes of padding is not known
        used = [max(0, min(n, n_cut - _first(row))) for row, n in zip(call.rows, n_known, strict=True)]
        if sum(used) < blocks.size:
            return args, kwargs
        prefill.served = {number: n for number, n in enumerate(used) if n}
        prefill.states = self._fill(call.rows, matched, prefill, n_cut, ids.device)
        for name in BY_COLUMN:
            if (value := self.arguments.get(args, kwargs, name)) is not None:
                args, kwargs = self.arguments.replace(args, kwargs, name, value[..., n_cut:])
        mask = self.arguments.get(args, kwargs, "attention_mask")
        if call.inputs.mask_4d is not None:  # a row a token that is run; a 2-D mask is wanted of all tokens
            args, kwargs = self.arguments.replace(args, kwargs, "attention_mask", cut(mask, n_cut))
        elif isinstance(mask, dict):  # one that was left out; beginning later, the trunk has to make it
            args, kwargs = self.arguments.replace(args, kwargs, "attention_mask", None)
        return args, kwargs

    def _fill(
        self, rows: Sequence[Row], matched: Sequence[list[Block]], prefill: Prefill, n_cut: int, device: torch.device
    ) -> Pieces:
        """Fill the K/V cache with C columns; returns their states, to be joined (B, C, D)."""
        held = {row: list(zip(*runs(first_tokens(matched[row], n)), strict=True)) for row, n in prefill.served.items()}
        columns = {row: slice(first := _first(rows[row]), first + n) for row, n in prefill.served.items()}
        keys, values, states = (
            lay({row: held[row][which] for row in held}, columns, (len(rows), n_cut), device) for which in range(3)
        )
        for layer, (of_keys, of_values) in enumerate(zip(keys, values, strict=True)):
            fill(prefill.kv_cache, layer, of_keys, of_values)
        return next(states)

    def _store(self, prefill: Prefill, row: Row, states: Tensor) -> None:
        """Keep what is not held of a row, of whose tokens the trunk put out these states (T, D).

        A row of a call that was computed in full is kept as it came out: blocks that are held of another request may
        differ in the last bits, and its tail then begins before them.
        """
        blocks, chain = self.blocks, self._chain(prefill, row)
        held = blocks.match(chain)
        is_whole = prefill.keeps_requests and not prefill.served  # where columns are cut, so is padding
        if not is_whole and len(held) == len(chain):
            return
        n_before = 0 if is_whole else len(held)
        made = self._make_blocks(prefill, row, states, n_before)
        new = {link.key: block for link, block in zip(chain[n_before:], made, strict=True)}
        if not is_whole:
            self._put(prefill, chain, new)
            return
        n_own = next((i for i, block in enumerate(held) if not block.is_equal(made[i])), len(chain))
        tail = self._make_tail(prefill, row, states, n_own * blocks.size)
        first = blocks.whole(row.key, row.ids) if row.again else []
        if first and n_own == len(chain) and first[-1].is_equal(tail):
            return  # came out as the same request before it in the call
        if n_own < len(chain):
            self._put(prefill, chain, new)
        link = Link(row.again or row.key, tail.ids)
        if not self._put(prefill, (*chain[:n_own], link), {**new, link.key: tail}):
            self.counters.too_large()

    def _put(self, prefill: Prefill, chain: Sequence[Link], new: Mapping[str, Block]) -> bool:
        """Hold blocks that were made of a chain, in memory and behind it; whether memory holds all of the chain."""
        if self.tier is not None:
            for i, link in enumerate(chain):
                if link.key in new:
                    before = chain[i - 1].key if i else None
                    self.tier.put(link.key, new[link.key], before, prefill.generation)
        return self.blocks.put(chain, new, prefill.generation)

    def _make_blocks(self, prefill: Prefill, row: Row, states: Tensor, n_before: int) -> list[Block]:
        """The full blocks of a row but the first, in slabs."""
        chain, size = self._chain(prefill, row), self.blocks.size
        made = []
        for first in range(n_before, len(chain), slab_blocks(size)):
            held = chain[first : first + slab_blocks(size)]
            begin = _first(row) + first * size
            slab = Slab(*self._take(prefill, row, states, slice(begin, begin + len(held) * size)))
            made += [slab.block(link.ids, prefill.scope, i * size, size) for i, link in enumerate(held)]
        return made

    def _make_tail(self, prefill: Prefill, row: Row, states: Tensor, n_before: int) -> Block:
        """What a row has after so many tokens, with its padding where that is to be served as well."""
        rest = self._take(prefill, row, states, slice(_first(row) + n_before, _valid(row).stop))
        padding = {}
        if row.has_layout or row.layout:
            taken = self._take(prefill, row, states, padding_of(row.valid, len(states)))
            padding = dict(zip(NAMES, taken, strict=True))
        ids = row.ids[n_before * _id_width(row) :]
        return Block(ids, prefill.scope, *rest, is_tail=True, padding=padding, layout=row.layout)

    def _take(self, prefill: Prefill, row: Row, states: Tensor, places: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """K/V and states of places of a row, copied, and fit to be kept."""
        layers, device = prefill.kv_cache.layers, self.blocks.device
        with torch.inference_mode(False), torch.no_grad():
            number = slice(row.number, row.number + 1)
            keys = torch.cat([layer.keys[number, :, places] for layer in layers])
            values = torch.cat([layer.values[number, :, places] for layer in layers])
            taken = states[None, places].clone()
            return keys.to(device), values.to(device), taken.to(device)


def cut_column(rows: Sequence[Row], n_known: Sequence[int], n_columns: int) -> int:
    """How many of T columns need not be run, given the first tokens known of each row; one is run in any case."""
    ends = (n_columns if n == row.n_valid else _first(row) + n for row, n in zip(rows, n_known, strict=True))
    return min(n_columns - 1, *ends)


def _first_padding(rows: Sequence[Row]) -> int:
    """The first column of a batch in which a row may have padding."""
    return min(row.valid.stop if _first(row) == 0 else 0 for row in rows if isinstance(row.valid, slice))


def _by_layer(keys: Pieces, values: Pieces) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V (H, n, D_h) by layer, copied from those of blocks (L, H, b, D_h)."""
    layers = (
        zip(*(piece.unbind(0) for piece in keys), strict=True),
        zip(*(piece.unbind(0) for piece in values), strict=True),
    )
    return {i: (torch.cat(k, dim=-2), torch.cat(v, dim=-2)) for i, (k, v) in enumerate(zip(*layers, strict=True))}


def _valid(row: Row) -> slice:
    assert isinstance(row.valid, slice)
    return row.valid


def _first(row: Row) -> int:
    """Column of the first valid token."""
    return int(_valid(row).start)


def _id_width(row: Row) -> int:
    """Bytes of a packed token id."""
    return len(row.ids) // row.n_valid


def _has_room(kv_cache: Any, n_columns: int) -> bool:
    """Whether a cache of fixed length can hold a call; what does not fit is left to the model to refuse."""
    limits = [int(layer.get_max_length()) for layer in kv_cache.layers]  # negative where there is none
    return all(limit < 0 or n_columns <= limit for limit in limits)


def last_states(output: Any) -> Tensor | None:
    """The last states (B, T, D) of a trunk that put out these, its K/V and nothing else; None of other outputs."""
    if isinstance(output, Mapping):
        return output["last_hidden_state"] if "last_hidden_state" in output and set(output) <= _OUTPUT else None
    return output[0] if isinstance(output, tuple) and 1 <= len(output) <= 2 else None


def with_states(output: Any, states: Tensor) -> Any:
    """Such an output with other last states (B, T, D)."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    output["last_hidden_state"] = states
    return output
