"""Stored requests by exact key, within budgets of bytes and entries. One lock a call, whatever the batch.

The only place that evicts. Entries are never written to: serving copies them.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmcache.policies import Policy
from llmcache.policies.shares import Shares
from llmcache.request.rows import Scope
from llmcache.stacks import pack, unpack
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

_MANY = 32  # entries that left before they were ever hit, from which it is told


@dataclass(slots=True, eq=False)
class Entry:
    """What one request left behind.

    Attributes:
        key: Its exact key.
        scope: All else that decides its states.
        fields: What is kept of the trunk's output, see `Packing.take`.
        padding: States of its padding, of each field that holds states; empty without padding, or where none is kept.
        layout: Digest of what its padding was made of, where the key does not cover that; else b"".
        was_hit: It has served a request.
        nbytes: Bytes of `fields` and `padding`.
    """

    key: str
    scope: Scope
    fields: tuple[Tensor, ...]
    padding: tuple[Tensor, ...] = ()
    layout: bytes = b""
    was_hit: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(one.nbytes for one in (*self.fields, *self.padding))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by name: for stores and saves."""
        fields = {f"field{i}": one for i, one in enumerate(self.fields)}
        return fields | {f"padding{i}": one for i, one in enumerate(self.padding)}

    @classmethod
    def of(cls, key: str, scope: Scope, tensors: Mapping[str, Tensor], layout: str) -> "Entry":
        """The entry of what it held, and its layout in hexadecimal."""
        n_fields = sum(name.startswith("field") for name in tensors)
        fields = tuple(tensors[f"field{i}"] for i in range(n_fields))
        padding = tuple(tensors[f"padding{i}"] for i in range(len(tensors) - n_fields))
        return cls(key, scope, fields, padding, bytes.fromhex(layout))


class Bank:
    """Entries, and who of them leaves: each namespace has a share of the budget of its own. Thread-safe."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        max_bytes: int,
        max_entries: int | None = None,
        make_way: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin empty.

        Args:
            make_policy: Makes a policy, which is called under the bank's lock.
            max_bytes: Budget of all entries' `nbytes`.
            max_entries: Most entries; None: no limit.
            make_way: Called once `nbytes` has grown, where blocks share the budget.
        """
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._shares = Shares(make_policy)
        self._make_way = make_way
        self._entries: dict[str, Entry] = {}
        self._lock = forkable(threading.RLock())  # a signal's handler may ask for the stats
        self._n_clears = Counter[str]()
        self._n_clears_of_all = 0
        kind = type(make_policy())
        self.expires = kind.expired is not Policy.expired
        self.heeds_costs = kind.on_cost is not Policy.on_cost
        self.nbytes = 0
        self.n_evicted = 0
        self.n_expelled = 0
        self._n_hits = self._n_in_vain = 0  # entries that served, and that left without having served
        self._has_warned = False

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
                if entry is not None:
                    self._shares.of(entry.scope.namespace).on_hit(entry.key)
                    if not entry.was_hit:
                        entry.was_hit = True
                        self._n_hits += 1
            return found

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
                namespace = entry.scope.namespace
                if generation != self.generation(namespace):
                    break
                if entry.nbytes > self.max_bytes:
                    n_too_large += 1
                    continue
                self._remove(entry.key)
                self._make_room(namespace, entry.nbytes)
                self._entries[entry.key] = entry
                self.nbytes += entry.nbytes
                self._shares.add(namespace, entry.key, entry.nbytes)
                policy = self._shares.of(namespace)
                policy.on_put(entry.key, entry.nbytes)
                if cost is not None and self.heeds_costs:
                    policy.on_cost(entry.key, cost)
        self._make_way()
        return n_too_large

    def generation(self, namespace: str) -> int:
        """How often a namespace was cleared, alone or with all others."""
        return self._n_clears_of_all + self._n_clears[namespace]

    def namespaces(self) -> list[str]:
        """Those of which anything is held."""
        with self._lock:
            return list(self._shares)

    def clear(self, namespace: str | None = None) -> int:
        """Forget the entries of a namespace, None: all; returns how many they were."""
        with self._lock:
            if namespace is None:
                self._n_clears_of_all += 1
                return self.forget(list(self._entries))
            self._n_clears[namespace] += 1
            return self.forget(self._shares.keys(namespace))

    def forget(self, keys: Iterable[str]) -> int:
        """Forget entries by key; returns how many were there."""
        with self._lock:
            return sum(self._remove(key) for key in keys)

    def entries(self) -> list[Entry]:
        """All entries, as they are at one moment, oldest first."""
        with self._lock:
            if self.expires:
                self._expire()
            return list(self._entries.values())

    # -- saves ---------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[list[Any], dict[str, Tensor]]:
        """What is saved: of each entry its key, scope and layout, and its tensors."""
        entries = self.entries()
        about = [(one.key, (one.scope.namespace, *_others(one.scope)), one.layout.hex()) for one in entries]
        return pack([(one.tensors, told) for one, told in zip(entries, about, strict=True)])

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Hold what was saved, oldest first, as far as it fits. Those of a namespace that was cleared stay away."""
        for own, (key, scope, layout) in unpack(meta, tensors):
            entry = Entry.of(key, Scope(*scope), own, layout)
            self.put([entry], self.generation(entry.scope.namespace))

    # -- eviction ------------------------------------------------------------------------------------------------------

    def _make_room(self, namespace: str, nbytes: int) -> None:
        while self._entries and self.nbytes + nbytes > self.max_bytes:
            self._evict(self._shares.victim(namespace, nbytes))
        while self.max_entries is not None and len(self._entries) >= self.max_entries:
            self._evict(self._shares.victim_by_number(namespace))

    def _evict(self, key: str) -> None:
        self._n_in_vain += not self._entries[key].was_hit
        self._remove(key)
        self.n_evicted += 1
        if not self._has_warned and self._n_in_vain >= _MANY and self._n_in_vain > self._n_hits:
            self._has_warned = True
            logger.warning(
                "llmcache: %d stored requests left before any of them was asked again, for lack of room (max_bytes=%d "
                "holds %d of them): raise max_bytes, keep less of each (payload), or set policy='s3_fifo'",
                self._n_in_vain,
                self.max_bytes,
                len(self._entries) + 1,
            )

    def _expire(self) -> None:
        for key in self._shares.expired():
            self._remove(key)
            self.n_expelled += 1

    def _remove(self, key: str) -> bool:
        if (entry := self._entries.pop(key, None)) is None:
            return False
        self.nbytes -= entry.nbytes
        self._shares.remove(entry.scope.namespace, key)
        return True


def _others(scope: Scope) -> tuple[str, str, str]:
    return scope.weights, scope.dtype, scope.attention
