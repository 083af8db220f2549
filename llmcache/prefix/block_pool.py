"""Blocks of tokens with the K/V and last states that a model made of them, within a budget of bytes.

A request that was computed in full is held as its blocks and a tail, which follows the last of them: the tokens that
fill no block. So it shares what it begins with, and is held once. A tail may be empty: that a request ends after a
block, and came out as the blocks have it, is to be known as well.

What is kept of a block is its K/V in each layer, not the layers' inputs from which one projection would rebuild it
(HCache, arXiv 2410.05004). A token takes 2 H D_h numbers of K/V a layer, or D of input: with as many K/V heads as query
heads twice as much, with half as many (stories260K) the same, with fewer (a quarter in Llama-3 8B) less. K/V come back
bit for bit without a norm, a projection and a rotation that each family writes in its own way. The last states are for
callers who are owed the output at every position: D numbers a token, beside L layers of K/V.

Sizes: L layers, H K/V heads, b tokens a block, D_h width of a head, D hidden width.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from llmcache.policies.base import Policy
from llmcache.policies.shares import Shares
from llmcache.prefix.block import Block
from llmcache.prefix.slabs import Slabs
from llmcache.request.prefill import Link
from llmcache.request.rows import Scope
from llmcache.stacks import pack, unpack
from llmcache.threads import forkable

_MOST_LOOKED_AT = 64  # of the blocks that follow one, newest first: a system prompt is followed by thousands


class BlockPool:
    """Blocks and tails by key; the policy names who leaves. Thread-safe.

    None is ever held without the block before it. Those of a chain are used last to first, so that of the policies
    that count uses none names a block before those that follow it; where a policy does, the last of these leaves.
    """

    def __init__(
        self,
        size: int,
        max_bytes: int,
        device: torch.device,
        make_policy: Callable[[], Policy],
        spent: Callable[[], int] = int,
    ) -> None:
        """Start empty, with blocks of `size` tokens on a device.

        The budget `max_bytes` is of tensors; bookkeeping comes on top, some 2 kB a block on CPU. `spent` is what others
        hold of the budget, or are about to: see `make_way`.
        """
        self.size = size
        self.max_bytes = max_bytes
        self.device = device
        self.nbytes = 0
        self.n_evicted = 0
        self.n_tails = 0
        self.n_purges = 0  # so far; calls that began before one store nothing
        self._shares = Shares(make_policy)
        self._spent = spent
        self._held: dict[str, Block] = {}
        self._before: dict[str, str] = {}  # the block before each but the first of a chain
        self._after: dict[str, dict[str, None]] = {}  # those that follow a block, if any, oldest first
        self._slabs = Slabs(self._held)
        self._lock = forkable(threading.Lock())

    def __len__(self) -> int:
        return len(self._held) - self.n_tails

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def whole(self, key: str, ids: bytes) -> list[Block]:
        """The blocks of a request and its tail, which count as used; none where it is not held as a whole."""
        with self._lock:
            self._expire()
            last_to_first = [key]
            while (before := self._before.get(last_to_first[-1])) is not None:
                last_to_first.append(before)
            found = [self._held[one] for one in reversed(last_to_first) if one in self._held]
            if b"".join(block.ids for block in found) != ids or not (found and found[-1].is_tail):
                return []
            self._use(last_to_first)
            return found

    def match(self, chain: Sequence[Link]) -> list[Block]:
        """The blocks that are held of the beginning of a chain; they count as used."""
        with self._lock:
            found = self._match(chain)
            self._use(link.key for link in reversed(chain[: len(found)]))
            return found

    def reach(self, chain: Sequence[Link], ids: bytes, width: int) -> tuple[list[Block], int]:
        """The blocks that are held of the beginning of a chain, and one that goes on as the request does for a while.

        They count as used. Told beside them: how many of their tokens, packed in `width` bytes each, the request begins
        with.
        """
        with self._lock:
            found = self._match(chain)
            n_tokens = len(found) * self.size
            used = [link.key for link in chain[: len(found)]]
            rest = ids[n_tokens * width : (n_tokens + self.size) * width]
            after = self._after.get(used[-1], {}) if used and rest else {}
            alike = [
                (_n_alike(self._held[key].ids, rest) // width, key) for key in islice(reversed(after), _MOST_LOOKED_AT)
            ]
            n_more, last = max(alike, default=(0, ""))
            if n_more:
                found.append(self._held[last])
                used.append(last)
            self._use(reversed(used))
            return found, n_tokens + n_more

    def n_held(self, chain: Sequence[Link]) -> int:
        """How many blocks are held of the beginning of a chain; they do not count as used."""
        with self._lock:
            return len(self._match(chain))

    def put(self, chain: Sequence[Link], made: Mapping[str, Block], n_purges: int | None = None) -> bool:
        """Hold the beginning of a chain, as far as it is held already or made anew, and fits; whether all of it is.

        Of those `made`, one that another thread brought meanwhile is ignored, and what follows one that left meanwhile
        is, too. All are if anything was purged since `n_purges`.
        """
        with self._lock:
            if n_purges not in (None, self.n_purges):
                return True
            self._expire()
            held = 0
            while held < len(chain) and chain[held].key in self._held:
                held += 1
            # Now the newest, they do not leave for what follows them.
            known = [link.key for link in chain[:held]]
            self._use(reversed(known))
            own = {link.key for link in chain}
            added: dict[str, int] = {}
            for link in chain[held:]:
                block = made.get(link.key)
                if block is None or not self._make_room(nbytes := block.nbytes, own, block.scope.namespace):
                    break
                self._add(link.key, block, nbytes, chain[held - 1].key if held else None)
                added[link.key] = nbytes
                held += 1
            # Not before: a policy that counts uses would name them first. Last to first, so that ends leave first.
            for key, nbytes in reversed(added.items()):
                self._policy_of(key).on_put(key, nbytes)
            self._use(reversed(known))
            self._slabs.settle()
            return held == len(chain)

    def make_way(self) -> None:
        """Let blocks leave for what others are about to hold, so that the budget of all is kept at every moment."""
        with self._lock:
            self._make_room(0, set(), "")
            self._slabs.settle()

    def namespaces(self) -> list[str]:
        """Namespaces with blocks."""
        with self._lock:
            return list(self._shares)

    def clear(self, namespace: str | None = None) -> int:
        """Forget all blocks of a namespace, None: all blocks; returns how many requests ended there."""
        with self._lock:
            n_tails = self.n_tails
            self.n_purges += 1
            for key in self._shares.keys(namespace):
                self._drop(key)
            self._slabs.settle()
            return n_tails - self.n_tails

    def forget(self, keys: Iterable[str]) -> int:
        """Forget blocks, with all that follow them; returns how many requests ended there."""
        with self._lock:
            n_tails = self.n_tails
            for key in keys:
                self._drop_from(key)
            self._slabs.settle()
            return n_tails - self.n_tails

    def state(self, weights: str) -> tuple[list[Any], dict[str, Tensor]]:
        """Return the blocks for these weights, each with the key of the block before it, and their tensors."""
        with self._lock:
            self._expire()
            held = [(key, self._before.get(key), block) for key, block in self._held.items()]
        records = []
        for key, before, block in held:
            if block.scope.weights == weights:
                about = [key, astuple(block.scope), block.ids.hex(), block.layout.hex(), block.is_tail, before]
                records.append((block.tensors, about))
        return pack(records)

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Hold what was saved, as far as it fits."""
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
        found = []
        for link in chain:
            block = self._held.get(link.key)
            if block is None or block.ids != link.ids:
                break
            found.append(block)
        return found

    def _use(self, last_to_first: Iterable[str]) -> None:
        for key in last_to_first:
            if key in self._held:
                self._policy_of(key).on_hit(key)

    def _expire(self) -> None:
        """Drop blocks that their policy sends away, with all that follow them."""
        for key in self._shares.expired():
            self.n_evicted += self._drop_from(key)
        self._slabs.settle()

    def _last_after(self, key: str) -> str:
        """The end of a chain that goes through a block: the block itself where none follows."""
        while key in self._after:
            key = next(iter(self._after[key]))
        return key

    def _drop_from(self, key: str) -> int:
        """Drop a block, if it is held, with all that follow it; returns how many they were."""
        n_dropped = 0
        while key in self._held:
            self._drop(self._last_after(key))
            n_dropped += 1
        return n_dropped

    def _add(self, key: str, block: Block, nbytes: int, before: str | None) -> None:
        self._held[key] = block
        self.nbytes += nbytes
        self.n_tails += block.is_tail
        self._slabs.add(key, block)
        self._shares.add(block.scope.namespace, key, nbytes)
        if before is not None:
            self._before[key] = before
            self._after.setdefault(before, {})[key] = None

    def _drop(self, key: str) -> None:
        block = self._held.pop(key)
        self.nbytes -= block.nbytes
        self.n_tails -= block.is_tail
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
        """Let blocks leave until so many bytes fit; False when only blocks of the same chain could make room."""
        # What others leave is the same as long as the lock is held: they ask blocks to make way first.
        max_bytes = self.max_bytes - self._spent()
        if nbytes > max_bytes:
            return False
        while self.nbytes + nbytes > max_bytes:
            try:
                leaving = self._last_after(self._shares.victim(namespace, nbytes))
            except KeyError:  # all that is held is what is being put
                return False
            if leaving in own:
                return False
            self._drop(leaving)
            self.n_evicted += 1
        return True


def _n_alike(one: bytes, other: bytes) -> int:
    """Bytes that two strings begin with alike."""
    n = min(len(one), len(other))
    differing = int.from_bytes(one[:n]) ^ int.from_bytes(other[:n])
    return n - (differing.bit_length() + 7) // 8
