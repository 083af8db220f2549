"""What a store has to do, and the types that it is passed."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

#: Bytes of a value. What a store returns may lie in memory that it mapped.
Bytes: TypeAlias = bytes | bytearray | memoryview

MOST_NOTED = 65_536


@dataclass(frozen=True, slots=True)
class StoreKey:
    """Under which a value lies. Equal keys stand for equal values, so a value is never updated.

    Attributes:
        namespace: The caller's partition (tenant): any Unicode text.
        scope: SHA-256 (hex) of all but the tokens that decides a value: model, dtype, payload, codec and so on.
        name: Of the entry or block within its scope; at most 64 characters of ASCII.
    """

    namespace: str
    scope: str
    name: str

    @property
    def digest(self) -> bytes:
        """SHA-256 of all three, 32 bytes: no two keys have the same."""
        parts = (self.namespace, self.scope, self.name)
        return hashlib.sha256(b"".join(b"%d:%s" % (len(one), one) for one in map(str.encode, parts))).digest()


@dataclass(frozen=True, slots=True)
class Put:
    """A value that is to be stored.

    Attributes:
        key: Under which it lies.
        value: What `seal.Seal` made of it.
        generation: Of its namespace, from before it was computed; see `Store.generation`.
        note: Announced with it, at most `MOST_NOTED` bytes: its fingerprint, say.
    """

    key: StoreKey
    value: Bytes
    generation: int
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a store.

    Attributes:
        cursor: Its place among the events: `Store.events` goes on after it.
        kind: A value was `stored`, or `removed` for lack of room; or a namespace was `cleared`.
        namespace: Of which; None where all were cleared.
        key: Of the value; None of `cleared`.
        generation: Of `cleared`: the new one of the namespace; where all were cleared, of one that was never named.
        note: What a value was announced with.
    """

    cursor: str
    kind: Literal["stored", "removed", "cleared"]
    namespace: str | None
    key: StoreKey | None = None
    generation: int = 0
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class Events:
    """What happened since a cursor.

    Attributes:
        found: Events in their order.
        cursor: To go on with.
        is_complete: No event in between is missing. If not, look again at all that you know of the store.
    """

    found: Sequence[Event]
    cursor: str
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds.

    Attributes:
        n_values: Values held.
        nbytes: Bytes of these.
        max_bytes: Its budget; None: it is not this store's to set.
        n_evicted: Values that left for lack of room, since this store was opened.
    """

    n_values: int
    nbytes: int
    max_bytes: int | None = None
    n_evicted: int = 0


class Store(ABC):
    """Where sealed values of many caches lie, by key, behind the memory of their banks: a tier.

    One is opened by each cache that is told so. All that are opened with the same settings, in one process or several,
    share what they hold. Values are sealed and checked by `seal`, so a store moves bytes and need not look at them:
    what comes back damaged, or under another key, is found out and is a miss.

    Thread-safe: reads come from many threads, beside one call that writes. What fails raises `StoreError`: it is
    counted and logged, and the request is computed. A key that has no value is none, never an error. The store decides
    who leaves for lack of room; no value is owed to anybody.

    Purging is by generation: each namespace has a number. A value belongs to the one it was put with, and is returned
    only as long as that is the namespace's number. Numbers never come again, whatever the store lost.

    The constructor takes the setting's options as keyword arguments, checked against its annotations. What cannot be
    opened raises `ValueError`, with the cure.
    """

    @abstractmethod
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        """Return a value for each key, in their order; None where there is none, or it was not there by the deadline.

        What is returned stays as it is whatever becomes of the value, also after `close`. It counts as used. Of keys of
        one call the first count as used last.

        Args:
            keys: Any number of them; one may come twice.
            deadline: On the clock of `time.monotonic`, in seconds. Of one that has passed, nothing is returned.
        """

    @abstractmethod
    def put_many(self, puts: Sequence[Put]) -> None:
        """Store values; all stores find them when this returns. Called behind the answers, so it may take its time.

        Left out without a word is what does not fit the budget, and what was put with another generation than the
        namespace has by now. Where a key has a value, either of the two stays.
        """

    @abstractmethod
    def contains_prefix(self, keys: Sequence[StoreKey]) -> int:
        """Return how many of the keys have a value, from the first to the last before one that has none.

        These count as used, as in `get_many`.
        """

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """Return those of the keys that have no value.

        Called behind the answers, so it may take its time. By default `contains_prefix` is asked for each.
        """
        return [key for key in keys if not self.contains_prefix([key])]

    @abstractmethod
    def generation(self, namespace: str) -> int:
        """Return the number that a namespace has now, 0 or more."""

    def generations(self, namespaces: Sequence[str]) -> list[int]:
        """Return the numbers of several namespaces, in their order.

        Called where events may have been missed, while calls wait: raise an error rather than take seconds. By default
        `generation` is asked for each.
        """
        return [self.generation(namespace) for namespace in namespaces]

    @abstractmethod
    def remove(self, namespace: str | None) -> int:
        """Give a namespace, or all of them (None), another number, and return how many values that made unreachable.

        When this returns, no store returns any of them, and none accepts what was put with a number from before; the
        store that was called tells of it in `events`. Their bytes may go later. Returned are those that can be told at
        once; 0 where none can.
        """

    def discard(self, namespace: str) -> None:
        """Remove what lies in a namespace that nobody else reads, and of which nobody has anything in memory.

        By default `remove` is asked, which may wait until all who share the store have heard of it.
        """
        self.remove(namespace)

    @abstractmethod
    def events(self, since: str | None) -> Events:
        """Return what happened after a cursor, in all stores; None: nothing, and the cursor of now.

        Called in every call of the model, so it does not wait. A cursor is one that this store gave. One that is too
        old or unknown makes the answer incomplete: it then holds no event, and the cursor of now. Told are at least
        `stored` and `cleared`, within a second.
        """

    def notes(self, namespace: str) -> Iterator[tuple[StoreKey, Bytes]]:
        """Yield what values of a namespace were announced with, of those that are still held and had a note.

        Called behind the answers, by those who begin or have missed events. By default nothing: what was announced
        before somebody began is then not found by them.
        """
        return iter(())

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return what is held, by all that share it."""

    @abstractmethod
    def ping(self) -> None:
        """Raise `StoreError` unless the store can be asked now. Called before a store that failed is asked again."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held open. Calls that come later raise `StoreError`; closing again does nothing."""
