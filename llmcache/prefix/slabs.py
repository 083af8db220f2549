"""Which blocks lie in which slab. One that some of its blocks have left is made anew, so that bytes counted are held.

Blocks leave last to first, a few at a time. So a slab is small: with all blocks of a prompt in one, each that leaves
would have all others copied.
"""

from collections.abc import Mapping, Sequence

from llmcache.prefix.block import Block, Slab, lay_together

SLAB_TOKENS = 128  # at most, where a block has no more


def slab_blocks(size: int) -> int:
    """Blocks of so many tokens that a slab holds at most."""
    return max(1, SLAB_TOKENS // size)


class Slabs:
    """Slabs of the blocks that a pool holds, which has the lock."""

    def __init__(self, held: dict[str, Block]) -> None:
        """Begin with none; `held`, the pool's blocks by key, are replaced where slabs are made anew."""
        self._held = held
        self._keys: dict[Slab, list[str]] = {}  # of the blocks that lie in each, first to last
        self._changed: set[Slab] = set()  # since they were last seen to

    def add(self, key: str, block: Block) -> None:
        """Note a block that is held from now on."""
        self._keys.setdefault(block.slab, []).append(key)
        self._changed.add(block.slab)

    def remove(self, key: str, block: Block) -> None:
        """Note a block that is held no longer."""
        self._keys[block.slab].remove(key)
        self._changed.add(block.slab)

    def settle(self) -> None:
        """Make slabs anew that hold more than the blocks that are held."""
        while self._changed:
            slab = next(iter(self._changed))
            keys = self._keys[slab]
            if not keys or sum(self._held[key].n_tokens for key in keys) < slab.n_tokens:
                self._lay(keys)
                del self._keys[slab]
            self._changed.remove(slab)

    def gather(self, before: Mapping[str, str], size: int) -> None:
        """Lay blocks that lie alone, as those of a save do, side by side, each after the one before it."""
        groups: list[list[str]] = []
        going_on: dict[str, list[str]] = {}  # by the last block of each
        for key, block in self._held.items():
            if block.is_tail or block.slab.n_tokens > size:
                continue
            group = going_on.pop(before.get(key, ""), [])
            if not group or len(group) >= slab_blocks(size):
                group = []
                groups.append(group)
            group.append(key)
            going_on[key] = group
        for group in groups:
            if len(group) > 1:
                alone = [self._held[key].slab for key in group]
                self._lay(group)
                for slab in alone:
                    del self._keys[slab]

    def _lay(self, keys: Sequence[str]) -> None:
        """Lay blocks that follow one another side by side."""
        if keys:
            laid = lay_together([self._held[key] for key in keys])
            self._held.update(zip(keys, laid, strict=True))
            self._keys[laid[0].slab] = list(keys)
