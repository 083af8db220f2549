"""Requests whose states lie in the store alone: others announced them, or they left memory for lack of room.

announced, or evicted -> found by the index as if they were held; sources of a calibration made elsewhere likewise
one is to serve       -> fetched from the store, and held from then on
it has left the store -> its index row goes as well; one that is pinned is found on, and votes
"""

import hashlib
from collections.abc import Callable

from llmcache.banks.entry_tier import EntryTier, request_of
from llmcache.banks.records import SavedRequest, StoredRequest
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.matching.fingerprint_index import FingerprintIndex

MOST = 65_536  # each takes its fingerprint and its tokens


class Elsewhere(dict[str, StoredRequest]):
    """Requests by key, the one that has been here longest first. The caller holds a lock."""

    def __init__(self, index: FingerprintIndex, tier: EntryTier, kind: str) -> None:
        """Begin with none; `kind` names the fingerprint and its options."""
        super().__init__()
        #: Digest of what makes the answers; None where decisions read none.
        self.answered_by: Callable[[], str] | None = None
        self._index = index
        self._tier = tier
        self._kind = kind
        self._state: str | None = None  # digest of what the fingerprint learned

    def restart(self) -> None:
        """Begin anew, with another fingerprint."""
        self.clear()
        self._state = None
        self._tier.hear_again()

    def add(self, key: str, request: StoredRequest) -> None:
        """Know a request that the index finds; the one that has been here longest makes way."""
        self[key] = request
        if len(self) > MOST and (leaving := next((k for k, known in self.items() if not known.is_pinned), None)):
            self.drop(leaving)

    def drop(self, key: str) -> None:
        """Find a request no more, unless it is pinned."""
        if (request := self.get(key)) is not None and not request.is_pinned:
            del self[key]
            self._index.forget(key)

    def announce(self, key: str, request: StoredRequest, generation: int) -> None:
        """Have others find a request that was put, once all is known that decisions read."""
        slots = self._index.slots(key)
        if slots and (self.answered_by is None or request.answer is not None) and (by := self._compared_by()):
            self._tier.announce(key, request, slots[0], by, generation)

    def read(self, at: StoreKey, note: Bytes) -> SavedRequest | None:
        """A request that was announced; None where it is known, or cannot be found here."""
        by = self._compared_by()
        return None if not by or request_of(at) in self else self._tier.heard(at, note, by)

    def _compared_by(self) -> str:
        """Digest of the fingerprint and of what makes the answers; "" while requests cannot be compared."""
        fingerprint = self._index.fingerprint
        if fingerprint is None or fingerprint.n_fit:
            return ""
        if self._state is None:
            learned = hashlib.sha256(self._kind.encode())
            for name, array in sorted(fingerprint.state().items()):
                learned.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
            self._state = learned.hexdigest()
        answered_by = "" if self.answered_by is None else self.answered_by()
        return hashlib.sha256(f"{self._state} {answered_by}".encode()).hexdigest()
