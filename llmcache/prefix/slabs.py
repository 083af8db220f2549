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
        if block.slab is not None:
            self._keys.setdefault(block.slab, []).append(key)
            self._changed.add(block.slab)

    def remove(self, key: str, block: Block) -> None:
        """Note a block that is held no longer."""
        if block.slab is not None:
            self._keys[block.slab].remove(key)
            self._changed.add(block.slab)

    def settle(self) -> None:
        """Make slabs anew that hold more than the blocks that are held."""
        while self._changed:
            slab = next(iter(self._changed))
            keys = self._keys[slab]
            if sum(self._held[key].n_tokens for key in keys) < slab.n_tokens:
                self._lay(keys)
                del self._keys[slab]
            self._changed.remove(slab)

    def gather(self, before: Mapping[str, str], size: int) -> None:
        """Lay blocks of a size into slabs that lie in none, each after the one before it, as those of a file do."""
        groups: list[list[str]] = []
        going_on: dict[str, list[str]] = {}  # by the last block of each
        for key, block in self._held.items():
            if block.is_tail or block.slab is not None:
                continue
            group = going_on.pop(before.get(key, ""), [])
            if not group or len(group) >= slab_blocks(size):
                group = []
                groups.append(group)
            group.append(key)
            going_on[key] = group
        for group in groups:
            self._lay(group)

    def _lay(self, keys: Sequence[str]) -> None:
        """Lay blocks that follow one another side by side."""
        if keys:
            slab, laid = lay_together([self._held[key] for key in keys])
            self._held.update(zip(keys, laid, strict=True))
            self._keys[slab] = list(keys)
