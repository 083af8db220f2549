"""Replay of keys through the library's own banks and blocks, without a model, and the most hits any policy can get.

`WTinyLFU` is a reference for the library's policies; not part of the library.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import torch

from experiments.data.streams.traffic import Asked
from llmcache import Policy
from llmcache.lab import Bank, Block, BlockPool, Entry, Link, Scope

_NOWHERE = torch.device("meta")  # tensors have a size but no data
_SCOPE = Scope("default", "weights", "float32", "sdpa")


@dataclass(slots=True)
class Found:
    n: int = 0
    hits: int = 0
    nbytes: int = 0
    hit_nbytes: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def add(self, one: Asked, is_hit: bool) -> None:
        self.n += 1
        self.nbytes += one.nbytes
        self.tokens += one.tokens
        self.hits += is_hit
        self.hit_nbytes += one.nbytes * is_hit
        self.hit_tokens += one.tokens * is_hit


def replay_entries(requests: Iterable[Sequence[Asked]], make_policy: Callable[[], Policy], max_bytes: int) -> Found:
    """Replay requests as bank entries: use an entry that is held, else put it, with its cost for the policy."""
    bank, found = Bank(make_policy, max_bytes), Found()
    for (one,) in requests:
        is_hit = one.key in bank
        found.add(one, is_hit)
        if is_hit:
            bank.used([one.key])
        else:
            bank.put([Entry(one.key, _SCOPE, (_tensor(one.nbytes),))], generation=0, cost=one.tokens)
    return found


def replay_blocks(requests: Iterable[Sequence[Asked]], make_policy: Callable[[], Policy], max_bytes: int) -> Found:
    """Replay requests as chains of blocks: use the held prefix, and put the rest, as the prefix rung does."""
    pool, found = BlockPool(1, max_bytes, torch.device("cpu"), make_policy), Found()
    for blocks in requests:
        chain = [Link(one.key, b"") for one in blocks]
        n_held = len(pool.match(chain))
        for place, one in enumerate(blocks):
            found.add(one, place < n_held)
        pool.match(chain)  # once to serve the request, once to store what follows
        pool.put(chain, {one.key: _block(one.nbytes) for one in blocks[n_held:]})
    return found


def most_hits(requests: Iterable[Sequence[Asked]], max_entries: int) -> Found:
    """Return the most hits of any policy on entries of equal size: evict the key next used last, maybe the new one.

    Belady (1966), MIN, without the obligation to store. Ignores that a block is only useful with the blocks before it,
    so the figure is an upper bound.
    """
    asked = [one for request in requests for one in request]
    next_at, seen = [inf] * len(asked), dict[str, int]()
    for at in range(len(asked) - 1, -1, -1):
        next_at[at] = seen.get(asked[at].key, inf)
        seen[asked[at].key] = at
    held: dict[str, float] = {}
    latest: list[tuple[float, str]] = []  # times of next use of held keys, last first; some are outdated
    found = Found()
    for at, one in enumerate(asked):
        found.add(one, one.key in held)
        held[one.key] = next_at[at]
        heapq.heappush(latest, (-next_at[at], one.key))
        while len(held) > max_entries:
            again, key = heapq.heappop(latest)
            if held.get(key) == -again:
                del held[key]
    return found


@cache
def _tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=_NOWHERE)


def _block(nbytes: int) -> Block:
    nothing = _tensor(0)[None]
    tensors = {"keys": _tensor(nbytes)[None], "values": nothing, "states": nothing}
    return Block.of(b"", _SCOPE, tensors, is_tail=False, layout=b"")


_MOST = 15  # largest count of a key: four bits, as in the paper
_SAMPLE = 10  # counts are halved after this many uses per key held


class WTinyLFU(Policy):
    """Admits a key from the window only if it was used more often than the key it would evict.

    Einziger et al. (2017): a window of 1 % in LRU order, and a segmented main part, of which 80 % is protected.
    Departure: uses are counted exactly, for each key since counts were last halved, not by a sketch. A sketch has
    errors, so it would do no better.
    """

    def __init__(self, window: float = 0.01, protected: float = 0.8) -> None:
        self.window = window
        self.protected = protected
        self._nbytes_of: dict[str, int] = {}
        self._window, self._probation, self._protected = (_Segment(self._nbytes_of) for _ in range(3))
        self._n_uses: dict[str, int] = {}
        self._n_counted = 0
        self._candidates: OrderedDict[str, None] = OrderedDict()  # left the window, and have evicted no key yet

    def on_put(self, key: str, nbytes: int) -> None:
        self.on_remove(key)
        self._count(key)
        self._nbytes_of[key] = nbytes
        self._window.add(key)
        while len(self._window) > 1 and self._window.nbytes > self.window * self._nbytes:
            candidate = self._window.pop()
            self._candidates[candidate] = None
            self._probation.add(candidate)

    def on_hit(self, key: str) -> None:
        if key not in self._nbytes_of:
            return
        self._count(key)
        if key in self._window:
            self._window.add(key)
            return
        self._probation.discard(key)
        self._candidates.pop(key, None)
        self._protected.add(key)
        while self._protected.nbytes > self.protected * (self._probation.nbytes + self._protected.nbytes):
            self._probation.add(self._protected.pop())

    def on_remove(self, key: str) -> None:
        self._candidates.pop(key, None)
        if self._candidates and key == next(iter(self._probation), None):
            self._candidates.popitem()  # it was admitted
        for segment in (self._window, self._probation, self._protected):
            segment.discard(key)
        self._nbytes_of.pop(key, None)

    def victim(self) -> str:
        for segment in (self._probation, self._protected, self._window):
            for key in segment:
                candidate = next(reversed(self._candidates), key)
                return candidate if self._uses(candidate) <= self._uses(key) else key
        raise KeyError("no key to evict: the policy is empty")

    @property
    def _nbytes(self) -> int:
        return self._window.nbytes + self._probation.nbytes + self._protected.nbytes

    def _uses(self, key: str) -> int:
        return self._n_uses.get(key, 0)

    def _count(self, key: str) -> None:
        self._n_uses[key] = min(_MOST, self._uses(key) + 1)
        self._n_counted += 1
        if self._n_counted >= _SAMPLE * max(_MOST, len(self._nbytes_of)):
            self._n_uses = {one: n // 2 for one, n in self._n_uses.items() if n > 1}
            self._n_counted //= 2


class _Segment(OrderedDict[str, None]):
    """Keys in order of use, least recent first, with their bytes."""

    def __init__(self, nbytes_of: dict[str, int]) -> None:
        super().__init__()
        self._nbytes_of = nbytes_of
        self.nbytes = 0

    def add(self, key: str) -> None:
        if key not in self:
            self.nbytes += self._nbytes_of[key]
        self[key] = None
        self.move_to_end(key)

    def discard(self, key: str) -> None:
        if key in self:
            del self[key]
            self.nbytes -= self._nbytes_of[key]

    def pop(self) -> str:  # type: ignore[override]
        key = next(iter(self))
        self.discard(key)
        return key
