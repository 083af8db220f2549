"""Stored requests by exact key, within budgets of bytes and entries. One lock a call, whatever the batch.

The only place that evicts. Entries are never written to: serving copies them.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from llmcache.policies import Policy
from llmcache.request.rows import Scope
from llmcache.threads import forkable


@dataclass(slots=True, eq=False)
class Entry:
    """What one request left behind.

    Attributes:
        key: Its exact key.
        scope: All else that decides its states.
        fields: What is kept of the trunk's output, see `Packing.take`.
        padding: States of its padding, of each field that holds states; empty without padding, or where none is kept.
        layout: Digest of what its padding was made of, where the key does not cover that; else b"".
        nbytes: Bytes of `fields` and `padding`.
    """

    key: str
    scope: Scope
    fields: tuple[Tensor, ...]
    padding: tuple[Tensor, ...] = ()
    layout: bytes = b""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(one.nbytes for one in (*self.fields, *self.padding))


class Bank:
    """Entries, and the policy that decides who leaves. Thread-safe."""

    def __init__(self, policy: Policy, max_bytes: int, max_entries: int | None = None) -> None:
        """Begin empty.

        Args:
            policy: Asked who leaves. Called under the bank's lock.
            max_bytes: Budget of all entries' `nbytes`.
            max_entries: Most entries; None: no limit.
        """
        self._policy = policy
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._entries: dict[str, Entry] = {}
        self._lock = forkable(threading.RLock())  # a signal's handler may ask for the stats
        self._n_clears = Counter[str]()
        self._n_clears_of_all = 0
        self.expires = type(policy).expired is not Policy.expired
        self.heeds_costs = type(policy).on_cost is not Policy.on_cost
        self.nbytes = 0
        self.n_evicted = 0
        self.n_expelled = 0
        #: Told the key of each entry that has left, under the lock.
        self.on_leave: Callable[[str], object] = lambda key: None
        self._pinned: set[str] = set()  # leave by `clear` and `forget` alone; the policy does not know them
        self._pinned_nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def find(self, keys: Iterable[Sequence[str]]) -> list[Entry | None]:
        """The entry of each request of a call, None where there is none; of several keys the first that is held."""
        with self._lock:
            if self.expires:
                self._expire()
            held = self._entries
            found = [next((held[key] for key in of_one if key in held), None) for of_one in keys]
            for entry in found:
                if entry is not None and entry.key not in self._pinned:
                    self._policy.on_hit(entry.key)
            return found

    def used(self, keys: Iterable[str]) -> None:
        """Tell the policy that entries served other requests."""
        with self._lock:
            for key in keys:
                if key in self._entries and key not in self._pinned:
                    self._policy.on_hit(key)

    def pin(self, entries: Sequence[Entry]) -> bool:
        """Hold entries, which do not leave until `release`, `clear` or `forget`; False, and none, if they do not fit."""
        with self._lock:
            nbytes = sum(entry.nbytes for entry in entries)
            if nbytes > self.max_bytes or (self.max_entries is not None and len(entries) > self.max_entries):
                return False
            for entry in entries:
                self._remove(entry.key)
            while self._is_over(nbytes, len(entries)):
                self._evict()
            for entry in entries:
                self._entries[entry.key] = entry
            self._pinned |= {entry.key for entry in entries}
            self._pinned_nbytes += nbytes
            self.nbytes += nbytes
            return True

    def release(self) -> None:
        """Let pinned entries leave again, as if they had just been stored."""
        with self._lock:
            pinned, self._pinned, self._pinned_nbytes = self._pinned, set(), 0
            for key in pinned:
                self._policy.on_put(key, self._entries[key].nbytes)

    def is_pinned(self, key: str) -> bool:
        """Whether an entry does not leave for others."""
        return key in self._pinned

    def put(self, entries: Iterable[Entry], generation: int, cost: float | None = None) -> int:
        """Store entries of one call, unless their namespace was cleared since; returns how many are too large.

        Args:
            entries: Of one namespace; given away.
            generation: Of that namespace, when the call began.
            cost: What computing each took, see `Policy.on_cost`; None: not known.
        """
        n_too_large = 0
        with self._lock:
            for entry in entries:
                if generation != self.generation(entry.scope.namespace):
                    break
                if entry.key in self._pinned:
                    continue
                has_room = self.max_entries is None or len(self._pinned) < self.max_entries
                if entry.nbytes > self.max_bytes - self._pinned_nbytes or not has_room:
                    n_too_large += 1
                    continue
                self._remove(entry.key)
                while self._is_over(entry.nbytes):
                    self._evict()
                self._entries[entry.key] = entry
                self.nbytes += entry.nbytes
                self._policy.on_put(entry.key, entry.nbytes)
                if cost is not None and self.heeds_costs:
                    self._policy.on_cost(entry.key, cost)
        return n_too_large

    def generation(self, namespace: str) -> int:
        """How often a namespace was cleared, alone or with all others."""
        return self._n_clears_of_all + self._n_clears[namespace]

    def clear(self, namespace: str | None = None) -> int:
        """Forget the entries of a namespace, None: all; returns how many they were."""
        with self._lock:
            if namespace is None:
                self._n_clears_of_all += 1
            else:
                self._n_clears[namespace] += 1
            return self._drop(lambda entry: namespace in (None, entry.scope.namespace))

    def forget(self, keys: Iterable[str]) -> int:
        """Forget entries by key; returns how many were there."""
        gone = set(keys)
        with self._lock:
            return self._drop(lambda entry: entry.key in gone)

    def entries(self) -> list[Entry]:
        """All entries, as they are at one moment, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def _drop(self, goes: Callable[[Entry], bool]) -> int:
        gone = [key for key, entry in self._entries.items() if goes(entry)]
        for key in gone:
            self._leave(key)
        return len(gone)

    def _expire(self) -> None:
        for key in self._policy.expired():
            self._leave(key)
            self.n_expelled += 1

    def _evict(self) -> None:
        self._leave(self._policy.victim())
        self.n_evicted += 1

    def _leave(self, key: str) -> None:
        self._remove(key)
        self.on_leave(key)

    def _remove(self, key: str) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.nbytes -= entry.nbytes
            if key in self._pinned:
                self._pinned.remove(key)
                self._pinned_nbytes -= entry.nbytes
                return
        self._policy.on_remove(key)

    def _is_over(self, nbytes: int, n_entries: int = 1) -> bool:
        too_many = self.max_entries is not None and len(self._entries) + n_entries > self.max_entries
        return len(self._entries) > len(self._pinned) and (too_many or self.nbytes + nbytes > self.max_bytes)
