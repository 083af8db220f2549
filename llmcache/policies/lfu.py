"""Least frequently used, in constant time."""

from collections import OrderedDict

from llmcache.policies.base import Policy


class Bucket:
    """Keys used equally often, least recently used first, linked with the next rarer and next more frequent ones."""

    __slots__ = ("higher", "keys", "lower", "n_uses")

    def __init__(self, n_uses: int) -> None:
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


class LFU(Policy):
    """Least frequently used; among equals the least recently used.

    Each put and each hit is a use. The count starts anew when a key was removed, and does not fade with time.
    Buckets in a ring, one a count, ordered by count: Shah, Mitra and Matani, "An O(1) algorithm for implementing the
    LFU cache eviction scheme" (2010).
    """

    def __init__(self) -> None:
        self._ring = Bucket(0)  # never holds a key; the rarest keys are in the bucket above it
        self._bucket_of: dict[str, Bucket] = {}

    def on_put(self, key: str, nbytes: int) -> None:
        self._use(key, self._bucket_of.get(key, self._ring))

    def on_hit(self, key: str) -> None:
        if key in self._bucket_of:
            self._use(key, self._bucket_of[key])

    def on_remove(self, key: str) -> None:
        bucket = self._bucket_of.pop(key, None)
        if bucket is not None:
            self._leave(key, bucket)

    def victim(self) -> str:
        for key in self._ring.higher.keys:
            return key
        raise KeyError("no key to evict: the policy is empty")

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
