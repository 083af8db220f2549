"""Reads and writes the blocks and tails of a pool in a store, by their keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.memory.blocks.block import Block, Link, lay_together
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.blocks.slabs import slab_blocks
from llmcache.memory.stores.seal import Opened
from llmcache.memory.stores.tier import Tier
from llmcache.request.rows import Row, Scope
from llmcache.reuse.call import Call


@dataclass(slots=True)
class Wanted:
    """The values to read for one row: blocks after those in memory, and tails that may end the row."""

    scope: Scope
    row: Row
    chain: Sequence[Link]  # all full blocks of the row
    n_held: int  # number of these that are in memory
    tails: Sequence[str]  # keys of possible tails, best first


class StoredBlocks:
    """Reads and writes the blocks of a pool in a store. Thread-safe."""

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        self.tier, self._pool = tier, pool

    def put(self, call: Call, key: str, block: Block, before: str | None, kind: Any) -> None:
        """Queue a block or tail to be written, with the key of the block before it and its call's output kind."""
        about = {"ids": block.ids.hex(), "layout": block.layout.hex(), "before": before, "kind": kind}
        self.tier.write(block.scope, block_name(key), block.tensors, about, call.epoch, call.since)

    def offer_again(self, call: Call, keys: Sequence[str], blocks: Sequence[Block], kind: Any) -> None:
        """Queue those blocks of a chain that serve this call and were dropped when they were first queued."""
        for before, key, block in zip([None, *keys], keys, blocks, strict=False):
            if self.tier.lacks(block.scope, block_name(key)):
                self.put(call, key, block, before, kind)

    def recall(self, wanted: Sequence[Wanted], generation: int) -> list[Any]:
        """Read the blocks and tails of rows in one read and put them into the pool; return the tails' output kinds."""
        asked = [[link.key for link in want.chain[want.n_held :]] + [*want.tails] for want in wanted]
        n_tokens = sum(want.row.n_valid - want.n_held * self._pool.size for want in wanted)
        names = [(want.scope, block_name(key)) for want, keys in zip(wanted, asked, strict=True) for key in keys]
        values = iter(self.tier.read(names, n_tokens))
        kinds = []
        for want, keys in zip(wanted, asked, strict=True):
            found = [next(values) for _ in keys]
            kinds += self._add_to_pool(want, found, generation)
        return kinds

    def _add_to_pool(self, wanted: Wanted, found: Sequence[Opened | None], generation: int) -> list[Any]:
        rest, scope, size = wanted.chain[wanted.n_held :], wanted.scope, self._pool.size
        blocks: list[Block] = []
        for link, value in zip(rest, found, strict=False):
            if value is None or value.about["ids"] != link.ids.hex():
                break
            blocks.append(self._block(scope, value, is_tail=False))
        n = slab_blocks(size)
        laid = [block for i in range(0, len(blocks), n) for block in lay_together(blocks[i : i + n])]
        held = wanted.chain[: wanted.n_held + len(laid)]
        made = {link.key: block for link, block in zip(held[wanted.n_held :], laid, strict=True)}
        self._pool.put(held, made, generation)
        ends = {None: 0} | {link.key: i + 1 for i, link in enumerate(held)}
        kinds = []
        for key, value in zip(wanted.tails, found[len(rest) :], strict=True):
            if value is None or (n_own := ends.get(value.about["before"])) is None:
                continue
            tail = self._block(scope, value, is_tail=True)
            if b"".join(link.ids for link in held[:n_own]) + tail.ids == wanted.row.ids:
                self._pool.put((*held[:n_own], Link(key, tail.ids)), {key: tail}, generation)
                kinds.append(value.about["kind"])
        return kinds

    def _block(self, scope: Scope, value: Opened, is_tail: bool) -> Block:
        tensors = {name: tensor.to(self._pool.device) for name, tensor in value.tensors.items()}
        ids, layout = bytes.fromhex(value.about["ids"]), bytes.fromhex(value.about["layout"])
        return Block.of(ids, scope, tensors, is_tail, layout)


def block_name(key: str) -> str:
    return f"b.{key}"
