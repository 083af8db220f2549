"""The banks of all layers under one lock, with shared purges and the fit of the fingerprint.

Sizes: B rows, F0 features, F fingerprint width, R rows of a payload.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcache.memory.policies import Policy
from llmcache.memory.purges import Purges
from llmcache.paper.bank import Entry, Kind, LayerBank, State
from llmcache.paper.fingerprints import Fingerprint
from llmcache.support.arrays import Floats, below
from llmcache.support.heap import Trimmer
from llmcache.support.threads import forkable


class Near(NamedTuple):
    """The nearest entry of a request."""

    entry: Entry
    similarity: float  # of the two fingerprints
    may_serve: bool  # the similarity is at least `tau`
    is_checked: bool  # the request is computed anyway and compared instead of served


class Check(NamedTuple):
    """Two states (R, D) of a layer to compare: the computed one, and the unpacked one of an entry."""

    layer: int
    entry: Entry
    fresh: Tensor
    stored: Tensor


class Banks(dict[int, LayerBank]):
    """Banks by layer, first to last. Methods are thread-safe."""

    def __init__(
        self, banks: Mapping[int, LayerBank], tau: Mapping[int, float], fingerprint: Fingerprint, device: torch.device
    ) -> None:
        """Take one bank and one `tau` per layer, the least similarity of a hit. `fingerprint` is fitted here."""
        super().__init__(sorted(banks.items()))
        self._tau, self._fingerprint, self._device = tau, fingerprint, device
        self._lock = forkable(threading.RLock())  # reentrant: a signal handler may ask for the stats
        self._waiting: dict[str, tuple[str, Floats]] = {}  # until the fit, by key: namespace, features (F0,)
        self._trimmer = Trimmer()
        self.purges = Purges()
        self._heeds_costs = any(type(bank.policy).on_cost is not Policy.on_cost for bank in banks.values())

    def search(self, layer: int, kinds: Sequence[Kind], vectors: Floats, keys: Sequence[str]) -> list[Near | None]:
        """Return the nearest entry of each request in a layer's bank; None if there is none.

        Args:
            layer: Layer number.
            kinds: Kinds of the B requests.
            vectors: Their fingerprints (B, F).
            keys: Their keys; "" if a request must not be checked. A repeat of the entry's own request is not checked
                either, as it would show nothing.
        """
        bank, nearest = self[layer], list[Near | None]()
        with self._lock:
            for key, found in zip(keys, bank.search(kinds, vectors), strict=True):
                if found is None:
                    nearest.append(None)
                    continue
                entry, similarity = found
                may_serve = round(similarity, 6) >= self._tau[layer]  # a repeat may be off by rounding
                is_checked = may_serve and key not in ("", entry.key) and bank.policy.should_check(entry.key)
                if may_serve and not is_checked:
                    bank.policy.on_hit(entry.key)
                nearest.append(Near(entry, similarity, may_serve, is_checked))
        return nearest

    def put(self, states: Sequence[State], checks: Sequence[Check], generation: int) -> int:
        """Store the states of a call that were not purged since `generation`; return how many are too large."""
        computed = [tensor for state in states for tensor in state.tensors.values()]
        moved = _move([*computed, *(check.fresh for check in checks)], self._device)
        n_too_large, seen = 0, set[tuple[int, str]]()
        with self._lock:
            for state in states:
                tensors = {name: next(moved) for name in state.tensors}
                is_current = self.purges.is_current(state.kind.scope.namespace, state.key, generation)
                if not is_current or (state.layer, state.key) in seen:  # the same request may be twice in a call
                    continue
                seen.add((state.layer, state.key))
                if not self[state.layer].put(state.key, state.kind, tensors, state.vector):
                    n_too_large += 1
                elif state.vector is None and state.features is not None:
                    self._queue_features(state.key, state.kind.scope.namespace, state.features)
            for check in checks:
                self[check.layer].check(check.entry, next(moved), check.stored)
            n_held = sum(len(bank.entries) for bank in self.values())
        self._trimmer.stored(len(seen), n_held)
        return n_too_large

    def report_costs(self, cost_ms: Mapping[str, float]) -> None:
        """Report the cost of computing requests to the policies, in milliseconds by key."""
        if self._heeds_costs:
            with self._lock:
                for bank in self.values():
                    for key in cost_ms.keys() & bank.entries.keys():
                        bank.policy.on_cost(key, cost_ms[key])

    def drop(self, namespace: str | None = None) -> int:
        """Remove the entries of a namespace, or all (None); return how many requests they belonged to."""
        with self._lock:
            self.purges.clear(namespace)
            before = self._keys()
            for bank in self.values():
                bank.clear(namespace)
            self._waiting = {
                key: features for key, features in self._waiting.items() if namespace not in (None, features[0])
            }
            return len(before - self._keys())

    def forget(self, keys: Iterable[str]) -> int:
        """Remove requests by key; return how many were held."""
        gone = set(keys)
        with self._lock:
            self.purges.forget(gone)
            found = gone & (self._keys() | self._waiting.keys())
            for key in found:
                self._waiting.pop(key, None)
                for bank in self.values():
                    bank.remove(key)
            return len(found)

    def held(self) -> dict[str, Any]:
        """Return the fields of `Stats` about held entries, by name."""
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
        """Return the entries for these weights, for `restore`: JSON data, and tensors by name."""
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
        """Load what `state` returned.

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

    def _queue_features(self, key: str, namespace: str, features: Floats) -> None:
        """Queue features until there are enough to fit the fingerprint; then index the vectors of all in the queue."""
        self._waiting[key] = namespace, features
        if len(self._waiting) < self._fingerprint.n_fit:
            return
        waiting, self._waiting = self._waiting, {}
        if self._fingerprint.n_fit:  # else another layer of the same request, or another call, has fitted it
            self._fingerprint.fit([of_one for _, of_one in waiting.values()])
        vectors = self._fingerprint.project(np.stack([of_one for _, of_one in waiting.values()]))
        for name, vector in zip(waiting, vectors, strict=True):
            for bank in self.values():
                if name in bank.entries and bank.entries[name].number is None:
                    bank.index_vector(name, vector)


def _move(tensors: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Move tensors to a device with one synchronisation; tensors already there are not copied."""
    with torch.inference_mode(False), torch.no_grad():
        moved = [tensor.to(device, non_blocking=tensor.is_cuda) for tensor in tensors]
    if tensors and tensors[0].is_cuda and device.type == "cpu":
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return iter(moved)
