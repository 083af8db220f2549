"""The plan for a call of a decoder, and the blocks that its rows consist of.

Blocks hold keys at positions that count from 0 if the trunk's keys can be rotated, else from the first token's own.

Sizes: B rows, n tokens, C columns cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from llmcache.calls.stored_blocks import StoredBlocks
from llmcache.calls.tree import Part, Tree, cut_out
from llmcache.calls.wrapped import Wrapped
from llmcache.memory.blocks.block import Block, Link, Slab, links
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.models.output_formats import OutputFormats, name_of, type_of
from llmcache.models.rope import rotate
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call

Kind = tuple[type, tuple[str, ...], bool]  # see `Blocks.kinds`


@dataclass(slots=True)
class Prefill:
    """The plan for a call that keeps K/V, or for rows of a call that keeps none. Rows are named by number."""

    kv_cache: Any  # the caller's, which the call fills
    has_chains: bool  # its rows may share prefixes with other requests
    numbers: Sequence[int]  # its rows
    hands_out: bool = True  # its K/V is the caller's
    windowed: Any = None  # the caller's K/V cache if its layers keep windows; `kv_cache` keeps all columns
    chains: dict[tuple[int, str | None], tuple[Link, ...]] = field(default_factory=dict)  # and by namespace, None: own
    whole: Mapping[int, tuple[str, list[Block]]] = field(default_factory=dict)  # key and blocks of whole rows
    served_tokens: Mapping[int, int] = field(default_factory=dict)  # how many of a row are not computed for it
    matched: Sequence[Block] = ()  # the stored blocks that a single prompt begins with
    n_cut: int = 0  # C
    n_saved: int = 0  # tokens of all rows that are not computed for them; rows that are stored whole are left out
    n_known: dict[int, int] = field(default_factory=dict)  # tokens at the beginning of a row that are stored
    tree: Tree | None = None  # of rows that are neither whole nor computed apart
    missed: dict[int, str] = field(default_factory=dict)  # why a stored prefix does not serve, a key of `MISSES`

    @property
    def is_served(self) -> bool:
        """Whether not everything is computed as the caller asked."""
        return bool(self.whole or self.n_cut or self.tree is not None)

    def drop(self) -> None:
        """Have everything computed as the caller asked."""
        self.whole, self.served_tokens, self.n_cut, self.n_saved, self.tree = {}, {}, 0, 0, None


class Blocks:
    """The blocks of one wrapped decoder: which ones a row consists of, and at which positions their keys are."""

    def __init__(self, wrapped: Wrapped, pool: BlockPool, stored: StoredBlocks | None) -> None:
        """Divide rows into blocks as those of `pool`, which is behind it the store `stored`."""
        self.wrapped, self.pool, self.stored, self.size = wrapped, pool, stored, pool.size
        self.trunk, self.causal = wrapped.trunk, wrapped.causal
        #: By kind of call: class and field names of its output, and whether the trunk was seen to make a plain
        #: `DynamicCache`; None if the output is not understood.
        self.kinds = OutputFormats[Kind](lambda known: [name_of(known[0]), *known[1:]], _read_kind)

    def origin(self, row: Row) -> int:
        """Return the position of a row's first token in blocks and in the tree."""
        return 0 if self.causal.rotates else row.start or 0

    def offset(self, row: Row) -> int:
        """Return how many positions later a row stands than in blocks."""
        return (row.start or 0) - self.origin(row)

    def chain(self, scope: Scope, row: Row) -> tuple[Link, ...]:
        """Return the full blocks of a row."""
        return links(scope, row, self.size, self.origin(row))

    def planned(self, call: Call, plan: Prefill, row: Row, shared: str | None = None) -> tuple[Link, ...]:
        """Return the full blocks of a planned row, in its namespace or in the namespace `shared`; () if it has none."""
        if not plan.has_chains or row.start is None:  # gaps between tokens, or positions that are not consecutive
            return ()
        if (row.number, shared) not in plan.chains:
            scope = call.blocks_scope if shared is None else replace(call.blocks_scope, namespace=shared)
            plan.chains[row.number, shared] = self.chain(scope, row)
        return plan.chains[row.number, shared]

    def rotate(self, slab: Slab, offset: int) -> Slab:
        """Return a slab with its keys at positions that are larger by `offset`."""
        if not offset:
            return slab
        with torch.inference_mode(False), torch.no_grad():
            offsets = torch.full((1, slab.n_tokens), offset, device=slab.keys.device)
            keys = rotate(slab.keys, offsets, self.trunk.module, self.causal.rotates)
        return Slab(keys, slab.values, slab.states)


def between(blocks: Sequence[Block], begin: int, end: int) -> list[Part]:
    """Return the tokens of consecutive blocks from `begin` to before `end`."""
    return cut_out(((block.slab, block.begin, block.n_tokens) for block in blocks), begin, end)


def _read_kind(described: Any) -> Kind | None:
    name, names, *is_own_known = described
    found = type_of(name) if is_own_known else None  # without: made before the K/V was checked
    is_output = found is not None and (found is tuple or issubclass(found, ModelOutput))
    return (found, tuple(names), *is_own_known) if found is not None and is_output else None
