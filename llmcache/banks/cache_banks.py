"""All that is remembered: the requests, the index rows that find them, and the banks that hold their states.

A request is known while at least one bank holds a state of it; when the last bank lets go, its index row goes too. With
a store, some are found though no bank holds them (`elsewhere`). Absent or expired is a miss, never an error. One lock
guards everything but the reading of entries, which are copied: what was read counts only if nothing else was put under
its key meanwhile. Tensors handed out are never written again.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.banks.bank import Bank
from llmcache.banks.compression import Codec
from llmcache.banks.elsewhere import Elsewhere
from llmcache.banks.entry import Entry
from llmcache.banks.entry_tier import EntryTier, Wanted, request_of
from llmcache.banks.generations import Purges
from llmcache.banks.kv import without_padding
from llmcache.banks.layer_banks import LayerBanks
from llmcache.banks.records import SavedRequest, StoredRequest, StoredState
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.fingerprint import Fingerprint
from llmcache.matching.fingerprint_index import FingerprintIndex
from llmcache.index import Index
from llmcache.matching.partition import Neighbour
from llmcache.request.rows import Row, Scope
from llmcache.threads import forkable

_AT_ONCE = 256  # requests whose states are read together


class CacheBanks:
    """Requests, index and banks, kept consistent. Thread-safe."""

    def __init__(
        self,
        banks: Mapping[int, Bank],
        make_codec: Callable[[], Codec],
        fingerprint: Fingerprint | None = None,
        make_index: Callable[[int], Index] | None = None,
        by_length: bool = False,
        by_layer: bool = False,
        make_way: Callable[[], None] = lambda: None,
        tier: Tier | None = None,
        fingerprint_kind: str = "",
    ) -> None:
        """Start empty.

        `make_codec` makes one codec for each layer and state of the weights; `make_index` an empty index of a width.
        With `by_length`, requests of different lengths never find each other; with `by_layer`, each layer is searched
        by itself, as the paper does. `make_way` is called before entries are put: others who share the budget then
        leave what is `spent`. `tier` holds entries beyond memory; only those who have the same `fingerprint_kind`, a
        name with its options, hear of each other's.
        """
        self._requests: dict[str, StoredRequest] = {}
        self.layer_banks = LayerBanks(banks, make_codec, self._requests)
        self.heeds_costs = any(bank.heeds_costs for bank in banks.values())  # who does not is not told, in no call
        self.expires = any(bank.expires for bank in banks.values())  # by an age that counts from when they were put
        self._quarantined: dict[str, str] = {}  # namespaces by key; also of requests that left, as they may come again
        self._index = FingerprintIndex(fingerprint, make_index, self.layer_banks.layers_of, by_length, by_layer)
        #: Told before anything is forgotten, here and beside the banks.
        self.purges = Purges()
        self._lock = forkable(threading.RLock())
        self._make_way = make_way
        self._tier = None if tier is None else EntryTier(tier)
        self.has_tier = tier is not None  # `promote` may find something
        self.elsewhere = None if self._tier is None else Elsewhere(self._index, self._tier, fingerprint_kind)
        self._incoming = 0  # bytes that are about to be put
        self.fingerprint_epoch = 0  # moves on when requests begin to be compared by another fingerprint

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: str) -> bool:
        return key in self._requests

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.layer_banks)

    @property
    def nbytes(self) -> int:
        return self.layer_banks.nbytes

    @property
    def spent(self) -> int:
        """Bytes of all states held, and of those about to be."""
        incoming = self._incoming  # read first: once it is taken back, they are held
        return min(incoming + self.nbytes, sum(bank.max_bytes for bank in self.layer_banks.values()))

    @property
    def index_nbytes(self) -> int:
        return sum(partition.nbytes for partition in self._index.values())

    @property
    def fingerprint(self) -> Fingerprint | None:
        return self._index.fingerprint

    def known(self, row: Row, key: str = "") -> bool:
        """Whether the very same request is stored, under its own key or another; of the same key alone it is not."""
        with self._lock:
            request = self._requests.get(key or row.key)
            return request is not None and request.ids == row.ids

    def is_lossless(self, key: str) -> bool:
        """Whether the request's states come back bit for bit."""
        with self._lock:
            request = self._requests.get(key)
            return request is not None and self.layer_banks.is_lossless(request)

    def held(self, key: str) -> list[int]:
        """Layers whose bank holds a state of the request."""
        with self._lock:
            self._expire()
            return self.layer_banks.layers_of(key)

    def search(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, k: int = 1, layer: int | None = None
    ) -> list[list[Neighbour]]:
        """The `k` nearest stored requests of each row, best first, by fingerprints (B, F) and, if set, in one layer."""
        with self._lock:
            self._expire()
            found = self._index.search(scope, rows, vectors, k, layer)
            for near in chain.from_iterable(found):
                request = self._known(near.key)
                near.answer, near.ids, near.is_quarantined = request.answer, request.ids, near.key in self._quarantined
            return found

    def read(self, key: str, layer: int, with_kv: bool, is_single: bool = False) -> StoredState | None:
        """A stored state, or None when some of what is needed is not held; `is_single`: no layer below is skipped."""
        with self._lock:
            if (request := self._requests.get(key)) is None:
                return None
            layers, n_puts = self.layer_banks.needed(key, layer, with_kv, is_single), request.n_puts
        entries = self.layer_banks.read(key, layers)
        with self._lock:
            if not layers or not self._are_whole(key, request, n_puts, layers, entries):
                return None
            decode = self.layer_banks.decoder(request, entries, with_kv)
            if decode is None:
                return None
            self.layer_banks.used(key, layers)
            if self._tier is not None and self._tier.offer_again(key, request, entries) and self.elsewhere is not None:
                self.elsewhere.announce(key, request, self._tier.generation(request.scope))
        return decode()

    def put(
        self,
        scope: Scope,
        row: Row,
        states: Mapping[int, Mapping[str, Tensor]],
        features: Floats | None = None,
        vectors: Mapping[int, Floats] | None = None,
        fingerprint_epoch: int | None = None,
        generation: int | None = None,
    ) -> bool:
        """Store a request's states and let it be found; False when a state is larger than its bank and was left out.

        The named tensors of `states`, by layer, are given away: nobody writes to them again. The request is found by
        `vectors`, its fingerprint (F,) by layer, or by `features` (F0,) once the fingerprint is fitted; with neither it
        is not. Vectors of another `fingerprint_epoch` than that of now are dropped. A codec that has seen enough by now
        is fitted meanwhile. With the `generation` of its namespace from before it was computed, a request is written to
        the store as well; it is left out if the namespace was purged since.
        """
        with self._lock:
            if self._tier is not None and generation not in (None, self._tier.generation(scope)):
                return True
            known = self._requests.get(row.key)
            has_moved = known is not None and known.layout != row.layout
            is_anew = has_moved and states.keys() >= {*self.layer_banks.layers_of(row.key)}
            if has_moved and not is_anew:  # padding of two layouts must not be taken for one
                states = {layer: without_padding(tensors) for layer, tensors in states.items()}
            encoded = self.layer_banks.pack(row.key, scope, states)
            stored = {layer: entry for layer, entry in encoded.items() if self.layer_banks[layer].fits(entry)}
            if not stored or (is_anew and len(stored) < len(encoded)):
                return False
            try:
                request = self._know(scope, row, next(iter(states.values()))["hidden"].dtype)
                request.layout = row.layout if is_anew else request.layout
                request.n_puts += 1
                self._hold(row.key, stored)
                if request.is_pinned:
                    self._pin(row.key, request)
                if self._tier is not None and generation is not None:
                    self._tier.put(row.key, request, stored, generation)
                is_stale = fingerprint_epoch not in (None, self.fingerprint_epoch)
                self._index.put(scope, row, features, None if is_stale else vectors, stored)
                if self.elsewhere is not None and generation is not None:
                    self.elsewhere.announce(row.key, request, generation)
            except Exception:
                self._forget(row.key)  # half a request must not be found
                raise
        return len(stored) == len(encoded)

    def promote(self, scope: Scope, rows: Sequence[Row], with_kv: bool, generation: int) -> None:
        """Hold what the store has of requests that are not held, unless their namespace was purged since."""
        self._promote(scope, [Wanted(row.key, row.ids, row.n_valid) for row in rows], with_kv, generation)

    def fetch(self, scope: Scope, tokens_saved: Mapping[str, int], with_kv: bool, generation: int) -> None:
        """Likewise of requests that were found and are to serve, by key; one that the store has lost is found no more.

        `tokens_saved` says how much computing each saves.
        """
        if self._tier is None or self.elsewhere is None:
            return
        with self._lock:
            known = {key: self.elsewhere[key] for key in tokens_saved if key in self.elsewhere}
        if not known:
            return
        wanted = [Wanted(key, request.ids, tokens_saved[key]) for key, request in known.items()]
        self._promote(scope, wanted, with_kv, generation)
        if self._tier.is_answering:
            with self._lock:
                for key in known:
                    self.elsewhere.drop(key)

    def hear(self, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
        """Let requests be found that others announced."""
        assert self.elsewhere is not None
        with self._lock:
            for at, note in told:
                record = None if request_of(at) in self._requests else self.elsewhere.read(at, note)
                if record is not None:
                    self._index.insert(record.key, record.scope, record.slots[0])
                    request = StoredRequest(record.scope, record.ids, record.dtype, answer=record.answer)
                    self.elsewhere.add(record.key, request)

    def _promote(self, scope: Scope, wanted: Sequence[Wanted], with_kv: bool, generation: int) -> None:
        assert self._tier is not None and self.elsewhere is not None
        layers = self.layers if with_kv else self.layers[-1:]
        for record in self._tier.fetch(scope, self._tier.paying(wanted), layers, with_kv):
            with self._lock:
                fits = all(self.layer_banks[layer].fits(entry) for layer, entry in record.entries.items())
                if fits and record.key not in self._requests and self._tier.generation(scope) == generation:
                    known = self.elsewhere.pop(record.key, None)
                    self.adopt(record if known is None else known.within(record))

    def is_pinned(self, key: str) -> bool:
        """Whether a request serves others and may not leave: it is a source of a frozen calibration."""
        with self._lock:
            request = self._find(key)
            return request is not None and request.is_pinned

    def sign(self, key: str, answer: Floats, generation: int | None = None) -> None:
        """Note what a stored request was answered: its signature (S,). A request that has left is ignored.

        With the `generation` that it was put with, others may find it from then on.
        """
        with self._lock:
            if (request := self._requests.get(key)) is not None:
                request.answer = answer
                if self.elsewhere is not None and generation is not None:
                    self.elsewhere.announce(key, request, generation)

    def cost(self, key: str, cost: float) -> None:
        """Tell the policies what computing a stored request anew would take; see `Policy.on_cost`."""
        with self._lock:
            for bank in self.layer_banks.values():
                bank.cost(key, cost)

    def quarantine(self, key: str, namespace: str) -> None:
        """Let a request serve no other one from now on, only its own repeats, until `purge` or `clear`.

        It is found as before and may vote. So nothing but whether it serves changes for any request. It need not be
        stored.
        """
        with self._lock:
            self._quarantined[key] = namespace

    @property
    def quarantined(self) -> dict[str, str]:
        """Namespace of each request that was quarantined, by key."""
        with self._lock:
            return dict(self._quarantined)

    def stand(self, row: Row, vector: Floats, is_pinned: bool = False) -> bool:
        """Let others find a stored request by its fingerprint (F,), and pin it if asked to; whether it is there.

        What is pinned leaves by `purge`, `clear` and `search_by` alone.
        """
        with self._lock:
            request = self._requests.get(row.key)
            if request is None:
                return False
            vectors = dict.fromkeys(self.layers, vector)
            self._index.put(request.scope, row, None, vectors, self.layer_banks.layers_of(row.key))
            if is_pinned:
                self._pin(row.key, request)
            return True

    def search_by(self, fingerprint: Fingerprint | None) -> None:
        """Compare requests by another fingerprint, or none: nothing held is found, nor pinned, until it stands anew."""
        with self._lock:
            self.fingerprint_epoch += 1
            for request in self._requests.values():
                request.is_pinned = False
            self.layer_banks.release()
            self._index.use(fingerprint)
            if self.elsewhere is not None:
                self.elsewhere.restart()

    def should_check(self, key: str, layer: int) -> bool:
        with self._lock:
            return self.layer_banks[layer].should_check(key)

    def check(self, key: str, layer: int, fresh: Tensor, stored: Tensor) -> None:
        """Compare states (R, D) of a reuse that was computed instead, and let go of what must leave for it."""
        with self._lock:
            request, bank = self._requests.get(key), self.layer_banks[layer]
            if request is None or key not in bank:  # it left meanwhile
                return
            self.layer_banks.check(key, request, layer, fresh, stored)
            self._expire()
            if key not in bank and not self._index.by_layer:
                self._forget(key)  # a lower layer of it would give the same answer

    def purge(self, namespace: str) -> int:
        """Forget every request of a namespace and return how many there were. No codec is fitted on them later."""
        with self._lock:
            keys = [key for key, request in self._requests.items() if request.scope.namespace == namespace]
            for key in keys:
                self._forget(key)
            known = (self.elsewhere or {}).items()
            for key in [key for key, request in known if request.scope.namespace == namespace]:
                self._forget(key)
            self._quarantined = {key: name for key, name in self._quarantined.items() if name != namespace}
            self.layer_banks.packers.forget(namespace)
            self._index.purge(namespace)
            return len(keys)

    def clear(self) -> None:
        """Forget everything but what fingerprint and codecs learned."""
        with self._lock:
            for key in list(self._requests):
                self._forget(key)
            for key in list(self.elsewhere or ()):
                self._forget(key)
            self._quarantined.clear()
            self.layer_banks.packers.forget()
            self._index.clear()

    def records(self) -> list[SavedRequest]:
        """Everything held, oldest first, and sources that are pinned and not held.

        A request waiting for the fingerprint to be fitted has no slot yet.
        """
        with self._lock:
            self._expire()
            keys = list(self._requests)
            known = [(key, one) for key, one in (self.elsewhere or {}).items() if one.is_pinned]
            missing = [one.record(key, {}, self._index.slots(key)) for key, one in known]
        return [record for key in keys if (record := self._record(key)) is not None] + missing

    def adopt(self, record: SavedRequest) -> None:
        """Hold a saved request as if it had been put; one without states is known alone. Nothing finds it yet."""
        with self._lock:
            request = StoredRequest(record.scope, record.ids, record.dtype, record.layout, record.answer)
            if self.elsewhere is not None and not record.entries:
                request.is_pinned = record.is_pinned
                self.elsewhere[record.key] = request
                return
            self._requests[record.key] = request
            for layer, entry in record.entries.items():
                shown = self.layer_banks.learn(record.key, record.scope, layer, entry)
                self._hold(record.key, {layer: shown})
            if record.is_pinned:
                self._pin(record.key, request)

    def share(self, records: Iterable[SavedRequest], generation: int) -> None:
        """Have the store hold the states of requests, which were computed in that generation of their namespace."""
        assert self._tier is not None
        for one in records:
            request = StoredRequest(one.scope, one.ids, one.dtype, one.layout)
            self._tier.put(one.key, request, one.entries, generation)

    def with_states(self, records: Sequence[SavedRequest]) -> Iterator[SavedRequest]:
        """Requests of one scope as they were given, with the states that the store has of them. Reads it in batches."""
        assert self._tier is not None
        for first in range(0, len(records), _AT_ONCE):
            some = records[first : first + _AT_ONCE]
            wanted = [Wanted(one.key, one.ids, len(one.ids)) for one in some if one.key not in self._requests]
            found = {one.key: one for one in self._tier.fetch(some[0].scope, wanted, self.layers[-1:], False)}
            for one in some:
                own = found.get(one.key)
                yield one if own is None else replace(one, entries=own.entries, dtype=own.dtype, layout=own.layout)

    def stand_all(self, records: Sequence[SavedRequest]) -> None:
        """Let requests be found that are found nowhere, and pin those that were pinned; they need not be held."""
        with self._lock:
            for one in records:
                known = self._requests.get(one.key)
                if known is None:
                    fits = all(self.layer_banks[layer].fits(entry) for layer, entry in one.entries.items())
                    self.adopt(one if fits else replace(one, entries={}))
                    continue
                known.answer = one.answer
                if one.is_pinned:
                    self._pin(one.key, known)
            self.place(records)

    def place(self, records: Iterable[SavedRequest]) -> None:
        """Let adopted requests, found nowhere yet, be found, in the order in which they came to their partitions."""
        slots = [(slot, record.key) for record in records for slot in record.slots]
        with self._lock:
            self._index.insert_all(
                (key, request.scope, slot)
                for slot, key in sorted(slots, key=lambda one: one[0].slot)
                if (request := self._find(key)) is not None
            )

    def _record(self, key: str) -> SavedRequest | None:
        while True:  # until it is read whole: what is put or leaves meanwhile is another reading
            with self._lock:
                if (request := self._requests.get(key)) is None:
                    return None
                layers, n_puts = self.layer_banks.layers_of(key), request.n_puts
            entries = self.layer_banks.read(key, layers)
            with self._lock:
                if self._are_whole(key, request, n_puts, layers, entries):
                    return request.record(key, entries, self._index.slots(key))

    def _are_whole(
        self, key: str, request: StoredRequest, n_puts: int, layers: Sequence[int], entries: Mapping[int, Entry]
    ) -> bool:
        """Whether entries that were read without the lock are still the request's, and all that were wanted."""
        if self._requests.get(key) is not request or request.n_puts != n_puts:
            return False  # others were put under its key, maybe of another layout, or packed with another codec
        return len(layers) == len(entries)

    def _hold(self, key: str, entries: Mapping[int, Entry]) -> None:
        """Put entries by layer, for which others have made way."""
        self._incoming = sum(entry.nbytes for entry in entries.values())
        try:
            self._make_way()
            self.layer_banks.put(key, entries, self._let_go, None if self._tier is None else self._demote)
        finally:
            self._incoming = 0

    def _demote(self, layer: int, key: str, entry: Entry) -> None:
        """An entry is about to leave memory."""
        assert self._tier is not None
        if (request := self._requests.get(key)) is not None:
            self._tier.put(key, request, {layer: entry}, self._tier.generation(request.scope))

    def _find(self, key: str) -> StoredRequest | None:
        """A request that is held, or known without being held."""
        request = self._requests.get(key)
        return self.elsewhere.get(key) if request is None and self.elsewhere is not None else request

    def _known(self, key: str) -> StoredRequest:
        """A request that the index found."""
        request = self._find(key)
        assert request is not None
        return request

    def _know(self, scope: Scope, row: Row, dtype: torch.dtype) -> StoredRequest:
        """What is known of a request from now on; another one of the same key is forgotten."""
        request = self._requests.get(row.key)
        known = None if self.elsewhere is None else self.elsewhere.get(row.key)
        if known is not None and known.is_pinned and known.ids == row.ids:  # it is found already, and that stays
            assert self.elsewhere is not None
            request = self._requests[row.key] = self.elsewhere.pop(row.key)
        if request is None or request.ids != row.ids:
            self._forget(row.key)  # also what was announced of it
            request = self._requests[row.key] = StoredRequest(scope, row.ids, dtype, row.layout)
        return request

    def _pin(self, key: str, request: StoredRequest) -> None:
        request.is_pinned = True
        self.layer_banks.pin(key)

    def _expire(self) -> None:
        for layer, key in self.layer_banks.expire():
            self._let_go(layer, key)

    def _let_go(self, layer: int, key: str) -> None:
        """A layer's bank no longer holds this: drop its index row there, and everything with the last bank."""
        if key not in self._requests:
            return
        if self.layer_banks.layers_of(key):
            self._index.leave(key, layer)
        elif self.elsewhere is not None and self._index.finds(key):
            self.elsewhere.add(key, self._requests.pop(key))
        else:
            self._forget(key)

    def _forget(self, key: str) -> None:
        """Drop all traces of a request. If a part fails, the others are dropped all the same."""
        self._requests.pop(key, None)
        if self.elsewhere is not None:
            self.elsewhere.pop(key, None)
        with ExitStack() as stack:
            stack.callback(self.layer_banks.remove, key)
            stack.callback(self._index.forget, key)
