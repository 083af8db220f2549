"""Policies that keep keys in one order: FIFO, LRU and TTL."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from llmcache.policies.base import Policy


class FIFO(Policy):
    """First in, first out. Storing a key again is a new arrival; a hit changes nothing."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, float] = OrderedDict()  # next victim first; the value is TTL's

    def on_put(self, key: str, nbytes: int) -> None:
        self._order[key] = 0.0
        self._order.move_to_end(key)

    def on_hit(self, key: str) -> None:
        """Change nothing."""

    def on_remove(self, key: str) -> None:
        self._order.pop(key, None)

    def victim(self) -> str:
        for key in self._order:
            return key
        raise KeyError("no key to evict: the policy is empty")


class LRU(FIFO):
    """Least recently used: the key longest without a hit or a put leaves first."""

    def on_hit(self, key: str) -> None:
        if key in self._order:
            self._order.move_to_end(key)


class TTL(FIFO):
    """Time to live: keys must leave `ttl_s` seconds after they were put, and under pressure the oldest leaves first.

    A hit does not make a key younger; storing it again does.
    """

    lets_entries_leave_early = True

    def __init__(self, ttl_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Let keys expire at an age of `ttl_s` seconds, over 0, by a clock that never runs backwards."""
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
        keys = []
        for key, put_s in self._order.items():  # oldest first, so the first young one ends it
            if now - put_s < self.ttl_s:
                break
            keys.append(key)
        return keys
