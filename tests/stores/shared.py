"""A store as a user would write it, with public names only: a dict that the caches of one process share."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from llmcache import Store, StoreError
from llmcache.memory.stores import Bytes, Purge, Purges, Put, StoreKey, StoreStats, forgets_of


@dataclass
class Place:
    """The data that stores of one name share."""

    values: dict[StoreKey, tuple[int, bytes]] = field(default_factory=dict)  # with the number of their namespace
    n_purged: Counter[str | None] = field(default_factory=Counter)  # by namespace; None: all
    told: list[Purge] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


class Shared(Store):
    """A dict for all stores of one name in this process."""

    n_used = 0
    places: ClassVar[dict[str, Place]] = defaultdict(Place)

    def __init__(self, place: str = "default") -> None:
        """Open the shared data of this name."""
        self.place, self.is_open = self.places[place], True

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        type(self).n_used += 1
        self.check_open()
        with self.place.lock:
            return [self.find(key) if time.monotonic() < deadline else None for key in keys]

    def put_many(self, puts: Sequence[Put]) -> None:
        self.check_open()
        with self.place.lock:
            for put in puts:
                if put.number == self.number(put.key.namespace) and not self.is_forgotten(put):
                    self.place.values[put.key] = put.number, bytes(put.value)

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        self.check_open()
        return [key for key in keys if self.find(key) is None]

    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        self.check_open()
        return [self.number(namespace) for namespace in namespaces]

    def purge(self, namespace: str | None) -> int:
        with self.place.lock:
            gone = [key for key in self.place.values if namespace in (None, key.namespace)]
            for key in gone:
                del self.place.values[key]
            self.place.n_purged[namespace] += 1
            self.place.told.append(Purge(namespace))
            return len(gone)

    def forget(self, keys: Sequence[StoreKey]) -> None:
        with self.place.lock:
            for key in keys:
                self.place.values.pop(key, None)
            self.place.n_purged[forgets_of(keys[0].namespace)] += 1
            self.place.told.append(Purge(keys[0].namespace, tuple(key.name for key in keys)))

    def purges(self, since: str | None) -> Purges:
        told = self.place.told
        if since is None or not since.isdigit():
            return Purges((), str(len(told)), is_complete=since is None)
        found = told[int(since) :]
        return Purges(found, str(int(since) + len(found)))

    def stats(self) -> StoreStats:
        self.check_open()
        with self.place.lock:
            values = self.place.values.values()
            return StoreStats(len(values), sum(len(value) for _, value in values))

    def close(self) -> None:
        self.is_open = False

    def check_open(self) -> None:
        if not self.is_open:
            raise StoreError("the store is closed")

    def number(self, namespace: str) -> int:
        return self.place.n_purged[None] + self.place.n_purged[namespace]

    def is_forgotten(self, put: Put) -> bool:
        later = self.place.told[int(put.since) :] if put.since.isdigit() else [Purge(None, (put.key.name,))]
        return any(put.key.name in purge.names for purge in later)

    def find(self, key: StoreKey) -> bytes | None:
        number, value = self.place.values.get(key, (None, None))
        return value if number == self.number(key.namespace) else None
