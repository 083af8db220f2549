"""All that is remembered: the requests, the index rows that find them, and the banks that hold their states.

A request is known while at least one bank holds a state of it; when the last bank lets go, its index row goes too.
Absent or expired is a miss, never an error. One lock guards everything; tensors handed out are never written again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmcache.bank import Bank
from llmcache.compression import Codec
from llmcache.compression.packer import Packer
from llmcache.context import Row, Scope
from llmcache.fingerprint import Fingerprint
from llmcache.index import Index
from llmcache.shelf import Neighbour, Place, Shelf
from llmcache.stores import Entry

Floats = NDArray[np.float32]
KV = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class State:
    """A stored state, decoded: hidden rows (R, D) and the K/V (H, n, D_h) of the layers it stands for."""

    hidden: Tensor
    kv: KV


@dataclass(frozen=True, slots=True)
class Record:
    """All that is held of one request, for saving and restoring.

    Attributes:
        key: Its exact key.
        scope: Its scope.
        ids: Its packed token ids.
        dtype: Dtype of its states as the model made them.
        entries: Encoded states by layer.
        places: Where it is found.
    """

    key: str
    scope: Scope
    ids: bytes
    dtype: torch.dtype
    entries: dict[int, Entry]
    places: tuple[Place, ...]


class Request:
    """What is known of one stored request besides its states."""

    __slots__ = ("_places", "dtype", "ids", "scope")

    def __init__(self, scope: Scope, ids: bytes, dtype: torch.dtype) -> None:
        """A request that no index finds yet.

        Args:
            scope: Its scope.
            ids: Its packed token ids.
            dtype: Dtype of its states as the model made them.
        """
        self.scope = scope
        self.ids = ids
        self.dtype = dtype
        self._places: tuple[Any, ...] = ()  # flat: a pair of its own would cost 70 bytes a request

    @property
    def places(self) -> tuple[tuple[Shelf, int], ...]:
        """Shelves and slots where it is found."""
        return tuple(zip(self._places[::2], self._places[1::2], strict=True))

    @places.setter
    def places(self, pairs: Iterable[tuple[Shelf, int]]) -> None:
        self._places = tuple(chain.from_iterable(pairs))


class Library:
    """Requests, shelves and banks, kept consistent. Thread-safe."""

    def __init__(
        self,
        banks: Mapping[int, Bank],
        make_codec: Callable[[], Codec],
        fingerprint: Fingerprint | None = None,
        make_index: Callable[[int], Index] | None = None,
        by_length: bool = False,
        by_layer: bool = False,
    ) -> None:
        """Start empty.

        Args:
            banks: By layer, at least one.
            codec: Encodes states before they are stored.
            fingerprint: Projects features to search vectors; None when nothing is searched.
            make_index: `dim -> empty index`; needed with a fingerprint.
            by_length: Requests of different lengths never find each other.
            by_layer: Each layer is searched by itself, as the paper does.
        """
        self.banks = dict(sorted(banks.items()))
        self.packers = {layer: Packer(make_codec()) for layer in self.banks}
        self.fingerprint = fingerprint
        self._make_index = make_index
        self._by_length = by_length
        self._by_layer = by_layer
        self._requests: dict[str, Request] = {}
        self._shelves: dict[tuple[Scope, int, int | None], Shelf] = {}
        self._waiting: dict[str, tuple[Row, Floats]] = {}  # until the fingerprint is fitted
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def layers(self) -> tuple[int, ...]:
        """Stored layers, first to last."""
        return tuple(self.banks)

    @property
    def nbytes(self) -> int:
        """Bytes of all states held."""
        return sum(bank.nbytes for bank in self.banks.values())

    def known(self, row: Row) -> bool:
        """Whether the very same request is stored; a row of the same key but other tokens is not."""
        with self._lock:
            request = self._requests.get(row.key)
            return request is not None and request.ids == row.ids

    def is_lossless(self, key: str) -> bool:
        """Whether the request's states come back bit for bit."""
        with self._lock:
            request = self._requests.get(key)
            codecs = (packer.codec for packer in self.packers.values())
            return request is not None and all(codec.is_lossless(request.dtype) for codec in codecs)

    def held(self, key: str) -> list[int]:
        """Layers whose bank holds a state of the request."""
        with self._lock:
            self._expire()
            return [layer for layer, bank in self.banks.items() if key in bank]

    def search(
        self, scope: Scope, rows: Sequence[Row], vectors: Floats, k: int = 1, layer: int | None = None
    ) -> list[list[Neighbour]]:
        """The nearest stored requests of each row, best first.

        Args:
            scope: Only requests of this scope are found.
            rows: The requests; decide the length where lengths are kept apart.
            vectors: Their fingerprints (B, F).
            k: How many neighbours.
            layer: The layer to search, when each is searched by itself.
        """
        lengths = [self._length(row) for row in rows]
        found: list[list[Neighbour]] = [[] for _ in rows]
        with self._lock:
            self._expire()
            for length in set(lengths):  # one search unless lengths are kept apart
                shelf = self._shelves.get((scope, length, layer))
                if shelf is None or len(shelf) == 0:
                    continue
                members = [i for i, other in enumerate(lengths) if other == length]
                for i, near in zip(members, shelf.search(vectors[members], k), strict=True):
                    found[i] = near
        return found

    def read(self, key: str, layer: int, with_kv: bool, is_single: bool = False) -> State | None:
        """A stored state, or None when some of what is needed is not held.

        Args:
            key: The stored request.
            layer: The layer whose output is wanted.
            with_kv: Whether K/V of the skipped layers are needed as well.
            is_single: Only this layer is skipped, not those below.
        """
        with self._lock:
            request, entry = self._requests.get(key), self.banks[layer].read(key)
            if request is None or entry is None:
                return None
            kv = self._read_kv(key, layer, is_single, request.dtype) if with_kv else {}
            if kv is None:
                return None
            for served_by in self.layers if with_kv and not is_single else (layer,):
                if served_by <= layer:  # banks that gave K/V served the request too
                    self.banks[served_by].used(key)
        return State(self.packers[layer].unpack("hidden", entry, request.dtype), kv)

    def put(
        self,
        scope: Scope,
        row: Row,
        states: Mapping[int, Mapping[str, Tensor]],
        features: Floats | None = None,
        vector: Floats | None = None,
    ) -> bool:
        """Store a request's states and let it be found. A codec that has seen enough by now is fitted meanwhile.

        Args:
            scope: Its scope.
            row: The request.
            states: Named tensors by layer; layers without a bank are not allowed.
            features: What the fingerprint reads (F0,), or None when it is not to be searched.
            vector: Its projection (F,), where that is known already.

        Returns:
            False when a state is larger than its bank and was left out.
        """
        with self._lock:
            encoded = {layer: self.packers[layer].pack(tensors) for layer, tensors in states.items()}
            stored = [layer for layer, entry in encoded.items() if self.banks[layer].fits(entry)]
            if not stored:
                return False
            request = self._requests.get(row.key)
            if request is None or request.ids != row.ids:
                self._forget(row.key)
                dtype = next(iter(states.values()))["hidden"].dtype
                request = self._requests[row.key] = Request(scope, row.ids, dtype)
            try:
                for layer in stored:
                    self.banks[layer].put(row.key, encoded[layer], partial(self._let_go, layer=layer))
                if features is not None:
                    self._shelve(request, row, features, vector, stored)
                for layer in stored:
                    self._learn(row.key, layer, encoded[layer])
            except Exception:
                self._forget(row.key)  # half a request must not be found
                raise
        return len(stored) == len(encoded)

    def should_check(self, key: str, layer: int) -> bool:
        """Whether an approximate reuse is to be computed instead, and compared: the layer's policy decides."""
        with self._lock:
            return self.banks[layer].should_check(key)

    def checked(self, key: str, layer: int, divergence: float) -> None:
        """Note how a check came out, 1 - cosine of fresh and stored state, and let go of what must leave for it."""
        with self._lock:
            self.banks[layer].checked(key, divergence)
            self._expire()

    def purge(self, namespace: str) -> int:
        """Forget every request of a namespace and return how many there were."""
        with self._lock:
            keys = [key for key, request in self._requests.items() if request.scope.namespace == namespace]
            for key in keys:
                self._forget(key)
                self._unlearn(key)
            self._shelves = {key: shelf for key, shelf in self._shelves.items() if key[0].namespace != namespace}
            return len(keys)

    def clear(self) -> None:
        """Forget everything but what fingerprint and codecs learned."""
        with self._lock:
            for key in list(self._requests):
                self._forget(key)
                self._unlearn(key)
            self._shelves.clear()

    def records(self) -> list[Record]:
        """Everything held, oldest first. A request waiting for the fingerprint to be fitted has no place yet."""
        with self._lock:
            self._expire()
            return [
                Record(
                    key,
                    request.scope,
                    request.ids,
                    request.dtype,
                    {layer: entry for layer, bank in self.banks.items() if (entry := bank.read(key))},
                    tuple(Place(shelf.layer, shelf.length, shelf.vector(slot)) for shelf, slot in request.places),
                )
                for key, request in self._requests.items()
            ]

    def adopt(self, record: Record) -> None:
        """Hold a saved request as if it had been put."""
        with self._lock:
            request = self._requests[record.key] = Request(record.scope, record.ids, record.dtype)
            for layer, entry in record.entries.items():
                self.banks[layer].put(record.key, entry, partial(self._let_go, layer=layer))
                self._learn(record.key, layer, entry)
            for place in record.places:
                self._place(record.key, request, place)

    def _learn(self, key: str, layer: int, entry: Entry) -> None:
        """Show a stored entry to its layer's codec. Once that is fitted, what is held so far is packed, too."""
        packer = self.packers[layer]
        if packer.learn(key, entry):
            self.banks[layer].repack(packer.repack)

    def _unlearn(self, key: str) -> None:
        """Have no codec fitted on a request that was forgotten on demand; one that was evicted may still serve."""
        for packer in self.packers.values():
            packer.forget(key)

    def _read_kv(self, key: str, layer: int, is_single: bool, dtype: torch.dtype) -> KV | None:
        """K/V of the layers that a reuse at `layer` skips; each entry holds those since the stored layer below it."""
        kv: KV = {}
        for stored in self.layers:
            if stored > layer:
                break
            if is_single and stored < layer:
                continue
            entry = self.banks[stored].read(key)
            if entry is None or "keys" not in entry.tensors:
                return None
            keys, values = (self.packers[stored].unpack(name, entry, dtype) for name in ("keys", "values"))
            first = stored + 1 - len(keys)
            kv |= {first + i: pair for i, pair in enumerate(zip(keys, values, strict=True))}
        return kv

    def _shelve(
        self, request: Request, row: Row, features: Floats, vector: Floats | None, layers: Iterable[int]
    ) -> None:
        """Make a request findable, at once or when the fingerprint has seen enough to be fitted."""
        assert self.fingerprint is not None
        if needed := self.fingerprint.n_fit:
            self._waiting[row.key] = (row, features)
            if len(self._waiting) >= needed:
                self._fit()
            return
        if vector is None:
            vector = self.fingerprint.project(features[None])[0]
        for layer in layers if self._by_layer else (None,):
            self._place(row.key, request, Place(layer, self._length(row), vector))

    def _length(self, row: Row) -> int:
        return row.n_valid if self._by_length else 0

    def _place(self, key: str, request: Request, place: Place) -> None:
        """Put a request on the shelf it belongs to, unless it stands there already."""
        if any(shelf.layer == place.layer for shelf, _ in request.places):
            return
        assert self._make_index is not None
        shelf_key = (request.scope, place.length, place.layer)
        shelf = self._shelves.get(shelf_key)
        if shelf is None:
            shelf = self._shelves[shelf_key] = Shelf(*shelf_key, self._make_index(len(place.vector)))
        request.places = (*request.places, (shelf, shelf.add(key, place.vector)))

    def _fit(self) -> None:
        assert self.fingerprint is not None
        waiting, self._waiting = self._waiting, {}
        self.fingerprint.fit(np.stack([features for _, features in waiting.values()]))
        for key, (row, features) in waiting.items():
            if request := self._requests.get(key):
                self._shelve(request, row, features, None, [layer for layer, bank in self.banks.items() if key in bank])

    def _expire(self) -> None:
        for layer, bank in self.banks.items():
            for key in bank.expire():
                self._let_go(key, layer)

    def _let_go(self, key: str, layer: int) -> None:
        """A layer's bank no longer holds this: drop its index row there, and everything with the last bank."""
        request = self._requests.get(key)
        if request is None:
            return
        if not any(key in bank for bank in self.banks.values()):
            self._forget(key)
        elif self._by_layer:
            gone = [place for place in request.places if place[0].layer == layer]
            request.places = tuple(place for place in request.places if place[0].layer != layer)
            for shelf, slot in gone:
                self._take_down(shelf, slot)

    def _forget(self, key: str) -> None:
        """Drop all traces of a request. If a part fails, the others are dropped all the same."""
        self._waiting.pop(key, None)
        request = self._requests.pop(key, None)
        with ExitStack() as stack:
            for bank in self.banks.values():
                stack.callback(bank.remove, key)
            for shelf, slot in () if request is None else request.places:
                stack.callback(self._take_down, shelf, slot)

    def _take_down(self, shelf: Shelf, slot: int) -> None:
        """Remove a request from its shelf, and an empty shelf with it: scopes come and go with weights and tenants."""
        shelf.remove(slot)
        if len(shelf) == 0:
            self._shelves.pop((shelf.scope, shelf.length, shelf.layer), None)
