"""Who leaves a full bank (component 5, replacement).

A policy sees keys only; the bank tells it what happens and removes what it names. Each call is O(1), `expired` in the
number of keys that it returns. Nothing here holds a lock: the library above does.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol


class Policy(Protocol):
    """An order in which keys leave. Asking changes nothing: a key is forgotten by `on_remove` alone."""

    def __init__(self, **options: Any) -> None:
        """Open an empty policy; options are what the class names in its own signature."""

    def on_put(self, key: str, nbytes: int) -> None:
        """Note that an entry of `nbytes` bytes was stored under `key`, for the first time or in place of another."""

    def on_hit(self, key: str) -> None:
        """Note that the entry was reused. An unknown key is ignored."""

    def on_remove(self, key: str) -> None:
        """Forget a key. An unknown one is ignored."""

    def victim(self) -> str:
        """Name the key that should leave next.

        Raises:
            KeyError: No key is held.
        """

    def expired(self) -> list[str]:
        """Name the keys that must leave now, whatever the budget."""


class FIFO:
    """First in, first out. Storing a key again is a new arrival; a hit changes nothing."""

    def __init__(self) -> None:
        """Open an empty policy."""
        self._order: OrderedDict[str, float] = OrderedDict()  # next victim first; the value is TTL's

    def on_put(self, key: str, nbytes: int) -> None:
        """Move the key to the end."""
        self._order[key] = 0.0
        self._order.move_to_end(key)

    def on_hit(self, key: str) -> None:
        """Change nothing."""

    def on_remove(self, key: str) -> None:
        """Forget a key. An unknown one is ignored."""
        self._order.pop(key, None)

    def victim(self) -> str:
        """Name the first key; `KeyError` when there is none."""
        for key in self._order:
            return key
        raise KeyError("no key to evict: the policy is empty")

    def expired(self) -> list[str]:
        """Name none: only the budget makes keys leave."""
        return []


class LRU(FIFO):
    """Least recently used: the key longest without a hit or a put leaves first."""

    def on_hit(self, key: str) -> None:
        """Move the key to the end. An unknown one is ignored."""
        if key in self._order:
            self._order.move_to_end(key)


class TTL(FIFO):
    """Time to live: keys must leave `ttl_s` seconds after they were put, and under pressure the oldest leaves first.

    A hit does not make a key younger; storing it again does.
    """

    def __init__(self, ttl_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Open an empty policy.

        Args:
            ttl_s: Age in seconds, over 0, at which a key has expired.
            now: Clock in seconds; never runs backwards.

        Raises:
            ValueError: `ttl_s` is not a positive, finite number.
        """
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"ttl_s must be positive and finite, got {ttl_s}")
        super().__init__()
        self.ttl_s = ttl_s
        self._now = now

    def on_put(self, key: str, nbytes: int) -> None:
        """Move the key to the end, aged 0."""
        super().on_put(key, nbytes)
        self._order[key] = self._now()

    def expired(self) -> list[str]:
        """Name the keys aged `ttl_s` or more, oldest first."""
        now = self._now()
        keys = []
        for key, put_s in self._order.items():  # oldest first, so the first young one ends it
            if now - put_s < self.ttl_s:
                break
            keys.append(key)
        return keys


class Bucket:
    """Keys used equally often, least recently used first, linked with the next rarer and next more frequent ones."""

    __slots__ = ("higher", "keys", "lower", "n_uses")

    def __init__(self, n_uses: int) -> None:
        """Open an empty bucket, linked with itself only."""
        self.n_uses = n_uses
        self.keys: OrderedDict[str, None] = OrderedDict()
        self.lower: Bucket = self
        self.higher: Bucket = self

    def insert_above(self, n_uses: int) -> "Bucket":
        """Link a new, empty bucket between this one and the next higher one, and return it."""
        bucket = Bucket(n_uses)
        bucket.lower, bucket.higher = self, self.higher
        self.higher.lower = bucket
        self.higher = bucket
        return bucket

    def unlink(self) -> None:
        """Leave the ring."""
        self.lower.higher = self.higher
        self.higher.lower = self.lower


class LFU:
    """Least frequently used; among equals the least recently used.

    Each put and each hit is a use. The count starts anew when a key was removed, and does not fade with time.
    Buckets in a ring, one a count, ordered by count: Shah, Mitra and Matani, "An O(1) algorithm for implementing the
    LFU cache eviction scheme" (2010).
    """

    def __init__(self) -> None:
        """Open an empty policy."""
        self._ring = Bucket(0)  # never holds a key; the rarest keys are in the bucket above it
        self._bucket_of: dict[str, Bucket] = {}

    def on_put(self, key: str, nbytes: int) -> None:
        """Count a use."""
        self._use(key, self._bucket_of.get(key, self._ring))

    def on_hit(self, key: str) -> None:
        """Count a use. An unknown key is ignored."""
        if key in self._bucket_of:
            self._use(key, self._bucket_of[key])

    def on_remove(self, key: str) -> None:
        """Forget a key and its count. An unknown one is ignored."""
        bucket = self._bucket_of.pop(key, None)
        if bucket is not None:
            self._leave(key, bucket)

    def victim(self) -> str:
        """Name the key used least; `KeyError` when there is none."""
        for key in self._ring.higher.keys:
            return key
        raise KeyError("no key to evict: the policy is empty")

    def expired(self) -> list[str]:
        """Name none: only the budget makes keys leave."""
        return []

    def _use(self, key: str, bucket: Bucket) -> None:
        """Move a key from the bucket it is in (the ring's own when it is new) to the one for one more use."""
        n_uses = bucket.n_uses + 1
        above = bucket.higher if bucket.higher.n_uses == n_uses else bucket.insert_above(n_uses)
        above.keys[key] = None
        self._bucket_of[key] = above
        if bucket is not self._ring:
            self._leave(key, bucket)

    def _leave(self, key: str, bucket: Bucket) -> None:
        del bucket.keys[key]
        if not bucket.keys:
            bucket.unlink()


POLICIES: dict[str, type[Policy]] = {"lru": LRU, "lfu": LFU, "fifo": FIFO, "ttl": TTL}
