"""The store interface and the types of its arguments and results."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

#: The bytes of a value. A store may return memory-mapped bytes.
Bytes: TypeAlias = bytes | bytearray | memoryview

#: Version of names, values and indexes. Raised by every change to the meaning of a value, so versions share no values.
FORMAT = 5


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key of a value. Equal keys mean equal values, so a value is never updated.

    Attributes:
        namespace: The caller's partition (tenant): any Unicode text.
        scope: SHA-256 (hex) of everything except the tokens that determines a value: model, dtype, payload and so on.
        name: Name of the entry or block within its scope; at most 64 ASCII characters.
    """

    namespace: str
    scope: str
    name: str

    @property
    def digest(self) -> bytes:
        """SHA-256 of namespace, scope and name, 32 bytes; unique to the key."""
        parts = (self.namespace, self.scope, self.name)
        return hashlib.sha256(b"".join(b"%d:%s" % (len(one), one) for one in map(str.encode, parts))).digest()


@dataclass(frozen=True, slots=True)
class Put:
    """A value to store.

    Attributes:
        key: Key of the value.
        value: Bytes made by `seal.Seal`.
        number: Number of the namespace before the value was computed; see `Store.numbers`.
        since: A cursor from before the value was computed; see `Store.purges`.
    """

    key: StoreKey
    value: Bytes
    number: int
    since: str


def forgets_of(namespace: str) -> str:
    """Return the name under which stores count what they forget of a namespace: its number changes each time."""
    return f"{namespace}\0forgotten"


@dataclass(frozen=True, slots=True)
class Purge:
    """A purge: values of one namespace, a whole namespace, or everything.

    Attributes:
        namespace: The namespace, or None for all.
        names: Names of the forgotten values; empty for the whole namespace.
    """

    namespace: str | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Purges:
    """The purges since a cursor.

    Attributes:
        found: The purges, in order.
        cursor: The cursor to pass to the next call.
        is_complete: Whether no purge is missing. If False, compare the numbers of all namespaces you hold.
    """

    found: Sequence[Purge] = ()
    cursor: str = ""
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The size of a store.

    Attributes:
        n_values: Number of values held.
        nbytes: Their size in bytes.
        max_bytes: Budget in bytes; None if the server sets it.
        n_evicted: Values evicted for lack of room since this store was opened.
    """

    n_values: int
    nbytes: int
    max_bytes: int | None = None
    n_evicted: int = 0


class Memory(Protocol):
    """The memory of a cache that uses a store."""

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces with anything in memory."""

    def drop(self, namespace: str | None) -> int:
        """Forget a namespace, or all (None), and refuse later puts of calls already begun; return how many requests."""

    def drop_names(self, namespace: str, names: Sequence[str]) -> int:
        """Forget the entries, blocks and sources of these names, as `drop`."""


class Store(ABC):
    """Holds sealed values by key for any number of caches, beyond the memory of their banks.

    Each cache opens its own store. Stores opened with the same settings, in one process or several, share their values.
    `seal` makes and verifies values; a store only moves bytes. A damaged value, or one of another key, is a miss.

    Thread-safe: many threads read while one thread writes. A failure raises `StoreError`, which the cache counts and
    logs before it computes the request. A key without a value gives None, never an error. The store decides which
    values to evict for lack of room.

    Each namespace has a number. A value is returned only while its namespace still has the number the value was put
    with. A purge changes the number. A number is never used again, even if the store loses data. A value that was
    computed before its key was forgotten is never stored afterwards.

    The constructor takes the setting's options as keyword arguments, checked against its annotations. It raises
    `ValueError`, with the remedy, if the store cannot be opened.
    """

    @abstractmethod
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        """Return the value of each key, in order; None if there is none or it was not read by the deadline.

        The bytes stay valid after the value is removed and after `close`. Returned values count as used; the first
        keys of a call count as the most recently used.

        Args:
            keys: Any number of keys, possibly with duplicates.
            deadline: Time on the clock of `time.monotonic`, in seconds. Nothing is read after it.
        """

    @abstractmethod
    def put_many(self, puts: Sequence[Put]) -> None:
        """Store values; every store finds them once this returns. Called in the background, so it may be slow.

        Skipped silently are values that exceed the budget, whose number is no longer its namespace's, and whose key was
        forgotten after the cursor `since`; of a cursor that is too old or unknown, all. The check and the write are
        one step: no other store returns such a value, however briefly. If a key already has a value, either may remain.
        """

    @abstractmethod
    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """Return the keys that have no value. Called in the background, so it may be slow."""

    @abstractmethod
    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        """Return the current number of each namespace, 0 or more; raise `StoreError` if the store does not answer.

        Model calls wait for this: raise rather than take seconds. With no namespaces it checks that the store answers.
        """

    @abstractmethod
    def purge(self, namespace: str | None) -> int:
        """Change the number of a namespace, or of all (None); return how many values became unreachable.

        Once this returns, no store returns those values or accepts a value with an old number, and `purges` reports
        the purge. Their bytes may be removed later. The count covers values that are known at once; it may be 0.
        """

    @abstractmethod
    def forget(self, keys: Sequence[StoreKey]) -> None:
        """Remove values of one namespace, and report it in `purges`. No store returns any of them afterwards.

        The number of `forgets_of` the namespace changes. Keys may have no value: names of other kinds are reported too.
        """

    @abstractmethod
    def purges(self, since: str | None) -> Purges:
        """Return the purges by all stores after a cursor; with None, no purges and the current cursor.

        Runs in every call of the model, so it does not wait for a server. For a cursor that is too old or unknown, the
        result is incomplete: no purges, and the current cursor. A purge is reported before `purge` or `forget` returns.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the size of the values that these stores share."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. Later calls raise `StoreError`; closing again does nothing."""
