"""Stored requests by exact key, within budgets of bytes and entries. One lock a call, whatever the batch.

The only place that evicts. Entries are never written to: serving copies them.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from llmcache.heap import Trimmer
from llmcache.models.weights import Mark
from llmcache.policies import Policy
from llmcache.policies.shares import Shares
from llmcache.request.call import Call, Hit
from llmcache.request.rows import Row, Scope
from llmcache.stacks import pack, unpack
from llmcache.threads import forkable

if TYPE_CHECKING:  # asked for what is not in memory; it fills the bank
    from llmcache.stores.entries import StoredEntries

logger = logging.getLogger("llmcache")

_MANY = 32  # entries that left before they were ever hit, from which it is told


@dataclass(slots=True, eq=False)
class Entry:
    """The stored output of one request.

    Attributes:
        key: Its exact key.
        scope: Namespace, weights and all else but tokens that decides its states.
        fields: Its row of each tensor of the trunk's output; of hidden states the payload. See `Packing.take`.
        padding: One tensor (T - n, D) a field of states: those of padding. Empty if there is none, or none is kept.
        layout: Digest of the padded row, if padding is kept and the key does not cover it; else b"". Only a row with
            the same `layout` gets `padding` back.
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
        """Its tensors by name, for stores and saves."""
        fields = {f"field{i}": one for i, one in enumerate(self.fields)}
        return fields | {f"padding{i}": one for i, one in enumerate(self.padding)}

    @classmethod
    def of(cls, key: str, scope: Scope, tensors: Mapping[str, Tensor], layout: str) -> "Entry":
        """Make an entry from its `tensors`, and its layout in hexadecimal."""
        n_fields = sum(name.startswith("field") for name in tensors)
        fields = tuple(tensors[f"field{i}"] for i in range(n_fields))
        padding = tuple(tensors[f"padding{i}"] for i in range(len(tensors) - n_fields))
        return cls(key, scope, fields, padding, bytes.fromhex(layout))


class Bank:
    """Entries by key, and their eviction: each namespace has a share of the budget of its own. Thread-safe."""

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
            make_way: Called after each `put` and `pin`, without the lock: blocks that share the budget leave as needed.
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
        self._trimmer = Trimmer()
        self._n_hits = self._n_in_vain = 0  # entries that served, and that left without having served
        self._has_warned = False
        #: Told the key of each entry that has left and was not pinned, under the lock.
        self.on_leave: Callable[[str], object] = lambda key: None
        self._pinned: set[str] = set()  # leave by `clear` and `forget` alone; the policy does not know them
        self._pinned_nbytes = 0
        self.unconfirmed: dict[str, Mark] = {}  # mark of the weights before entries that serve once they are confirmed

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def find(self, rows: Sequence[Row]) -> list[Entry | None]:
        """The entry of each row of a call, None where there is none."""
        with self._lock:
            if self.expires:
                self._expire()
            held, found = self._entries, []
            for row in rows:
                entry = held.get(row.again) if row.again else None
                entry = held.get(row.key) if entry is None else entry
                if entry is not None:
                    self._use(entry)
                found.append(entry)
            return found

    def used(self, keys: Iterable[str]) -> None:
        """Tell the policy that entries served other requests."""
        with self._lock:
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    self._use(entry)

    def pin(self, entries: Sequence[Entry]) -> bool:
        """Store entries that no policy may evict until `release`; return False, and store none, if they do not fit."""
        with self._lock:
            nbytes = sum(entry.nbytes for entry in entries)
            if nbytes > self.max_bytes or (self.max_entries is not None and len(entries) > self.max_entries):
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
        """Let pinned entries leave again, as if they had just been stored."""
        with self._lock:
            pinned, self._pinned, self._pinned_nbytes = self._pinned, set(), 0
            for key in pinned:
                self._take_in(self._entries[key])

    def is_pinned(self, key: str) -> bool:
        """Whether an entry does not leave for others."""
        return key in self._pinned

    def confirm(self, entries: Mapping[str, Mark], mark: Mark | None) -> None:
        """Keep entries that were put with this mark of the weights, and forget those put with others.

        Args:
            entries: A copy of `unconfirmed`, from before it was seen that the weights still have this mark.
            mark: None: they have another one.
        """
        with self._lock:
            for key, before in entries.items():
                if self.unconfirmed.get(key) is before:
                    del self.unconfirmed[key]
                    if before is not mark:
                        self.forget([key])

    def put(
        self, entries: Iterable[Entry], generation: int, cost: float | None = None, mark: Mark | None = None
    ) -> int:
        """Store entries of one call, unless their namespace was cleared since; returns how many are too large.

        Args:
            entries: Of one namespace; given away.
            generation: Of that namespace, when the call began.
            cost: Cost of computing each, see `Policy.on_cost`; None: not known.
            mark: Of the weights before they were computed, where nobody has looked since whether these have changed:
                whoever is to be served by them looks, and calls `confirm`. None: they have not.
        """
        n_too_large = n_stored = 0
        with self._lock:
            for entry in entries:
                namespace = entry.scope.namespace
                if generation != self.generation(namespace):
                    break
                if entry.key in self._pinned:
                    continue
                has_room = self.max_entries is None or len(self._pinned) < self.max_entries
                if entry.nbytes > self.max_bytes - self._pinned_nbytes or not has_room:
                    n_too_large += 1
                    continue
                self._remove(entry.key)
                self._make_room(namespace, entry.nbytes)
                self._entries[entry.key] = entry
                self.nbytes += entry.nbytes
                if mark is not None:
                    self.unconfirmed[entry.key] = mark
                self._take_in(entry)
                n_stored += 1
                if cost is not None and self.heeds_costs:
                    self._shares.policies[namespace].on_cost(entry.key, cost)
        self._trimmer.stored(n_stored, len(self))
        self._make_way()
        return n_too_large

    def generation(self, namespace: str) -> int:
        """How often a namespace was cleared, alone or with all others."""
        return self._n_clears_of_all + self._n_clears[namespace]

    def namespaces(self) -> list[str]:
        """Namespaces with entries."""
        with self._lock:
            return list({*self._shares, *(self._entries[key].scope.namespace for key in self._pinned)})

    def clear(self, namespace: str | None = None) -> int:
        """Forget the entries of a namespace (None: all); return how many they were."""
        with self._lock:
            if namespace is None:
                self._n_clears_of_all += 1
            else:
                self._n_clears[namespace] += 1
            pinned = [key for key in self._pinned if namespace in (None, self._entries[key].scope.namespace)]
            return self.forget([*self._shares.keys(namespace), *pinned])

    def forget(self, keys: Iterable[str]) -> int:
        """Forget entries by key; returns how many were there."""
        with self._lock:
            held = [key for key in keys if key in self._entries]
            for key in held:
                self._leave(key)
            return len(held)

    def entries(self) -> list[Entry]:
        """All entries, as they are at one moment, oldest first."""
        with self._lock:
            if self.expires:
                self._expire()
            return list(self._entries.values())

    # -- saves ---------------------------------------------------------------------------------------------------------

    def state(self, weights: str) -> tuple[list[Any], dict[str, Tensor]]:
        """Return key, scope, layout and tensors of each entry for these weights; pinned ones are left out."""
        left_out = self._pinned | self.unconfirmed.keys()
        entries = [one for one in self.entries() if one.scope.weights == weights and one.key not in left_out]
        about = [(one.key, astuple(one.scope), one.layout.hex()) for one in entries]
        return pack([(one.tensors, told) for one, told in zip(entries, about, strict=True)])

    def restore(self, meta: Any, tensors: Mapping[str, Tensor]) -> None:
        """Store what `state` returned, oldest first, as far as it fits."""
        for own, (key, scope, layout) in unpack(meta, tensors):
            entry = Entry.of(key, Scope(*scope), own, layout)
            self.put([entry], self.generation(entry.scope.namespace))

    # -- eviction ------------------------------------------------------------------------------------------------------

    def _make_room(self, namespace: str, nbytes: int, n_entries: int = 1) -> None:
        while self._is_full(self.nbytes + nbytes > self.max_bytes):
            self._evict(self._shares.victim(namespace, nbytes))
        most = self.max_entries
        while self._is_full(most is not None and len(self._entries) + n_entries > most):
            self._evict(self._shares.victim_by_number(namespace))

    def _is_full(self, is_over: bool) -> bool:
        return is_over and len(self._entries) > len(self._pinned)

    def _evict(self, key: str) -> None:
        self._n_in_vain += not self._entries[key].was_hit
        self._leave(key)
        self.n_evicted += 1
        if not self._has_warned and self._n_in_vain >= _MANY and self._n_in_vain > self._n_hits:
            self._has_warned = True
            logger.warning(
                "llmcache: %d stored requests left before they were ever asked again, for lack of room (max_bytes=%d "
                "holds %d of them): raise max_bytes, keep less of each (payload), or set policy='s3_fifo'",
                self._n_in_vain,
                self.max_bytes,
                len(self._entries) + 1,
            )

    def _expire(self) -> None:
        for key in self._shares.expired():
            self._leave(key)
            self.n_expelled += 1

    def _use(self, entry: Entry) -> None:
        if entry.key not in self._pinned:
            self._shares.policies[entry.scope.namespace].on_hit(entry.key)
        if not entry.was_hit:
            entry.was_hit = True
            self._n_hits += 1

    def _take_in(self, entry: Entry) -> None:
        self._shares.add(entry.scope.namespace, entry.key, entry.nbytes)
        try:
            self._shares.policies[entry.scope.namespace].on_put(entry.key, entry.nbytes)
        except BaseException:  # nobody would ever let it leave
            self._leave(entry.key)
            raise

    def _leave(self, key: str) -> None:
        is_pinned = key in self._pinned
        self._remove(key)
        if not is_pinned:
            self.on_leave(key)

    def _remove(self, key: str) -> None:
        if (entry := self._entries.pop(key, None)) is None:
            return
        self.nbytes -= entry.nbytes
        self.unconfirmed.pop(key, None)
        if key in self._pinned:
            self._pinned.remove(key)
            self._pinned_nbytes -= entry.nbytes
        else:
            self._shares.remove(entry.scope.namespace, key)


class Exact:
    """Serves a request from the entry under its own key. Lossless."""

    name = "exact"
    is_lossless = True

    def __init__(self, bank: Bank, stored: "StoredEntries | None") -> None:
        self._bank, self._stored = bank, stored

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        if self._stored is not None:
            self._stored.recall(call, rows)
        found = self._bank.find(rows)
        for row, entry in zip(rows, found, strict=True):
            if entry is not None:
                padding = entry.padding if entry.layout == row.layout else ()
                call.hits[row.number] = Hit("exact", entry.key, entry.fields, padding)
        if self._stored is not None:
            self._stored.offer_again(call, [entry for entry in found if entry is not None])
