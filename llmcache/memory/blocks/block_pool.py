"""Blocks of tokens with their K/V and last hidden states, within a budget of bytes.

A request computed in full is held as its full blocks and a tail with the remaining tokens. So requests share their
common prefix, and each is held once. A tail may be empty: it then records that a request ends after a block and that
its output equals the blocks.

A block keeps the K/V of each layer, not the layers' inputs, from which one projection would rebuild K/V (HCache, arXiv
2410.05004): stored K/V are bit-exact, need no norm, projection and rotation, which each family implements differently,
and are no larger with half as many K/V heads as query heads. Its last states serve callers that expect the output at
every position.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from llmcache.memory.blocks.block import Block, Link, common_prefix
from llmcache.memory.blocks.slabs import Slabs
from llmcache.memory.policies.base import Policy
from llmcache.memory.policies.shares import Shares
from llmcache.memory.purges import Purges
from llmcache.request.rows import Scope
from llmcache.support.stacks import pack, unpack
from llmcache.support.threads import forkable

_MOST_LOOKED_AT = 64  # successors of a block that are compared, newest first: a system prompt has thousands


class BlockPool:
    """Blocks and tails by key; a policy chooses what to evict. Thread-safe.

    A block is never held without the block before it. The blocks of a chain are marked as used last to first, so that
    recency and frequency policies evict later blocks first. If a policy names a block that others follow, the last of
    these is evicted.
    """

    def __init__(
        self,
        size: int,
        max_bytes: int,
        device: torch.device,
        make_policy: Callable[[], Policy],
        spent: Callable[[], int] = int,
        purges: Purges | None = None,
    ) -> None:
        """Create an empty pool of blocks of `size` tokens on a device.

        The budget `max_bytes` covers tensors; bookkeeping adds about 2 kB per block on the CPU. `spent` returns the
        bytes of the budget that other parts hold or are about to hold: see `make_way`. Parts of one wrapped model share
        `purges`.
        """
        self.size, self.max_bytes, self.device = size, max_bytes, device
        self.nbytes = self.n_evicted = self.n_tails = self._n_full = 0
        self.purges = purges or Purges()
        self._shares = Shares(make_policy)
        self._spent = spent
        self._held: dict[str, Block] = {}
        self._before: dict[str, str] = {}  # previous block of each block but the first of a chain
        self._after: dict[str, dict[str, None]] = {}  # the blocks that follow a block, oldest first
        self._slabs = Slabs(self._held)
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        return self._n_full

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def whole(self, key: str, ids: bytes) -> list[Block]:
        """Return the blocks and the tail of a request and mark them as used; an empty list if any is missing."""
        with self._lock:
            self._expire()
            last_to_first = [key]
            while (before := self._before.get(last_to_first[-1])) is not None:
                last_to_first.append(before)
            blocks = [self._held[one] for one in reversed(last_to_first) if one in self._held]
            if b"".join(block.ids for block in blocks) != ids or not (blocks and blocks[-1].is_tail):
                return []
            self._use(last_to_first)
            return blocks

    def match(self, chain: Sequence[Link]) -> list[Block]:
        """Return the held blocks at the start of a chain, and mark them as used."""
        with self._lock:
            blocks = self._match(chain)
            self._use(link.key for link in reversed(chain[: len(blocks)]))
            return blocks

    def reach(self, chain: Sequence[Link], ids: bytes, width: int) -> tuple[list[Block], int]:
        """Return the held blocks of a request's longest known prefix, and its length in tokens; mark them as used.

        The last block may match only in its first tokens. `ids` are packed in `width` bytes per token.
        """
        with self._lock:
            blocks = self._match(chain)
            n_tokens = len(blocks) * self.size
            used = [link.key for link in chain[: len(blocks)]]
            rest = ids[n_tokens * width : (n_tokens + self.size) * width]
            after = self._after.get(used[-1], {}) if used and rest else {}
            recent = islice(reversed(after), _MOST_LOOKED_AT)
            matches = [(common_prefix(self._held[key].ids, rest) // width, key) for key in recent]
            n_more, last = max(matches, default=(0, ""))
            if n_more:
                blocks.append(self._held[last])
                used.append(last)
            self._use(reversed(used))
            return blocks, n_tokens + n_more

    def beginning_with(self, scope: Scope, ids: bytes) -> list[str]:
        """Return the keys of all blocks of a scope that begin with these ids. Looks at every block."""
        with self._lock:
            return [key for key, one in self._held.items() if one.scope == scope and one.ids.startswith(ids)]

    def n_held(self, chain: Sequence[Link]) -> int:
        """Return how many blocks at the start of a chain are held, without marking them as used."""
        with self._lock:
            return len(self._match(chain))

    def put(self, chain: Sequence[Link], new: Mapping[str, Block], generation: int | None = None) -> bool:
        """Add new blocks of a chain (`new`, by key) as far as they fit; return whether the whole chain is held.

        A block that another thread added meanwhile is skipped. Blocks after one that was evicted meanwhile are not
        added. If a block of the chain was purged since `generation`, nothing is added and True is returned.
        """
        with self._lock:
            if generation is not None and self.purges.generation != generation:
                names = {block.scope.namespace for block in new.values()}
                if not all(self.purges.is_current(name, link.key, generation) for name in names for link in chain):
                    return True
            self._expire()
            held = 0
            while held < len(chain) and chain[held].key in self._held:
                held += 1
            # Marked as used, so that they are not evicted to make room for the blocks that follow.
            known = [link.key for link in chain[:held]]
            self._use(reversed(known))
            own = {link.key for link in chain}
            added: dict[str, int] = {}
            for link in chain[held:]:
                block = new.get(link.key)
                if block is None or not self._make_room(nbytes := block.nbytes, own, block.scope.namespace):
                    break
                self._add(link.key, block, nbytes, chain[held - 1].key if held else None)
                added[link.key] = nbytes
                held += 1
            # Only now: a policy that counts uses would evict them first. Last to first, so that ends are evicted first.
            for key, nbytes in reversed(added.items()):
                self._policy_of(key).on_put(key, nbytes)
            self._use(reversed(known))
            self._slabs.settle()
            return held == len(chain)

    def make_way(self) -> None:
        """Evict blocks to make room for what other parts are about to hold within the shared budget."""
        with self._lock:
            self._make_room(0, set(), "")
            self._slabs.settle()

    def namespaces(self) -> list[str]:
        with self._lock:
            return list(self._shares)

    def clear(self, namespace: str | None = None) -> int:
        """Remove all blocks of a namespace, or of all (None); return how many requests that removes."""
        with self._lock:
            n_tails = self.n_tails
            self.purges.clear(namespace)
            self._drop_from(*reversed(self._shares.keys(namespace)))  # last first: each is then the end of its chain
            return n_tails - self.n_tails

    def forget(self, keys: Sequence[str]) -> int:
        """Remove blocks and all that follow them; return how many requests that removes."""
        with self._lock:
            n_tails = self.n_tails
            self.purges.forget(keys)
            self._drop_from(*keys)
            return n_tails - self.n_tails

    def state(self, weights: str) -> tuple[list[Any], dict[str, Tensor]]:
        """Return the blocks for these weights, each with the key of the block before it, and their tensors."""
        with self._lock:
            self._expire()
            held = [(key, self._before.get(key), block) for key, block in self._held.items()]
        return pack(
            [
                (one.tensors, [key, astuple(one.scope), one.ids.hex(), one.layout.hex(), one.is_tail, before])
                for key, before, one in held
                if one.scope.weights == weights
            ]
        )

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Load blocks saved by `state`, as far as they fit."""
        for own, (key, scope, ids, layout, is_tail, before) in unpack(meta, tensors):
            on_device = {name: one.to(self.device) for name, one in own.items()}
            block = Block.of(bytes.fromhex(ids), Scope(*scope), on_device, is_tail, bytes.fromhex(layout))
            with self._lock:
                has_place, nbytes = before is None or before in self._held, block.nbytes
                if has_place and self._make_room(nbytes, {before or ""}, block.scope.namespace):
                    self._add(key, block, nbytes, before)
                    self._policy_of(key).on_put(key, nbytes)
        with self._lock:
            self._slabs.settle()
            self._slabs.gather(self._before, self.size)

    def _match(self, chain: Sequence[Link]) -> list[Block]:
        self._expire()
        blocks = []
        for link in chain:
            block = self._held.get(link.key)
            if block is None or block.ids != link.ids:
                break
            blocks.append(block)
        return blocks

    def _use(self, last_to_first: Iterable[str]) -> None:
        for key in last_to_first:
            if key in self._held:
                self._policy_of(key).on_hit(key)

    def _expire(self) -> None:
        """Remove blocks that have expired under their policy, and all that follow them."""
        self.n_evicted += self._drop_from(*self._shares.expired())

    def _last_after(self, key: str) -> str:
        """Return the last block of a chain through a block; the block itself if none follows."""
        while key in self._after:
            key = next(iter(self._after[key]))
        return key

    def _drop_from(self, *keys: str) -> int:
        """Remove blocks, if held, and all that follow them; return how many were removed."""
        n_before = len(self._held)
        for key in keys:
            while key in self._held:
                self._drop(self._last_after(key))
        self._slabs.settle()
        return n_before - len(self._held)

    def _add(self, key: str, block: Block, nbytes: int, before: str | None) -> None:
        self._held[key] = block
        self.nbytes += nbytes
        self.n_tails += block.is_tail
        self._n_full += not block.is_tail
        self._slabs.add(key, block)
        self._shares.add(block.scope.namespace, key, nbytes)
        if before is not None:
            self._before[key] = before
            self._after.setdefault(before, {})[key] = None

    def _drop(self, key: str) -> None:
        block = self._held.pop(key)
        self.nbytes -= block.nbytes
        self.n_tails -= block.is_tail
        self._n_full -= not block.is_tail
        self._slabs.remove(key, block)
        self._shares.remove(block.scope.namespace, key)
        self._after.pop(key, None)
        before = self._before.pop(key, "")
        siblings = self._after.get(before, {})
        siblings.pop(key, None)
        if not siblings:
            self._after.pop(before, None)

    def _policy_of(self, key: str) -> Policy:
        return self._shares.policies[self._held[key].scope.namespace]

    def _make_room(self, nbytes: int, own: set[str], namespace: str) -> bool:
        """Evict blocks until `nbytes` fit; False if only blocks of the same chain (`own`) are left to evict."""
        # `spent` cannot grow while the lock is held: other parts call `make_way` first.
        max_bytes = self.max_bytes - self._spent()
        if nbytes > max_bytes:
            return False
        while self.nbytes + nbytes > max_bytes:
            try:
                leaving = self._last_after(self._shares.victim(namespace, nbytes))
            except KeyError:  # only blocks of this chain are held, which the policy does not know yet
                return False
            if leaving in own:
                return False
            self._drop(leaving)
            self.n_evicted += 1
        return True
