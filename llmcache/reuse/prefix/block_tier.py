"""Blocks and tails as values of a store, under their own keys: what it has of a prompt joins the pool when it is asked.

Sizes: b tokens a block.
"""

from collections.abc import Iterable, Sequence

from llmcache.banks.kv import PADDING
from llmcache.banks.memory import adopt
from llmcache.banks.stores.seal import Opened
from llmcache.banks.tier import Tier
from llmcache.request.prefill import Link
from llmcache.request.rows import Row, Scope
from llmcache.reuse.prefix.block import NAMES, Block, lay_together
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.reuse.prefix.slabs import slab_blocks


class BlockTier:
    """What the prefix rung asks of a tier. Thread-safe."""

    def __init__(self, tier: Tier, pool: BlockPool) -> None:
        """Keep the blocks of a pool beyond memory."""
        self._tier = tier
        self._pool = pool
        pool.demote = self._demote
        pool.offer_again = self._offer_again
        pool.generation = self.generation

    def generation(self, scope: Scope) -> int:
        """Of a scope's namespace, that of what is put there from now on."""
        return self._tier.generation(scope.namespace)

    def put(self, key: str, block: Block, before: str | None, generation: int) -> None:
        """Have a block or tail written."""
        about = {"ids": block.ids.hex(), "layout": block.layout.hex(), "before": before}
        self._tier.put(block.scope, _name(key), block.tensors, about, generation)

    def promote(
        self, scope: Scope, row: Row, chain: Sequence[Link], generation: int, n_known: int, wants_tail: bool
    ) -> None:
        """Hold in memory what the store has of a request in a scope, as far as it pays to read that.

        Args:
            scope: The request's own, or one of a namespace that it may read.
            row: The request.
            chain: Its full blocks in that scope.
            generation: Of the scope's namespace, from before anything is read.
            n_known: Blocks of its beginning that are held in another scope.
            wants_tail: Whether it may be served as a whole.
        """
        pool, pays = self._pool, self._tier.break_even.pays
        n_before = pool.n_held(chain)
        n_known = max(n_known, n_before)
        rest, n_left = chain[n_before:], row.n_valid - n_known * pool.size
        wants_tail = wants_tail and row.key not in pool
        if not (len(chain) > n_known or wants_tail) or not pays(n_left):
            return
        n_held = self._tier.held(scope, [_name(link.key) for link in rest]) if rest else 0
        # Nothing follows a chain that is not held as a whole, but for a tail that begins within it.
        has_tail = wants_tail and self._tier.held(scope, [_name(row.key)]) == 1
        n_more = n_before + n_held - n_known
        n_tokens = n_left if has_tail and n_held == len(rest) else n_more * pool.size
        if not (n_more > 0 or has_tail) or not pays(n_tokens):
            return
        names = [link.key for link in rest[:n_held]] + [row.key] * has_tail
        values = self._tier.fetch(scope, [_name(name) for name in names], n_tokens)
        blocks = self._blocks(scope, rest[:n_held], values)
        held = chain[: n_before + len(blocks)]
        made = {link.key: block for link, block in zip(held[n_before:], blocks, strict=True)}
        pool.put(held, made, generation)
        if has_tail and len(blocks) == n_held and (value := next(values)) is not None:
            self._hold_tail(scope, row, held, value, generation)

    def _blocks(self, scope: Scope, links: Sequence[Link], opened: Iterable[Opened | None]) -> list[Block]:
        """Blocks of values, in slabs, up to the first that is missing."""
        found: list[Block] = []
        for link, value in zip(links, opened, strict=False):
            if value is None or value.about["ids"] != link.ids.hex():
                break
            keys, values, states = (value.tensors[name].to(self._pool.device) for name in NAMES)
            found.append(Block(link.ids, scope, keys, values, states))
        n = slab_blocks(self._pool.size)
        return [one for i in range(0, len(found), n) for one in lay_together(found[i : i + n])[1]]

    def _hold_tail(self, scope: Scope, row: Row, held: Sequence[Link], value: Opened, generation: int) -> None:
        """Hold a request as a whole, if its tail follows a block that is held."""
        about = value.about
        ends = {None: 0} | {link.key: i + 1 for i, link in enumerate(held)}
        n_own = ends.get(about["before"])
        if n_own is None or b"".join(link.ids for link in held[:n_own]) + bytes.fromhex(about["ids"]) != row.ids:
            return
        tensors = {name: adopt(tensor, self._pool.device) for name, tensor in value.tensors.items()}
        keys, values, states = (tensors.pop(name) for name in NAMES)
        padding = {name.removeprefix(PADDING): tensor for name, tensor in tensors.items()}
        ids, layout = bytes.fromhex(about["ids"]), bytes.fromhex(about["layout"])
        tail = Block(ids, scope, keys, values, states, is_tail=True, padding=padding, layout=layout)
        self._pool.put((*held[:n_own], Link(row.key, ids)), {row.key: tail}, generation)

    def _offer_again(self, used: Iterable[tuple[str, Block, str | None]]) -> None:
        """Have blocks written that were dropped when they were put."""
        if self._tier.has_dropped:
            for key, block, before in used:
                if self._tier.lacks(block.scope, _name(key)):
                    self._demote(key, block, before)

    def _demote(self, key: str, block: Block, before: str | None) -> None:
        """A block is about to leave memory, or was dropped."""
        self.put(key, block, before, self.generation(block.scope))


def _name(key: str) -> str:
    return f"b.{key}"
