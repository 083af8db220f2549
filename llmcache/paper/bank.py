"""(2, 3, 5) A layer's cache bank: stored states, the index of their fingerprints, and the eviction policy.

Sizes: B rows, R rows of a payload, D hidden width, F0 features, F fingerprint width; of K/V: S layers, H heads,
n tokens, D_h width.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcache.memory.index import Index
from llmcache.memory.policies import Policy
from llmcache.models.packing import cosine_distance
from llmcache.paper.codecs import Codec
from llmcache.paper.packer import Packer
from llmcache.request.rows import Scope
from llmcache.support.arrays import Floats, below
from llmcache.support.stacks import pack, unpack


class Kind(NamedTuple):
    """What two requests must have in common for one to serve the other."""

    scope: Scope
    length: int  # valid tokens; 0 if the payload fits any length
    has_kv: bool


@dataclass(slots=True, eq=False)
class Entry:
    """The stored output of one layer for one request."""

    key: str  # of the request, see `Row.key`
    kind: Kind
    tensors: dict[str, Tensor]  # packed: `hidden` (R, D); where K/V is kept, also `keys` and `values` (S, H, n, D_h)
    dtypes: dict[str, torch.dtype]  # before packing; under autocast those of K/V differ
    number: int | None = None  # id of its fingerprint in the index; None until the fingerprint is fitted

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class State(NamedTuple):
    """The output that one layer computed for one request, to be stored."""

    layer: int
    key: str
    kind: Kind
    tensors: dict[str, Tensor]  # as `Entry.tensors`, not packed
    vector: Floats | None  # fingerprint (F,); None until the fingerprint is fitted
    features: Floats | None  # features (F0,) of the fingerprint; None once it is fitted


class LayerBank:
    """Entries of one layer, within budgets. Not thread-safe: the caller holds a lock."""

    def __init__(
        self,
        policy: Policy,
        make_codec: Callable[[], Codec],
        make_index: Callable[[int], Index],
        max_bytes: int,
        max_entries: int | None,
    ) -> None:
        """Create an empty bank. `make_codec` is called once for each state of the weights, `make_index` with F."""
        self.policy = policy
        self.max_bytes, self.max_entries = max_bytes, inf if max_entries is None else max_entries
        self._make_codec, self._make_index = make_codec, make_index
        self.entries: dict[str, Entry] = {}  # by key, oldest first
        self.packers: dict[str, Packer] = {}  # by digest of the weights
        self.latest = Packer(make_codec())  # packer of the weights that stored last
        self._indexes: dict[Kind, Index] = {}
        self._key_of: dict[int, str] = {}  # keys by number in the index
        self._n_numbers = 0
        self.nbytes = self.n_evicted = self.n_expelled = 0

    @property
    def index_nbytes(self) -> int:
        return sum(index.nbytes for index in self._indexes.values())

    def search(self, kinds: Sequence[Kind], vectors: Floats) -> list[tuple[Entry, float] | None]:
        """Return for each request, by fingerprints (B, F), the nearest entry of its kind and their similarity."""
        self._expire()
        found: list[tuple[Entry, float] | None] = [None] * len(kinds)
        for kind in set(kinds):
            if not (index := self._indexes.get(kind)):
                continue
            rows = [row for row, other in enumerate(kinds) if other == kind]
            numbers, similarities = index.search(vectors[rows], 1)
            for row, number, similarity in zip(rows, numbers[:, 0].tolist(), similarities[:, 0].tolist(), strict=True):
                if number in self._key_of:
                    found[row] = self.entries[self._key_of[number]], similarity
                elif number >= 0:  # an earlier removal failed
                    index.remove(np.array([number]))
        return found

    def put(self, key: str, kind: Kind, tensors: Mapping[str, Tensor], vector: Floats | None) -> bool:
        """Store a state, evicting entries to make room; return False if it is larger than the bank.

        The arguments are those of `State`. An earlier entry of the key is replaced. The bank takes the tensors over.
        """
        packer = self._packer(kind.scope.weights)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        entry = Entry(key, kind, packer.pack(tensors), dtypes)
        if packer.learn(key, kind.scope.namespace, tensors["hidden"]):
            entry.tensors = packer.encode(tensors)
            # Those stored before are packed as well. Their policy ranks do not change.
            for other in self.entries.values():
                if other.kind.scope.weights == kind.scope.weights:
                    self.nbytes -= other.nbytes
                    other.tensors = packer.encode(other.tensors)
                    self.nbytes += other.nbytes
        return self._hold(entry, vector)

    def index_vector(self, key: str, vector: Floats) -> None:
        """Add the fingerprint (F,) of an entry to the index. An unknown key is ignored."""
        if (entry := self.entries.get(key)) is None:
            return
        if (index := self._indexes.get(entry.kind)) is None:
            index = self._indexes[entry.kind] = self._make_index(len(vector))
        number, self._n_numbers = self._n_numbers, self._n_numbers + 1
        try:
            index.add(np.array([number]), vector[None])
        except BaseException:  # the index may have added it before it failed
            with suppress(Exception):
                index.remove(np.array([number]))
            raise
        entry.number = number
        self._key_of[number] = key

    def vector(self, entry: Entry) -> Floats | None:
        """Return the fingerprint (F,) of an entry from the index; None if it has none yet."""
        return None if entry.number is None else self._indexes[entry.kind].vectors(np.array([entry.number]))[0]

    def unpack(self, entry: Entry) -> dict[str, Tensor]:
        """Return the unpacked tensors of an entry, exact up to the loss of compression. Safe in any thread."""
        codec = self.packers[entry.kind.scope.weights].codec
        return {name: codec.decode(name, entry.tensors, dtype) for name, dtype in entry.dtypes.items()}

    def check(self, entry: Entry, fresh: Tensor, stored: Tensor) -> None:
        """Report to the policy the distance of a computed state (R, D) from the stored one, both after compression."""
        if (packer := self.packers.get(entry.kind.scope.weights)) is not None:
            self.policy.on_check(entry.key, cosine_distance(packer.round_trip(fresh), stored))
            self._expire()

    def remove(self, key: str) -> None:
        """Remove an entry. An unknown key is ignored."""
        self.policy.on_remove(key)
        if (entry := self.entries.pop(key, None)) is None:
            return
        self.nbytes -= entry.nbytes
        if entry.number is not None:
            del self._key_of[entry.number]  # first: the entry is not found even if the index fails
            index = self._indexes[entry.kind]
            index.remove(np.array([entry.number]))
            if len(index) == 0:  # kinds come and go with weights and tenants
                del self._indexes[entry.kind]

    def clear(self, namespace: str | None = None) -> None:
        """Remove the entries of a namespace, or all (None), and its rows that codecs wait for. Fitted codecs stay."""
        for key in [key for key, entry in self.entries.items() if namespace in (None, entry.kind.scope.namespace)]:
            self.remove(key)
        for packer in self.packers.values():
            packer.waiting = {k: rows for k, rows in packer.waiting.items() if namespace not in (None, rows[0])}

    def state(self, weights: str) -> tuple[list[Any], dict[str, Tensor]]:
        """Return the entries for these weights, for `restore`: JSON data, and tensors by name."""
        records = []
        for entry in self.entries.values():
            if entry.kind.scope.weights == weights:
                tensors, vector = dict(entry.tensors), self.vector(entry)
                if vector is not None:
                    tensors["vector"] = torch.from_numpy(vector)
                dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in entry.dtypes.items()}
                scope, length, has_kv = entry.kind
                records.append((tensors, [entry.key, astuple(scope), length, has_kv, dtypes]))
        codec = {} if weights not in self.packers else self.packers[weights].codec.state()
        notes, packed = pack(records)
        return notes, packed | {f"codec.{name}": tensor.cpu() for name, tensor in codec.items()}

    def restore(self, weights: str, notes: Sequence[Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Load what `state` returned, with tensors on `device`."""
        self._packer(weights).codec.restore(below("codec.", tensors))
        packed = {name: tensor for name, tensor in tensors.items() if "/" in name}
        for held, (key, scope, length, has_kv, dtypes) in unpack(notes, packed):
            vector = held.pop("vector", None)
            entry = Entry(
                key,
                Kind(Scope(*scope), length, has_kv),
                {name: tensor.to(device) for name, tensor in held.items()},
                {name: getattr(torch, dtype) for name, dtype in dtypes.items()},
            )
            self._hold(entry, None if vector is None else vector.numpy())

    def _hold(self, entry: Entry, vector: Floats | None) -> bool:
        """Add an entry, evicting others to make room; return False if it is larger than the bank."""
        if entry.nbytes > self.max_bytes:
            return False
        self.remove(entry.key)
        while self.entries and (len(self.entries) >= self.max_entries or self.nbytes + entry.nbytes > self.max_bytes):
            self.remove(self.policy.victim())
            self.n_evicted += 1
        self.policy.on_put(entry.key, entry.nbytes)
        self.entries[entry.key] = entry
        self.nbytes += entry.nbytes
        if vector is not None:
            try:
                self.index_vector(entry.key, vector)
            except BaseException:
                self.remove(entry.key)
                raise
        return True

    def _expire(self) -> None:
        for key in self.policy.expired():
            self.remove(key)
            self.n_expelled += 1

    def _packer(self, weights: str) -> Packer:
        """Return the packer for these weights; a new one drops the packers of weights without entries."""
        if weights not in self.packers:
            held = {entry.kind.scope.weights for entry in self.entries.values()}
            self.packers = {other: packer for other, packer in self.packers.items() if other in held}
            self.packers[weights] = Packer(self._make_codec())
        self.latest = self.packers[weights]
        return self.latest
