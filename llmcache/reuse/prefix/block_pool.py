"""Blocks of tokens with the K/V and last states that a model made of them, within a budget of bytes.

What is kept of a block is its K/V in each layer, not the layers' inputs from which one projection would rebuild it
(HCache, arXiv 2410.05004). A token takes 2 H D_h numbers of K/V a layer, or D of input: with as many K/V heads as query
heads twice as much, with half as many (stories260K) the same, with fewer (a quarter in Llama-3 8B) less. K/V come back
bit for bit without a norm, a projection and a rotation that each family writes in its own way. The last states are for
callers who are owed the output at every position: D numbers a token, beside L layers of K/V.

Sizes: L layers, H K/V heads, b tokens a block, D_h width of a head, D hidden width.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from llmcache.policies.base import Policy
from llmcache.request.prefill import Link

_MOST_LOOKED_AT = 64  # of the blocks that follow one, newest first: a system prompt is followed by thousands


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What was computed for b tokens. Normal tensors that nobody writes to.

    Attributes:
        ids: Its token ids, packed.
        namespace: Where it belongs.
        keys: (L, H, b, D_h).
        values: (L, H, b, D_h).
        states: The trunk's output (1, b, D).
    """

    ids: bytes
    namespace: str
    keys: Tensor
    values: Tensor
    states: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes


class BlockPool:
    """Blocks by key; the policy names who leaves. Thread-safe.

    A block is never held without the one before it. Blocks of a chain are used last to first, so that of the policies
    that count uses none names a block before those that follow it; where a policy does, the last of these leaves.
    """

    def __init__(self, size: int, max_bytes: int, device: torch.device, policy: Policy) -> None:
        """Start empty.

        Args:
            size: Tokens a block.
            max_bytes: Budget of bytes of tensors; bookkeeping comes on top, some 2 kB a block on CPU.
            device: Where tensors are kept: those that make blocks put them there.
            policy: Who leaves.
        """
        self.size = size
        self.max_bytes = max_bytes
        self.device = device
        self.nbytes = 0
        self.n_evicted = 0
        self._policy = policy
        self._held: dict[str, Block] = {}
        self._before: dict[str, str] = {}  # the block before each but the first of a chain
        self._after: dict[str, dict[str, None]] = {}  # those that follow a block, if any, oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, chain: Sequence[Link]) -> list[Block]:
        """The blocks that are held of the beginning of a chain; they count as used."""
        with self._lock:
            found = self._match(chain)
            self._use(link.key for link in reversed(chain[: len(found)]))
            return found

    def reach(self, chain: Sequence[Link], ids: bytes, width: int) -> tuple[list[Block], int]:
        """The blocks that are held of the beginning of a chain, and one that goes on as the request does for a while.

        Args:
            chain: The full blocks of a request.
            ids: All its token ids, packed.
            width: Bytes of one.

        Returns:
            The blocks, which count as used, and how many of their tokens the request begins with.
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

    def put(self, chain: Sequence[Link], made: Mapping[str, Block]) -> None:
        """Hold the beginning of a chain, as far as it is held already or made anew, and fits.

        Args:
            chain: All blocks of a request.
            made: New blocks by key. One that another thread brought meanwhile is ignored; what follows one that left
                meanwhile is, too.
        """
        with self._lock:
            self._expire()
            held = 0
            while held < len(chain) and chain[held].key in self._held:
                held += 1
            # Now the newest, they do not leave for what follows them.
            self._use(link.key for link in reversed(chain[:held]))
            own = {link.key for link in chain}
            for link in chain[held:]:
                if link.key not in made or not self._make_room(made[link.key].nbytes, own):
                    break
                self._add(link.key, made[link.key], chain[held - 1].key if held else None)
                held += 1
            self._use(link.key for link in reversed(chain[:held]))

    def purge(self, namespace: str) -> None:
        """Forget all blocks of a namespace; chains never leave theirs."""
        with self._lock:
            for key in [key for key, block in self._held.items() if block.namespace == namespace]:
                self._drop(key)

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            for key in list(self._held):
                self._drop(key)

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
            self._policy.on_hit(key)

    def _expire(self) -> None:
        """Drop blocks that their policy sends away, with all that follow them."""
        for key in self._policy.expired():
            while key in self._held:
                self._drop(self._last_after(key))
                self.n_evicted += 1

    def _last_after(self, key: str) -> str:
        """The end of a chain that goes through a block: the block itself where none follows."""
        while key in self._after:
            key = next(iter(self._after[key]))
        return key

    def _add(self, key: str, block: Block, before: str | None) -> None:
        self._held[key] = block
        self._policy.on_put(key, block.nbytes)
        self.nbytes += block.nbytes
        if before is not None:
            self._before[key] = before
            self._after.setdefault(before, {})[key] = None

    def _drop(self, key: str) -> None:
        self.nbytes -= self._held.pop(key).nbytes
        self._policy.on_remove(key)
        self._after.pop(key, None)
        before = self._before.pop(key, "")
        siblings = self._after.get(before, {})
        siblings.pop(key, None)
        if not siblings:
            self._after.pop(before, None)

    def _make_room(self, nbytes: int, own: set[str]) -> bool:
        """Let blocks leave until so many bytes fit; False when only blocks of the same chain could make room."""
        if nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            leaving = self._last_after(self._policy.victim())
            if leaving in own:
                return False
            self._drop(leaving)
            self.n_evicted += 1
        return True


def first_tokens(blocks: Iterable[Block], n_tokens: int) -> list[Block]:
    """Of blocks, those that hold so many tokens; the last is cut, not copied."""
    found: list[Block] = []
    for block in blocks:
        n = min(n_tokens, block.states.shape[-2])
        if n == 0:
            break
        tensors = {name: getattr(block, name)[..., :n, :] for name in ("keys", "values", "states")}
        found.append(replace(block, **tensors))
        n_tokens -= n
    return found


def _n_alike(one: bytes, other: bytes) -> int:
    """Bytes that two strings begin with alike."""
    n = min(len(one), len(other))
    differing = int.from_bytes(one[:n]) ^ int.from_bytes(other[:n])
    return n - (differing.bit_length() + 7) // 8
