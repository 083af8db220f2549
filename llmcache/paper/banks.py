"""The banks of all layers under one lock, and what they share: generations, and the fingerprint's fit.

Sizes: B rows, F0 features, F fingerprint width, R rows of a payload.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.arrays import Floats, below
from llmcache.heap import Trimmer
from llmcache.paper.bank import Entry, Kind, LayerBank
from llmcache.paper.fingerprints import Fingerprint
from llmcache.policies import Policy
from llmcache.threads import forkable


class Banks(dict[int, LayerBank]):
    """Banks by layer, first to last. Methods are thread-safe."""

    def __init__(
        self, banks: Mapping[int, LayerBank], tau: Mapping[int, float], fingerprint: Fingerprint, device: torch.device
    ) -> None:
        """Begin empty.

        Args:
            banks: By layer.
            tau: Least similarity of a hit, by the same layers.
            fingerprint: By which they are searched; fitted here, if it has to be.
            device: Of entries.
        """
        super().__init__(sorted(banks.items()))
        self._tau, self._fingerprint, self._device = tau, fingerprint, device
        self._lock = forkable(threading.RLock())  # a signal's handler may ask for the stats
        self._waiting: dict[str, tuple[str, Floats]] = {}  # by key: namespace, features (F0,) that wait for the fit
        self._n_clears = Counter[str]()
        self._n_clears_of_all = 0
        self._trimmer = Trimmer()
        self._heeds_costs = any(type(bank.policy).on_cost is not Policy.on_cost for bank in banks.values())

    def generation(self, namespace: str) -> int:
        """How often a namespace was cleared, alone or with all others."""
        return self._n_clears_of_all + self._n_clears[namespace]

    def search(
        self, layer: int, kinds: Sequence[Kind], vectors: Floats, keys: Sequence[str]
    ) -> tuple[list[tuple[Entry, float] | None], list[bool], list[float | None]]:
        """Search a layer's bank.

        Args:
            layer: Its number.
            kinds: Of the requests, B.
            vectors: Their fingerprints (B, F).
            keys: Of those that may be computed all the same, to be compared with what they would get; else "". A
                repeat of the entry's own request is not: it would show nothing.

        Returns:
            Of each request: the entry that is similar enough, with its similarity, or None; whether it is to be
            checked; and the similarity of the nearest entry, None where there is none.
        """
        bank, checks = self[layer], [False] * len(kinds)
        with self._lock:
            found = bank.search(kinds, vectors)
            nearest = [None if near is None else near[1] for near in found]
            for row, near in enumerate(found):
                if near is None or round(near[1], 6) < self._tau[layer]:  # a repeat's own may be off by rounding
                    found[row] = None
                elif keys[row] not in ("", near[0].key) and bank.policy.should_check(near[0].key):
                    checks[row] = True
                else:
                    bank.policy.on_hit(near[0].key)
        return found, checks, nearest

    def put(
        self,
        states: Sequence[tuple[int, str, Kind, dict[str, Tensor], Floats | None, Floats | None]],
        checks: Sequence[tuple[int, Entry, Tensor, Tensor]],
        generation: int,
    ) -> int:
        """Store what a call computed, unless its namespace was cleared since; returns how many are too large.

        Args:
            states: Layer, key, kind and tensors (see `Entry`), fingerprint (F,), and its features (F0,) if it waits.
            checks: Layer, entry, and two states (R, D): the one computed, and the entry's as it came back.
            generation: Of the namespace, when the call began.
        """
        computed = [one for _, _, _, tensors, _, _ in states for one in tensors.values()]
        moved = _move([*computed, *(fresh for _, _, fresh, _ in checks)], self._device)
        n_too_large, seen = 0, set[tuple[int, str]]()
        with self._lock:
            if states and generation != self.generation(states[0][2].scope.namespace):
                return 0
            for layer, key, kind, named, vector, features in states:
                tensors = {name: next(moved) for name in named}
                if (layer, key) in seen:  # the same request, twice in a call
                    continue
                seen.add((layer, key))
                if not self[layer].put(key, kind, tensors, vector):
                    n_too_large += 1
                elif vector is None and features is not None:
                    self._wait(key, kind.scope.namespace, features)
            for layer, entry, _, stored in checks:
                self[layer].check(entry, next(moved), stored)
            n_held = sum(len(bank.entries) for bank in self.values())
        self._trimmer.stored(len(seen), n_held)
        return n_too_large

    def tell_costs(self, cost_ms: Mapping[str, float]) -> None:
        """Tell policies what computing requests took, by key."""
        if self._heeds_costs:
            with self._lock:
                for bank in self.values():
                    for key in cost_ms.keys() & bank.entries.keys():
                        bank.policy.on_cost(key, cost_ms[key])

    def drop(self, namespace: str | None = None) -> int:
        """Forget a namespace, None: all; returns how many requests they were."""
        with self._lock:
            if namespace is None:
                self._n_clears_of_all += 1
            else:
                self._n_clears[namespace] += 1
            before = self._keys()
            for bank in self.values():
                bank.clear(namespace)
            self._waiting = {key: one for key, one in self._waiting.items() if namespace not in (None, one[0])}
            return len(before - self._keys())

    def forget(self, keys: Iterable[str]) -> int:
        """Forget requests by key; returns how many were there."""
        gone = set(keys)
        with self._lock:
            found = gone & (self._keys() | self._waiting.keys())
            for key in found:
                self._waiting.pop(key, None)
                for bank in self.values():
                    bank.remove(key)
            return len(found)

    def held(self) -> dict[str, Any]:
        """What is held, by the names of `Stats`."""
        with self._lock:
            banks = self.items()
            return {
                "n_entries": {layer: len(bank.entries) for layer, bank in banks},
                "n_evicted": {layer: bank.n_evicted for layer, bank in banks},
                "n_expelled": {layer: bank.n_expelled for layer, bank in banks},
                "n_stored": len(self._keys()),
                "nbytes": sum(bank.nbytes for _, bank in banks),
                "nbytes_by_layer": {layer: bank.nbytes for layer, bank in banks},
                "max_nbytes_by_layer": {layer: bank.max_bytes for layer, bank in banks},
                "index_nbytes": sum(bank.index_nbytes for _, bank in banks),
                "reconstruction_error": {layer: bank.latest.loss.relative_error for layer, bank in banks},
                "reconstruction_distance": {layer: bank.latest.loss.cosine_distance for layer, bank in banks},
            }

    def state(self, weights: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What `restore` needs, of entries of these weights: metadata that JSON holds, and tensors by name."""
        with self._lock:
            learned = self._fingerprint.state().items()
            tensors = {f"fingerprint.{name}": torch.from_numpy(array) for name, array in learned}
            for number, (_, features) in enumerate(self._waiting.values()):
                tensors[f"waiting.{number}"] = torch.from_numpy(features)
            waiting = [[key, namespace] for key, (namespace, _) in self._waiting.items()]
            meta: dict[str, Any] = {"banks": {}, "waiting": waiting, "weights": weights}
            for layer, bank in self.items():
                meta["banks"][str(layer)], of_bank = bank.state(weights)
                tensors |= {f"{layer}.{name}": tensor for name, tensor in of_bank.items()}
        return meta, tensors

    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave.

        Raises:
            KeyError: A part is missing.
            ValueError: The parts do not fit each other.
        """
        with self._lock:
            learned = below("fingerprint.", tensors)
            self._fingerprint.restore({name: tensor.numpy() for name, tensor in learned.items()})
            for number, (key, namespace) in enumerate(meta["waiting"]):
                self._waiting[key] = namespace, tensors[f"waiting.{number}"].numpy()
            for layer, notes in meta["banks"].items():
                self[int(layer)].restore(meta["weights"], notes, below(f"{layer}.", tensors), self._device)

    def _keys(self) -> set[str]:
        return {key for bank in self.values() for key in bank.entries}

    def _wait(self, key: str, namespace: str, features: Floats) -> None:
        """Keep features until the fingerprint is fitted; once it is, all that waited can be found."""
        self._waiting[key] = namespace, features
        if len(self._waiting) < self._fingerprint.n_fit:
            return
        waiting, self._waiting = self._waiting, {}
        if self._fingerprint.n_fit:  # else another layer of the same request, or another call, has come to it
            self._fingerprint.fit([of_one for _, of_one in waiting.values()])
        vectors = self._fingerprint.project(np.stack([of_one for _, of_one in waiting.values()]))
        for name, vector in zip(waiting, vectors, strict=True):
            for bank in self.values():
                if name in bank.entries and bank.entries[name].number is None:
                    bank.point(name, vector)


def _move(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copies on a device, with one synchronisation for all; those that are there already as they are."""
    with torch.inference_mode(False), torch.no_grad():
        moved = [one.to(device, non_blocking=one.is_cuda) for one in tensors]
    if tensors and tensors[0].is_cuda and device.type == "cpu":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return iter(moved)
