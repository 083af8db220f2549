"""(2) All banks, and what their states are packed with: what is held of a request, at all its layers.

Sizes: R rows of a payload, D hidden width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from llmcache.banks import kv
from llmcache.banks.bank import Bank
from llmcache.banks.compression import Codec
from llmcache.banks.compression.packer import Loss, Packer
from llmcache.banks.compression.packers import Packers
from llmcache.banks.entry import Entry
from llmcache.banks.records import StoredRequest, StoredState
from llmcache.models.payloads import cosine_distance
from llmcache.request.rows import Scope

HIDDEN_PADDING = f"{kv.PADDING}hidden"


class LayerBanks(dict[int, Bank]):
    """Banks by layer, first to last. The caller holds a lock, but to `read`."""

    def __init__(
        self, banks: Mapping[int, Bank], make_codec: Callable[[], Codec], requests: Mapping[str, StoredRequest]
    ) -> None:
        super().__init__(sorted(banks.items()))
        self.packers = Packers(make_codec, self)
        self._requests = requests

    @property
    def nbytes(self) -> int:
        return sum(bank.nbytes for bank in self.values())

    @property
    def losses(self) -> dict[int, Loss]:
        """What compression lost by layer, of states of the weights that stored last."""
        return {layer: packer.loss for layer, packer in self.packers.latest.items()}

    def layers_of(self, key: str) -> list[int]:
        return [layer for layer, bank in self.items() if key in bank]

    def read(self, key: str, layers: Iterable[int]) -> dict[int, Entry]:
        """Encoded states of a request by layer, of those that are held. Without the lock: they are copied."""
        return {layer: entry for layer in layers if (entry := self[layer].read(key)) is not None}

    def is_lossless(self, request: StoredRequest) -> bool:
        """Whether the states of a request come back bit for bit."""
        packers = self.packers[request.scope.weights].values()
        return all(packer.codec.is_lossless(request.dtype) for packer in packers)

    def needed(self, key: str, layer: int, with_kv: bool, is_single: bool) -> list[int]:
        """Layers whose entries make up a state, its own last; none when one is not held. See `CacheBanks.read`."""
        layers = [n for n in self if n < layer and with_kv and not is_single] + [layer]
        return layers if all(key in self[n] for n in layers) else []

    def used(self, key: str, layers: Iterable[int]) -> None:
        """Tell the policies that a request was served: banks that gave K/V served it, too."""
        for layer in layers:
            self[layer].used(key)

    def decoder(
        self, request: StoredRequest, entries: Mapping[int, Entry], with_kv: bool
    ) -> Callable[[], StoredState] | None:
        """What decodes entries that were read of a request, the layer of its state last; None where K/V is missing.

        It may be called without the lock: entries are never written again.
        """
        *_, (layer, entry) = entries.items()
        if with_kv and not all(kv.is_held(other) for other in entries.values()):
            return None
        # As they are now: once the lock is let go, entries of another layout may be stored, or other packers be made.
        packers, layout, dtype = self.packers[request.scope.weights], request.layout, request.dtype

        def decode() -> StoredState:
            unpack = partial(packers[layer].unpack, entry=entry, dtype=dtype)
            padding = unpack(HIDDEN_PADDING) if HIDDEN_PADDING in entry.tensors else None
            pairs = kv.read(entries, packers, dtype) if with_kv else {}
            padding_pairs = kv.read(entries, packers, dtype, kv.PADDING) if with_kv else {}
            return StoredState(unpack("hidden"), pairs, padding, padding_pairs, layout)

        return decode

    def pack(self, key: str, scope: Scope, states: Mapping[int, Mapping[str, Tensor]]) -> dict[int, Entry]:
        """Encode what is about to be stored of a request: named tensors by layer, given away."""
        packers = self._packers_of(scope)
        return {layer: self.learn(key, scope, layer, packers[layer].pack(states[layer])) for layer in states}

    def learn(self, key: str, scope: Scope, layer: int, entry: Entry) -> Entry:
        """Show an entry to its codec. Once that is fitted, what it was shown is packed; returns the entry to store."""
        packer, bank = self.packers[scope.weights][layer], self[layer]
        if not packer.learn(key, scope.namespace, entry):
            return entry
        held = [other for other, known in self._requests.items() if known.scope.weights == scope.weights]
        bank.repack([other for other in held if other in bank], packer.repack)
        return packer.repack(entry)

    def put(
        self,
        key: str,
        entries: Mapping[int, Entry],
        let_go: Callable[[int, str], None],
        demote: Callable[[int, str, Entry], None] | None,
    ) -> None:
        """Hold entries by layer; layer and key of those that leave are told, see `Bank.put`."""
        for layer, entry in entries.items():
            self[layer].put(key, entry, partial(let_go, layer), None if demote is None else partial(demote, layer))

    def check(self, key: str, request: StoredRequest, layer: int, fresh: Tensor, stored: Tensor) -> None:
        """Tell a bank how far a state (R, D) that was computed is from the one that it holds, as that comes back.

        The computed one goes through the codec first, so that what compression loses is not taken for a difference.
        """
        returned = self.packers[request.scope.weights][layer].there_and_back(fresh)
        self[layer].checked(key, cosine_distance(returned, stored))

    def pin(self, key: str) -> None:
        """Let nothing but `remove` make a request leave."""
        for bank in self.values():
            bank.pin(key)

    def release(self) -> None:
        for bank in self.values():
            bank.release()

    def expire(self) -> Iterator[tuple[int, str]]:
        """Remove what must leave whatever the budget: layer and key of each, when it has left."""
        for layer, bank in self.items():
            for key in bank.expire():
                yield layer, key

    def remove(self, key: str) -> None:
        """Let go of a request. If one bank fails, the others let go all the same."""
        with ExitStack() as stack:
            for bank in self.values():
                stack.callback(bank.remove, key)

    def _packers_of(self, scope: Scope) -> dict[int, Packer]:
        """The packers for states of a scope, which are about to be stored."""
        if scope.weights not in self.packers:
            self.packers.keep({request.scope.weights for request in self._requests.values()})
        self.packers.latest = self.packers[scope.weights]
        return self.packers.latest
