"""Policies that keep keys in one order: FIFO, LRU and TTL."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from llmcache.memory.policies.base import Policy


class FIFO(Policy):
    """First in, first out. Storing a key again moves it to the end; a hit changes nothing."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, float] = OrderedDict()  # next victim first; values are for TTL

    def on_put(self, key: str, nbytes: int) -> None:
        self._order[key] = 0.0
        self._order.move_to_end(key)

    def on_hit(self, key: str) -> None:
        """Do nothing."""

    def on_remove(self, key: str) -> None:
        self._order.pop(key, None)

    def victim(self) -> str:
        for key in self._order:
            return key
        raise KeyError("no key to evict: the policy is empty")


class LRU(FIFO):
    """Least recently used: evicts the key whose last hit or put is the oldest."""

    def on_hit(self, key: str) -> None:
        if key in self._order:
            self._order.move_to_end(key)


class TTL(FIFO):
    """Time to live: keys expire `ttl_s` seconds after they were put; over the budget, the oldest is evicted first.

    A hit does not extend the life of a key; storing it again does.
    """

    lets_entries_leave_early = True

    def __init__(self, ttl_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Expire keys at an age of `ttl_s` seconds, over 0; `now` is a monotonic clock in seconds."""
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"ttl_s must be positive and finite, got {ttl_s}")
        super().__init__()
        self.ttl_s = ttl_s
        self._now = now

    def on_put(self, key: str, nbytes: int) -> None:
        super().on_put(key, nbytes)
        self._order[key] = self._now()

    def expired(self) -> list[str]:
        now = self._now()
        expired = takewhile(lambda one: now - one[1] >= self.ttl_s, self._order.items())  # they come first
        return [key for key, _ in expired]
