"""Serves calls that keep K/V from blocks of tokens: whole requests and known prefixes.

If the rows of a call have known prefixes, the trunk runs on the remaining columns only, like the second chunk of a
chunked prefill; it makes masks and positions itself. All rows of a batch are cut at the same column, so the row with
the shortest known prefix decides; a block that reaches beyond the cut is used in part. Columns in which a row has
padding are cut only if the head does not read them: `generate()` reads the last logits only.

Sizes: B rows, T tokens per row (padding included), n valid tokens, C columns cut, L layers, H K/V heads, D_h width of
a head, D hidden width, b tokens per block.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils.generic import ModelOutput

from llmcache.calls.chunks import Chunks
from llmcache.calls.kv_fill import Pieces, empty, fill, is_by_column, join, last_states, lay, put, with_states
from llmcache.calls.stored_blocks import StoredBlocks, Wanted, block_name
from llmcache.calls.stored_entries import entry_name
from llmcache.calls.wrapped import Wrapped
from llmcache.engines.engine import Eager
from llmcache.memory.blocks.block import NAMES, Block, Link, Slab, first_tokens, links, runs
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.blocks.slabs import slab_blocks
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import BY_COLUMN, DECIDING, Arguments
from llmcache.models.hooks import are_hooked
from llmcache.models.masks import cut
from llmcache.models.output_formats import OutputFormats, name_of, type_of
from llmcache.models.packing import STATES, padding_of, parts_of
from llmcache.request.bypass import find_reason_of_cache
from llmcache.request.outcome import Outcome
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call, Path
from llmcache.support.arrays import Positions
from llmcache.support.context import scoped

#: Runs the trunk with positional and keyword arguments.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
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
    ) -> None:
        """Serve from `blocks` and from the store `stored`, and run what is left in `chunks`, if any, by `eager`."""
        config, trunk = wrapped.config, wrapped.trunk
        self._causal = wrapped.causal
        self._cuts = config.prefix is not None and self._causal.cuts
        self._stored, self._is_exact, self._counters = stored, config.serves_exact, wrapped.counters
        self._trunk, self.blocks, self._arguments, self._eager = trunk, blocks, arguments, eager
        self.depth = trunk.depth
        self._chunks = chunks
        #: By kind of call: class and field names of its output, and whether the trunk was seen to make a plain
        #: `DynamicCache`; None if the output is not understood.
        self.kinds = OutputFormats[Kind](lambda known: [name_of(known[0]), *known[1:]], _read_kind)

    # -- open ----------------------------------------------------------------------------------------------------------

    def open(self, call: Call) -> "Prefill | str":
        """Return the path of a call that keeps K/V, or the reason for a bypass."""
        passed = call.arguments
        kv_cache = passed.get(CACHE)
        if kv_cache is None:
            kv_cache = self._new_cache(call)
            reason = call.state.kv_refusals.get(False)
        else:
            reason = call.state.kv_refusals.get(True) or find_reason_of_cache(kv_cache)
            if not (reason or _has_room(kv_cache, passed["input_ids"].shape[1])):
                reason = "kv_cache_kind"
        if reason:
            return reason
        if passed.get("token_type_ids") is not None:
            return "token_types"
        if self.kinds.get(call.kind, ()) is None:
            return "more_output"
        is_as_wrapped = call.causal == self._causal
        has_chains = is_as_wrapped and not (call.is_activated or call.is_coupled or call.state.sees_later)
        return Prefill(self, kv_cache, has_chains)

    def _new_cache(self, call: Call) -> DynamicCache | None:
        """Make a K/V cache like the trunk does if it is passed none; None: it makes another kind, or none was seen."""
        refusals = call.state.kv_refusals
        if False not in refusals:
            if call.causal.makes_dynamic_cache:
                refusals[False] = find_reason_of_cache(DynamicCache(config=self._trunk.config))
            elif self.kinds.knows(call.kind) and (known := self.kinds[call.kind]) and known[2]:
                refusals[False] = ""
        return DynamicCache() if refusals.get(False) == "" else None

    # -- look up -------------------------------------------------------------------------------------------------------

    def look_up(self, call: Call, prefill: "Prefill") -> None:
        """Find rows that are held in full, or else how many columns need not be run."""
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
            prefill.whole = {row.number: (key, held) for row, key in tried if (held := self.blocks.whole(key, row.ids))}
        if self._stored is not None and self._stored.tier.has_dropped:
            for number, (key, held) in prefill.whole.items():
                keys = [link.key for link in self._chain(call, prefill, call.rows[number])[: len(held) - 1]]
                self._stored.offer_again(call, [*keys, key], held, self.kinds.describe(call.kind))
        if len(prefill.whole) == len(call.rows):
            return
        if call.is_coupled:
            prefill.whole = {}
        is_mixed = any(row.bypass_reason or row.start is None for row in call.rows)
        if self._cuts and prefill.has_chains and not is_mixed:
            self._find_cut(call, prefill)
        else:
            known = [row for row in call.rows if self.blocks.n_held(self._chain(call, prefill, row))]
            prefill.missed = {row.number: "batch" if self._cuts else "whole_prompts" for row in known}
        if prefill.served_tokens:
            prefill.whole = {}

    def _recall(self, call: Call, prefill: "Prefill", stored: StoredBlocks) -> None:
        """Read blocks from the store for rows that are not held in full.

        Looks in the call's own namespace (None) for blocks and tails, in the namespace that it shares for blocks alone.
        """
        shared = {None, call.prefixes_from} - {call.scope.namespace}
        wanted = []
        for row in call.rows:
            tails = [key for key in (row.duplicate_key, row.key) if key]
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

    def holds(self, row: Row, scope: Scope) -> bool:
        """Whether the first block of a request is held."""
        return bool(row.start is not None and row.n_valid and self.blocks.n_held(links(scope, row, self.blocks.size)))

    def keys_of(self, call: Call, prefill: "Prefill") -> list[str]:
        """Return the keys of all blocks and tails that may have served a call."""
        rows = [row for row in call.rows if not row.bypass_reason]
        chains = [link.key for row in rows for link in self._chain(call, prefill, row)]
        return [*chains, *(key for row in rows for key in (row.key, row.duplicate_key) if key)]

    def _find_cut(self, call: Call, prefill: "Prefill") -> None:
        ids = call.arguments["input_ids"]
        reached = [self._reach(call, prefill, row) for row in call.rows]
        prefill.matched, n_known = zip(*reached, strict=True)
        n_cut = n_free = cut_column(call.rows, n_known, ids.shape[1])
        if call.n_read is None or n_cut > ids.shape[1] - call.n_read or are_hooked([self._trunk.module]):
            n_cut = min(n_cut, _first_padding(call.rows))  # the states at padding are unknown

        def used(n_cut: int) -> list[int]:
            return [max(0, min(n, n_cut - _first(row))) for row, n in zip(call.rows, n_known, strict=True)]

        if sum(served := used(n_cut)) >= self.blocks.size:
            prefill.n_cut = n_cut
            prefill.served_tokens = {number: n for number, n in enumerate(served) if n}
        elif (is_padded := sum(used(n_free)) >= self.blocks.size) or len(n_known) > 1:
            why = "padding" if is_padded else "batch"
            prefill.missed = {number: why for number, n in enumerate(n_known) if n >= self.blocks.size}

    def _reach(self, call: Call, prefill: "Prefill", row: Row) -> tuple[list[Block], int]:
        """Return `BlockPool.reach` of a row in its namespace, or in `call.prefixes_from` if that reaches further."""
        shared = call.prefixes_from
        own = self.blocks.reach(self._chain(call, prefill, row), row.ids, _id_width(row))
        if shared in (None, call.scope.namespace) or own[1] == row.n_valid:
            return own
        chain = self._chain(call, prefill, row, shared)
        return max(own, self.blocks.reach(chain, row.ids, _id_width(row)), key=lambda reached: reached[1])

    def _chain(self, call: Call, prefill: "Prefill", row: Row, shared: str | None = None) -> tuple[Link, ...]:
        """Return the full blocks of a row, in its namespace or in the namespace `shared`."""
        if not prefill.has_chains or row.start is None:  # gaps between tokens, or positions that are not consecutive
            return ()
        if (row.number, shared) not in prefill.chains:
            scope = call.scope if shared is None else replace(call.scope, namespace=shared)
            prefill.chains[row.number, shared] = links(scope, row, self.blocks.size)
        return prefill.chains[row.number, shared]

    # -- answer --------------------------------------------------------------------------------------------------------

    def answer(self, call: Call, prefill: "Prefill") -> Any:
        """Return the trunk's output after `look_up`, and fill the caller's K/V cache. On an error that is emptied.

        Within `chunked`, the trunk is run in chunks. Errors raised between chunks are raised here.
        """
        started, chunks, run = perf_counter(), self._chunks.get(), partial(self._run, call, prefill)
        try:
            return self._answer(call, prefill, run)
        except Exception as error:  # if it is the model's, the second run below raises it again
            if not (prefill.whole or prefill.served_tokens) or (chunks is not None and chunks.error is error):
                raise
            prefill.drop(call)
            self._counters.error("serve a prefix", error)
            return self._answer(call, prefill, run)
        finally:
            call.computing_s = perf_counter() - started

    def _run(self, call: Call, prefill: "Prefill", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chunks = self._chunks.get()
        if chunks is None or call.is_activated or not chunks.fit(self._arguments, args, kwargs):
            return call.engine.run(args, kwargs, [row for row in call.rows if row.number not in prefill.whole])
        with scoped(self._chunks, None):  # `between` may call this model: do not chunk those calls
            return chunks.run(self._eager, self._arguments, args, kwargs)

    def _answer(self, call: Call, prefill: "Prefill", run: Run) -> Any:
        kind = self.kinds.get(call.kind)
        args, kwargs = call.args, call.kwargs
        if prefill.kv_cache is not None:
            args, kwargs = self._arguments.replace(args, kwargs, CACHE, prefill.kv_cache)
        try:
            if prefill.whole and kind is not None:
                return self._answer_whole(call, prefill, kind, run)
            prefill.whole = {}
            if not prefill.served_tokens:
                return run(args, kwargs)
            states = self._fill(call, prefill, call.arguments["input_ids"].device)
            output = run(*self._cut(call, prefill.n_cut, args, kwargs))
            whole = join([*(piece.to(output[0].dtype) for piece in states), output[0]])
            return with_states(output, whole)
        except BaseException:
            if prefill.whole or prefill.served_tokens:
                empty(prefill.kv_cache)
            raise

    def _cut(
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

    def _fill(self, call: Call, prefill: "Prefill", device: torch.device) -> Pieces:
        """Fill the K/V cache with C columns; return their states as pieces of (B, C, D)."""
        rows = call.rows
        held = {
            row: list(zip(*runs(first_tokens(prefill.matched[row], n)), strict=True))
            for row, n in prefill.served_tokens.items()
        }
        columns = {row: slice(first := _first(rows[row]), first + n) for row, n in prefill.served_tokens.items()}
        keys, values, states = (
            lay({row: held[row][which] for row in held}, columns, (len(rows), prefill.n_cut), device)
            for which in range(3)
        )
        for layer, (of_keys, of_values) in enumerate(zip(keys, values, strict=True)):
            fill(prefill.kv_cache, layer, of_keys, of_values)
        return next(states)

    def _answer_whole(self, call: Call, prefill: "Prefill", kind: Kind, run: Run) -> Any:
        """Return the output of a call with rows that are held in full; the trunk runs on the other rows."""
        ids = call.arguments["input_ids"]
        n_rows, n_tokens = ids.shape
        rest = [row.number for row in call.rows if row.number not in prefill.whole]
        output, kv_cache = self._run_rows(call, rest, run) if rest else (None, None)
        held = {number: _gather(blocks) for number, (_, blocks) in prefill.whole.items()}

        def lay_rows(name: str, layer: int, computed: Any) -> Tensor:
            """Return a tensor of all rows (B, ..., T, D), from held rows and from `computed` for the others."""
            own = {number: pieces[name][layer] for number, pieces in held.items()}
            like = next(iter(own.values()))
            laid = like.new_zeros((n_rows, *like.shape[:-2], n_tokens, like.shape[-1]), device=ids.device)
            if rest:
                laid[rest] = computed
            for number, tensor in own.items():
                row, tail = call.rows[number], prefill.whole[number][1][-1]
                valid = row.valid if isinstance(row.valid, slice) else torch.from_numpy(row.valid)
                laid[number][..., valid, :] = tensor.to(ids.device)
                if tail.padding and tail.layout == row.layout:
                    padding = torch.from_numpy(padding_of(row.valid, n_tokens))
                    laid[number][..., padding, :] = tail.padding[name][layer].to(ids.device)
            return laid

        states = lay_rows("states", 0, None if output is None else output[0])
        for layer in range(self._trunk.depth):
            keys, values = (
                lay_rows(name, layer, None if kv_cache is None else getattr(kv_cache.layers[layer], name))
                for name in ("keys", "values")
            )
            put(prefill.kv_cache, layer, keys, values)
        of, names, _ = kind
        made = {name: states if name == STATES else prefill.kv_cache for name in names}
        return tuple(made.values()) if of is tuple else of(**made)

    def _run_rows(self, call: Call, rows: Sequence[int], run: Run) -> tuple[Any, Any]:
        """Run the trunk on some rows; return its output and the K/V cache that it filled."""
        index, kv_cache = torch.tensor(rows, device=call.arguments["input_ids"].device), DynamicCache()
        args, kwargs = self._arguments.replace(call.args, call.kwargs, CACHE, kv_cache)
        for name in DECIDING:  # a 4-D mask fits the caller's K/V cache; the 2-D mask used here is equivalent
            value = call.arguments.get(name)
            if value is not None:
                value = value.index_select(0, index) if len(value) == len(call.arguments["input_ids"]) else value
                args, kwargs = self._arguments.replace(args, kwargs, name, value)
            elif name == "attention_mask":
                args, kwargs = self._arguments.replace(args, kwargs, name, None)
        return run(args, kwargs), kv_cache

    # -- store ---------------------------------------------------------------------------------------------------------

    def store(self, call: Call, prefill: "Prefill", output: Any) -> str | None:
        """Store blocks of computed rows; return the bypass reason if its output or K/V is not understood."""
        state, states = call.state, last_states(output)
        names = (STATES, CACHE)[: len(output)] if isinstance(output, tuple) else tuple(output)
        if states is None:
            self.kinds.learn(call.kind, None)
            return "more_output"
        reason = state.kv_refusals[call.arguments.get(CACHE) is not None] = self._check_kv(
            call, prefill, output, states
        )
        if reason:
            return reason
        self.kinds.learn(call.kind, (type(output), names, state.kv_refusals.get(False) == ""))
        for row in call.rows:
            if row.number not in prefill.whole and not row.bypass_reason:
                self._store(call, prefill, row, states[row.number])
        return None

    def _check_kv(self, call: Call, prefill: "Prefill", output: Any, states: Tensor) -> str:
        """Take the K/V cache that the trunk returned; return why it cannot be kept with these states, "" if it can."""
        parts = parts_of(output)
        kv_cache = prefill.kv_cache = parts.get(CACHE, parts.get(1, prefill.kv_cache))
        if reason := find_reason_of_cache(kv_cache):
            return reason
        is_alike = states.shape[:2] == call.arguments["input_ids"].shape
        return "" if is_alike and is_by_column(kv_cache, states, self._trunk.depth) else "kv_layout"

    def _put(self, call: Call, prefill: "Prefill", chain: Sequence[Link], made: Mapping[str, Block]) -> bool:
        """Put blocks of a chain into the pool and queue new ones for the store; return whether all are held."""
        known = {link.key for link in chain if link.key in self.blocks}
        is_whole = self.blocks.put(chain, made, call.generation)
        if self._stored is not None:
            kind = self.kinds.describe(call.kind)
            for before, link in zip([None, *(link.key for link in chain)], chain, strict=False):
                if link.key in made and link.key not in known:
                    self._stored.put(call, link.key, made[link.key], before, kind)
        return is_whole

    def _store(self, call: Call, prefill: "Prefill", row: Row, states: Tensor) -> None:
        """Store the blocks of a row that are not held, with the trunk's output states (T, D).

        A row computed in full is stored bit for bit. If held blocks of another request differ from it in the last
        bits, its tail begins before them.
        """
        blocks, chain = self.blocks, self._chain(call, prefill, row)
        held = blocks.match(chain)
        is_whole = not prefill.served_tokens  # a cut call has no states at padding
        if not is_whole and len(held) == len(chain):
            return
        n_before = 0 if is_whole else len(held)
        made = self._make_blocks(call, prefill, row, states, n_before)
        new = {link.key: block for link, block in zip(chain[n_before:], made, strict=True)}
        if not is_whole:
            self._put(call, prefill, chain, new)
            return
        n_own = next((i for i, block in enumerate(held) if not block.is_equal(made[i])), len(chain))
        tail = self._make_tail(call, prefill, row, states, n_own * blocks.size)
        first = blocks.whole(row.key, row.ids) if row.duplicate_key else []
        if first and n_own == len(chain) and first[-1].is_equal(tail):
            return  # equal to a duplicate earlier in the call
        if n_own < len(chain):
            self._put(call, prefill, chain, new)
        link = Link(row.duplicate_key or row.key, tail.ids)
        if not self._put(call, prefill, (*chain[:n_own], link), {**new, link.key: tail}):
            self._counters.too_large(1)

    def _make_blocks(self, call: Call, prefill: "Prefill", row: Row, states: Tensor, n_before: int) -> list[Block]:
        """Make the full blocks of a row after the first `n_before`, in slabs."""
        chain, size = self._chain(call, prefill, row), self.blocks.size
        made = []
        for first in range(n_before, len(chain), slab_blocks(size)):
            held = chain[first : first + slab_blocks(size)]
            begin = _first(row) + first * size
            slab = self._take(prefill, row, states, slice(begin, begin + len(held) * size))
            made += [Block(link.ids, call.scope, slab, i * size, (i + 1) * size) for i, link in enumerate(held)]
        return made

    def _make_tail(self, call: Call, prefill: "Prefill", row: Row, states: Tensor, n_before: int) -> Block:
        """Make the tail of a row after `n_before` tokens, with its padding if that is served as well."""
        places = row.valid if row.start is None else slice(_first(row) + n_before, _valid(row).stop)
        rest = self._take(prefill, row, states, places)
        padding = {}
        if row.has_layout or row.layout:
            taken = self._take(prefill, row, states, padding_of(row.valid, len(states)))
            padding = dict(zip(NAMES, taken.cut(0, taken.n_tokens), strict=True))
        ids = row.ids[n_before * _id_width(row) :]
        return Block(ids, call.scope, rest, 0, rest.n_tokens, is_tail=True, padding=padding, layout=row.layout)

    def _take(self, prefill: "Prefill", row: Row, states: Tensor, places: Positions) -> Slab:
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
    """The path of one call that keeps K/V. Rows are named by their number."""

    prefix: Prefix  # serves and stores it
    kv_cache: Any  # the caller's, which the call fills
    has_chains: bool  # its rows may share prefixes with other requests
    chains: dict[tuple[int, str | None], tuple[Link, ...]] = field(default_factory=dict)  # and by namespace, None: own
    whole: Mapping[int, tuple[str, Any]] = field(default_factory=dict)  # key and blocks of rows that are stored whole
    served_tokens: Mapping[int, int] = field(default_factory=dict)  # how many a stored prefix serves; `whole` is empty
    matched: Sequence[Any] = ()  # the stored blocks that each row begins with
    n_cut: int = 0  # C
    missed: Mapping[int, str] = field(default_factory=dict)  # why a stored prefix does not serve, a key of `MISSES`
    keeps_kv = True

    def look_up(self, call: Call) -> None:
        self.prefix.look_up(call, self)

    def served(self, call: Call) -> Collection[int]:
        return self.whole.keys()

    def drop(self, call: Call) -> None:
        self.whole, self.served_tokens = {}, {}

    def answer(self, call: Call) -> Any:
        return self.prefix.answer(call, self)

    def store(self, call: Call, output: Any) -> str | None:
        return self.prefix.store(call, self, output)

    def outcome(self, call: Call, row: Row) -> Outcome:
        if row.bypass_reason:
            return Outcome(row.key, bypassed=row.bypass_reason)
        if row.number in self.whole:
            return Outcome(row.key, "exact", self.prefix.depth - 1, self.whole[row.number][0], 1.0)
        if n_prefix := self.served_tokens.get(row.number, 0):
            return Outcome(row.key, "prefix", n_prefix=n_prefix)
        return Outcome(row.key, missed="coupled" if call.is_coupled else self.missed.get(row.number))

    def names(self, call: Call) -> list[str]:
        keys = [row.key for row in call.rows if row.key]
        return [*map(entry_name, keys), *map(block_name, self.prefix.keys_of(call, self))]

    def n_computed(self, call: Call) -> int:
        return self.n_prompt(call) - sum(self.served_tokens.values())

    def n_prompt(self, call: Call) -> int:
        return sum(row.n_valid for row in call.rows if row.number not in self.whole)


def _read_kind(described: Any) -> Kind | None:
    name, names, *is_own_known = described
    found = type_of(name) if is_own_known else None  # without: made before the K/V was checked
    is_output = found is not None and (found is tuple or issubclass(found, ModelOutput))
    return (found, tuple(names), *is_own_known) if found is not None and is_output else None


def cut_column(rows: Sequence[Row], n_known: Sequence[int], n_columns: int) -> int:
    """Return how many of T columns need not be run, given the known tokens of each row; at least one must run."""
    ends = (n_columns if n == row.n_valid else _first(row) + n for row, n in zip(rows, n_known, strict=True))
    return min(n_columns - 1, *ends)


def _gather(blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Join consecutive blocks; return `keys`, `values` (L, H, n, D_h) and `states` (1, n, D)."""
    return dict(zip(NAMES, (torch.cat(pieces, dim=-2) for pieces in zip(*runs(blocks), strict=True)), strict=True))


def _first_padding(rows: Sequence[Row]) -> int:
    """Return the first column of a batch in which a row may have padding."""
    return min(row.valid.stop if _first(row) == 0 else 0 for row in rows if isinstance(row.valid, slice))


def _valid(row: Row) -> slice:
    assert isinstance(row.valid, slice)
    return row.valid


def _first(row: Row) -> int:
    """Return the column of the first valid token."""
    return int(_valid(row).start)


def _id_width(row: Row) -> int:
    """Return the bytes per packed token id."""
    return len(row.ids) // row.n_valid


def _has_room(kv_cache: Any, n_columns: int) -> bool:
    """Whether a K/V cache of fixed length can hold a call; if not, the model raises the error."""
    limits = [int(layer.get_max_length()) for layer in kv_cache.layers]  # negative if there is no limit
    return all(limit < 0 or n_columns <= limit for limit in limits)
