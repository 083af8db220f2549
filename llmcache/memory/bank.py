"""Stored requests by exact key, within budgets of bytes and entries. A call takes the lock once for all its rows.

The bank alone evicts entries. Stored tensors are never written to: serving copies them.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from torch import Tensor

from llmcache.memory.policies import Policy
from llmcache.memory.policies.shares import Shares
from llmcache.memory.purges import Purges
from llmcache.request.rows import Row, Scope
from llmcache.support.heap import Trimmer
from llmcache.support.stacks import pack, unpack
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_MANY = 32  # entries evicted without a hit, from which on a warning is logged


@dataclass(slots=True, eq=False)
class Entry:
    """The stored output of one request."""

    key: str
    scope: Scope
    fields: tuple[Tensor, ...]  # its row of each tensor of the trunk's output; the payload of hidden states
    padding: tuple[Tensor, ...] = ()  # states of padding (T - n, D) per field of states; empty if not kept
    layout: bytes = b""  # of padding, see `Row.layout`: only a row with the same one gets `padding` back
    was_hit: bool = False  # whether it has served a request
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(one.nbytes for one in (*self.fields, *self.padding))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for stores and saves."""
        fields = {f"field{i}": one for i, one in enumerate(self.fields)}
        return fields | {f"padding{i}": one for i, one in enumerate(self.padding)}

    @property
    def about(self) -> tuple[str, tuple[str, ...], str]:
        """Its key, scope and layout as JSON values, for saves."""
        return self.key, astuple(self.scope), self.layout.hex()

    @classmethod
    def of(cls, key: str, scope: Scope, tensors: Mapping[str, Tensor], layout: str) -> "Entry":
        """Return an entry from its `tensors` and the hexadecimal form of its layout."""
        n_fields = sum(name.startswith("field") for name in tensors)
        fields = tuple(tensors[f"field{i}"] for i in range(n_fields))
        padding = tuple(tensors[f"padding{i}"] for i in range(len(tensors) - n_fields))
        return cls(key, scope, fields, padding, bytes.fromhex(layout))


class Bank:
    """Stores entries by key and evicts them; each namespace has its own share of the budget. Thread-safe."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        max_bytes: int,
        max_entries: int | None = None,
        make_way: Callable[[], object] | None = None,
        purges: Purges | None = None,
    ) -> None:
        """Start empty, within a budget of bytes and entries (None: any number).

        `make_way` is called after each `put` and `pin`, without the lock: it evicts blocks that share the budget. Parts
        of one wrapped model share `purges`.
        """
        self.max_bytes = max_bytes
        self.max_entries = math.inf if max_entries is None else max_entries
        self.purges = purges or Purges()
        self.nbytes = self.n_evicted = self.n_expelled = 0
        self._shares = Shares(make_policy)
        self._entries: dict[str, Entry] = {}
        self._lock = forkable(threading.RLock())  # reentrant: a signal handler may call stats()
        kind = type(make_policy())
        self._expires = kind.expired is not Policy.expired
        self._heeds_costs = kind.on_cost is not Policy.on_cost
        self._trimmer = Trimmer()
        self._n_hits = self._n_unused = 0  # entries that were hit; entries evicted without a hit
        self._has_warned = False
        self._on_leave: list[Callable[[str], object]] = []
        self._make_way = make_way or (lambda: None)
        self._pinned: set[str] = set()  # removed only by `clear` and `forget`; unknown to the policy
        self._pinned_nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def watch(self, on_leave: Callable[[str], object]) -> None:
        """Call a function under the lock with the key of each entry that is removed and was not pinned."""
        self._on_leave.append(on_leave)

    def find(self, rows: Sequence[Row]) -> list[Entry | None]:
        """Return the entry of each row, or None, and tell the policy of the hits."""
        with self._lock:
            if self._expires:
                self._expire()
            entries = [self._entries.get(row.key) for row in rows]
            for entry in entries:
                if entry is not None:
                    self._record_hit(entry)
            return entries

    def used(self, keys: Iterable[str]) -> None:
        """Tell the policy that entries served other requests."""
        with self._lock:
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    self._record_hit(entry)

    def pin(self, entries: Sequence[Entry]) -> bool:
        """Store entries that are not evicted until `release`. Return False, and store none, if they do not fit."""
        with self._lock:
            nbytes = sum(entry.nbytes for entry in entries)
            if nbytes > self.max_bytes or len(entries) > self.max_entries:
                return False
            for entry in entries:
                self._remove(entry.key)
            for namespace in {entry.scope.namespace for entry in entries}:
                self._make_room(namespace, nbytes, len(entries))
            for entry in entries:
                self._entries[entry.key] = entry
            self._pinned |= {entry.key for entry in entries}
            self._pinned_nbytes += nbytes
            self.nbytes += nbytes
        self._make_way()
        return True

    def release(self) -> None:
        """Unpin all entries and hand them to the policy, as if just stored."""
        with self._lock:
            pinned, self._pinned, self._pinned_nbytes = self._pinned, set(), 0
            for key in pinned:
                self._admit(self._entries[key])

    def is_pinned(self, key: str) -> bool:
        return key in self._pinned

    def put(self, entries: Iterable[Entry], generation: int, cost: float | None = None) -> int:
        """Store entries of one namespace, except those purged since this generation; return how many are too large.

        `generation` is that of `purges` when their call began; `cost` is that of computing each, see `Policy.on_cost`.
        """
        n_too_large = n_stored = 0
        with self._lock:
            is_purged = self.purges.generation != generation
            for entry in entries:
                namespace = entry.scope.namespace
                is_gone = is_purged and not self.purges.is_current(namespace, entry.key, generation)
                if is_gone or entry.key in self._pinned:
                    continue
                if entry.nbytes > self.max_bytes - self._pinned_nbytes or len(self._pinned) >= self.max_entries:
                    n_too_large += 1
                    continue
                self._remove(entry.key)
                self._make_room(namespace, entry.nbytes)
                self._entries[entry.key] = entry
                self.nbytes += entry.nbytes
                self._admit(entry)
                n_stored += 1
                if cost is not None and self._heeds_costs:
                    self._shares.policies[namespace].on_cost(entry.key, cost)
        self._trimmer.stored(n_stored, len(self))
        self._make_way()
        return n_too_large

    def namespaces(self) -> list[str]:
        with self._lock:
            return list({*self._shares, *(self._entries[key].scope.namespace for key in self._pinned)})

    def clear(self, namespace: str | None = None) -> int:
        """Remove the entries of a namespace (None: all), pinned ones too; return their number."""
        with self._lock:
            self.purges.clear(namespace)
            pinned = [key for key in self._pinned if namespace in (None, self._entries[key].scope.namespace)]
            return self._drop_all([*self._shares.keys(namespace), *pinned])

    def forget(self, keys: Sequence[str]) -> int:
        """Remove entries by key, pinned ones too; return how many were held. Calls under way do not bring them back."""
        with self._lock:
            self.purges.forget(keys)
            return self._drop_all(keys)

    def entries(self) -> list[Entry]:
        """Return a snapshot of all entries, oldest first."""
        with self._lock:
            if self._expires:
                self._expire()
            return list(self._entries.values())

    # -- saves ---------------------------------------------------------------------------------------------------------

    def state(self, weights: str) -> tuple[list[Any], dict[str, Tensor]]:
        """Return key, scope, layout and tensors of each entry for these weights, except pinned ones."""
        entries = [one for one in self.entries() if one.scope.weights == weights and one.key not in self._pinned]
        return pack([(one.tensors, one.about) for one in entries])

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Store the entries that `state` returned, oldest first, as far as they fit."""
        for own, (key, scope, layout) in unpack(meta, tensors):
            self.put([Entry.of(key, Scope(*scope), own, layout)], self.purges.generation)

    # -- eviction ------------------------------------------------------------------------------------------------------

    def _make_room(self, namespace: str, nbytes: int, n_entries: int = 1) -> None:
        while self.nbytes + nbytes > self.max_bytes and len(self._entries) > len(self._pinned):
            self._evict(self._shares.victim(namespace, nbytes))
        while len(self._entries) + n_entries > self.max_entries and len(self._entries) > len(self._pinned):
            self._evict(self._shares.victim_by_number(namespace))

    def _evict(self, key: str) -> None:
        self._n_unused += not self._entries[key].was_hit
        self._drop(key)
        self.n_evicted += 1
        if not self._has_warned and self._n_unused >= _MANY and self._n_unused > self._n_hits:
            self._has_warned = True
            logger.warning(
                "llmcache: %d stored requests were evicted before they were ever hit, for lack of room (max_bytes=%d "
                "holds %d of them): raise max_bytes, keep less of each (payload), or set policy='s3_fifo'",
                self._n_unused,
                self.max_bytes,
                len(self._entries) + 1,
            )

    def _expire(self) -> None:
        self.n_expelled += self._drop_all(self._shares.expired())

    def _record_hit(self, entry: Entry) -> None:
        if entry.key not in self._pinned:
            self._shares.policies[entry.scope.namespace].on_hit(entry.key)
        if not entry.was_hit:
            entry.was_hit = True
            self._n_hits += 1

    def _admit(self, entry: Entry) -> None:
        self._shares.add(entry.scope.namespace, entry.key, entry.nbytes)
        try:
            self._shares.policies[entry.scope.namespace].on_put(entry.key, entry.nbytes)
        except BaseException:  # the policy would never evict it
            self._drop(entry.key)
            raise

    def _drop_all(self, keys: Iterable[str]) -> int:
        held = [key for key in keys if key in self._entries]
        for key in held:
            self._drop(key)
        return len(held)

    def _drop(self, key: str) -> None:
        is_pinned = key in self._pinned
        self._remove(key)
        if not is_pinned:
            for on_leave in self._on_leave:
                on_leave(key)

    def _remove(self, key: str) -> None:
        if (entry := self._entries.pop(key, None)) is None:
            return
        self.nbytes -= entry.nbytes
        if key in self._pinned:
            self._pinned.remove(key)
            self._pinned_nbytes -= entry.nbytes
        else:
            self._shares.remove(entry.scope.namespace, key)
