"""Replay of keys through the library's own banks and blocks, without a model, and the most hits any policy can get."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import torch

from experiments.data.streams.keys import Asked
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
