"""Blocks of tokens with the K/V and last states that a model made of them, within a budget of bytes.

What is kept of a block is its K/V in each layer, not the layers' inputs from which one projection would rebuild it
(HCache, arXiv 2410.05004). A token takes 2 H D_h numbers of K/V a layer, or D of input: with as many K/V heads as query
heads twice as much, with half as many (stories260K) the same, with fewer (a quarter in Llama-3 8B) less. K/V come back
bit for bit without a norm, a projection and a rotation that each family writes in its own way. The last states are for
callers who are owed the output at every position: D numbers a token, beside L layers of K/V.

Sizes: L layers, H K/V heads, b tokens a block, D_h width of a head, D hidden width.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcache.prefix.records import Link


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """What was computed for b tokens. Normal tensors that nobody writes to.

    Attributes:
        ids: Its token ids, packed.
        namespace: Where it belongs.
        keys: (L, H, b, D_h).
        values: (L, H, b, D_h).
        states: The trunk's output (b, D).
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


class Blocks:
    """Blocks by key, least recently used first to leave. Thread-safe.

    A block is never held without the one before it: blocks of a chain are used last to first, so that each was used
    after all that follow it, and the least recently used block of all has none that follows.
    """

    def __init__(self, size: int, max_bytes: int, device: torch.device) -> None:
        """Start empty.

        Args:
            size: Tokens a block.
            max_bytes: Budget of bytes of tensors; bookkeeping comes on top, some 1.6 kB a block on CPU.
            device: Where tensors are kept: those that make blocks put them there.
        """
        self.size = size
        self.max_bytes = max_bytes
        self.device = device
        self.nbytes = 0
        self.n_evicted = 0
        self._held: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, chain: Sequence[Link]) -> list[Block]:
        """The blocks that are held of the beginning of a chain; they count as used."""
        with self._lock:
            found = []
            for link in chain:
                block = self._held.get(link.key)
                if block is None or block.ids != link.ids:
                    break
                found.append(block)
            self._use(chain[: len(found)])
            return found

    def put(self, chain: Sequence[Link], made: Mapping[bytes, Block]) -> None:
        """Hold the beginning of a chain, as far as it is held already or made anew, and fits.

        Args:
            chain: All blocks of a request.
            made: New blocks by key. One that another thread brought meanwhile is ignored; what follows one that left
                meanwhile is, too.
        """
        with self._lock:
            held = 0
            while held < len(chain) and chain[held].key in self._held:
                held += 1
            self._use(chain[:held])  # now the newest, they do not leave for what follows them
            own = {link.key for link in chain}
            for link in chain[held:]:
                if link.key not in made or not self._make_room(made[link.key].nbytes, own):
                    break
                self._held[link.key] = made[link.key]
                self.nbytes += made[link.key].nbytes
                held += 1
            self._use(chain[:held])

    def purge(self, namespace: str) -> None:
        """Forget all blocks of a namespace; chains never leave theirs."""
        with self._lock:
            self._held = OrderedDict((key, block) for key, block in self._held.items() if block.namespace != namespace)
            self.nbytes = sum(block.nbytes for block in self._held.values())

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._held.clear()
            self.nbytes = 0

    def _use(self, chain: Sequence[Link]) -> None:
        for link in reversed(chain):
            self._held.move_to_end(link.key)

    def _make_room(self, nbytes: int, own: set[bytes]) -> bool:
        """Let blocks leave until so many bytes fit; False when only blocks of the same chain could make room."""
        if nbytes > self.max_bytes:
            return False
        while self.nbytes + nbytes > self.max_bytes:
            oldest = next(iter(self._held))
            if oldest in own:
                return False
            self.nbytes -= self._held.pop(oldest).nbytes
            self.n_evicted += 1
        return True
