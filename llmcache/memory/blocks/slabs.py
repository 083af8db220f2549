"""Records which blocks lie in which slab. A slab that lost blocks is rebuilt, so that counted bytes equal held bytes.

Blocks are evicted last to first, a few at a time. Slabs are small as each eviction copies the rest of the slab.
"""

from collections.abc import Mapping, Sequence

from llmcache.memory.blocks.block import Block, Slab, lay_together

SLAB_TOKENS = 128  # largest slab, unless one block is larger


def slab_blocks(size: int) -> int:
    """Return how many blocks of `size` tokens a slab holds at most."""
    return max(1, SLAB_TOKENS // size)


class Slabs:
    """The slabs of a pool's blocks. The pool holds the lock."""

    def __init__(self, held: dict[str, Block]) -> None:
        """Begin with no slabs. `held` are the pool's blocks by key; rebuilding a slab replaces its blocks there."""
        self._held = held
        self._keys: dict[Slab, list[str]] = {}  # keys of the blocks in each slab, first to last
        self._changed: set[Slab] = set()  # changed since the last `settle`

    def add(self, key: str, block: Block) -> None:
        self._keys.setdefault(block.slab, []).append(key)
        self._changed.add(block.slab)

    def remove(self, key: str, block: Block) -> None:
        self._keys[block.slab].remove(key)
        self._changed.add(block.slab)

    def settle(self) -> None:
        """Rebuild changed slabs that hold tokens of removed blocks."""
        while self._changed:
            slab = next(iter(self._changed))
            keys = self._keys[slab]
            if not keys or sum(self._held[key].n_tokens for key in keys) < slab.n_tokens:
                self._lay(keys)
                del self._keys[slab]
            self._changed.remove(slab)

    def gather(self, before: Mapping[str, str], size: int) -> None:
        """Join chains of blocks that have a slab each, as after loading a save, into shared slabs."""
        groups: list[list[str]] = []
        going_on: dict[str, list[str]] = {}  # groups by the key of their last block
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
        """Copy consecutive blocks into a new slab."""
        if keys:
            laid = lay_together([self._held[key] for key in keys])
            self._held.update(zip(keys, laid, strict=True))
            self._keys[laid[0].slab] = list(keys)
