"""A priority queue of keys whose ranks may change, and the base class of policies that rank keys."""

import heapq
from itertools import count

from llmcache.memory.policies.base import Policy

Rank = tuple[float, int]


class Ranking:
    """Keys by rank, least first.

    A heap with lazy updates: for each key it holds an item with the key's rank or a lower, earlier one. If the first
    item's rank is current, its key is the least; otherwise the item is updated. Raising a rank is O(1), other
    operations are O(log n), averaged over calls.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}
        self._heap: list[tuple[Rank, str]] = []

    def __contains__(self, key: str) -> bool:
        return key in self._ranks

    def __getitem__(self, key: str) -> Rank:
        return self._ranks[key]

    def __setitem__(self, key: str, rank: Rank) -> None:
        held = self._ranks.get(key)
        self._ranks[key] = rank
        if held is not None and held <= rank:
            return
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks):  # most are outdated; rebuilding costs O(1) per push
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: str) -> None:
        self._ranks.pop(key, None)

    def first(self) -> str:
        """Return the key of the least rank; raise `KeyError` if there is none."""
        while self._heap:
            rank, key = self._heap[0]
            now = self._ranks.get(key)
            if now == rank:
                return key
            if now is None:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (now, key))
        raise KeyError("no key to evict: the policy is empty")


class Ranked(Policy):
    """Evicts the key of the least rank first."""

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._uses = count()

    def on_remove(self, key: str) -> None:
        self._ranking.discard(key)

    def victim(self) -> str:
        return self._ranking.first()
