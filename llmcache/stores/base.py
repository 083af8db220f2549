"""The interface of stores, and the types that they are passed."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

#: Bytes of a value. What a store returns may lie in memory that it mapped.
Bytes: TypeAlias = bytes | bytearray | memoryview

#: The format of names, values and indexes. Each change of what a value means raises it: versions never share values.
FORMAT = 3


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key of a value. Equal keys stand for equal values, so a value is never updated.

    Attributes:
        namespace: The caller's partition (tenant): any Unicode text.
        scope: SHA-256 (hex) of all else but the tokens that decides a value: model, dtype, payload and so on.
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
    """A value to be stored.

    Attributes:
        key: Its key.
        value: Its bytes, as `seal.Seal` makes them.
        number: The number that its namespace had before the value was computed; see `Store.numbers`.
    """

    key: StoreKey
    value: Bytes
    number: int


@dataclass(frozen=True, slots=True)
class Purge:
    """A purge: values of one namespace, a whole namespace, or everything.

    Attributes:
        namespace: The namespace; None: all.
        names: Names of values in it; empty: all of it.
    """

    namespace: str | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Purges:
    """The purges since a cursor.

    Attributes:
        found: The purges, in order.
        cursor: The cursor to go on with.
        is_complete: No purge is missing. If one may be, compare the numbers of all namespaces that you hold.
    """

    found: Sequence[Purge] = field(default=())
    cursor: str = ""
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The size of a store.

    Attributes:
        n_values: Values held.
        nbytes: Bytes of these.
        max_bytes: Its budget; None: others set it.
        n_evicted: Values that left for lack of room, since this store was opened.
    """

    n_values: int
    nbytes: int
    max_bytes: int | None = None
    n_evicted: int = 0


class Store(ABC):
    """Holds sealed values of many caches, by key, behind the memory of their banks.

    Each cache opens its own. All that are opened with the same settings, in one process or several, share their values.
    Values are sealed and checked by `seal`: a store moves bytes. A value that comes back damaged, or under another key,
    is a miss.

    Thread-safe: reads come from many threads, beside one call that writes. A failure raises `StoreError`: it is
    counted and logged, and the request is computed. A key without a value gives None, never an error. The store decides
    which values leave for lack of room.

    Each namespace has a number. A value belongs to the number it was put with, and is returned only while that is the
    namespace's number. A purge gives another number. Numbers never come again, whatever the store lost.

    The constructor takes the setting's options as keyword arguments, checked against its annotations. It raises
    `ValueError`, with the cure, if the store cannot be opened.
    """

    @abstractmethod
    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        """Return a value for each key, in their order; None where there is none, or it was not there by the deadline.

        The bytes stay as they are whatever becomes of the value, also after `close`. The value counts as used; of the
        keys of one call the first count as used last.

        Args:
            keys: Any number of them; one may come twice.
            deadline: On the clock of `time.monotonic`, in seconds. Once it has passed, nothing is read.
        """

    @abstractmethod
    def put_many(self, puts: Sequence[Put]) -> None:
        """Store values; all stores find them when this returns. Called behind the answers, so it may take its time.

        Values that do not fit the budget are left out without a word, and so are those with another number than their
        namespace has by now. Where a key has a value, either of the two stays.
        """

    @abstractmethod
    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        """Return those of the keys that have no value. Called behind the answers, so it may take its time."""

    @abstractmethod
    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        """Return the number that each namespace has now, 0 or more; raise `StoreError` if the store does not answer.

        Called while calls wait: raise rather than take seconds. Without namespaces it tells whether the store answers.
        """

    @abstractmethod
    def purge(self, namespace: str | None) -> int:
        """Give a namespace, or all of them (None), another number, and return how many values that made unreachable.

        When this returns, no store returns any of them, none accepts a value with a number from before, and `purges`
        tells of it. Their bytes may go later. The count is of those that can be told at once; 0 where none can.
        """

    @abstractmethod
    def forget(self, keys: Sequence[StoreKey]) -> None:
        """Remove values of one namespace, and tell of it in `purges`: no store returns any of them afterwards."""

    @abstractmethod
    def purges(self, since: str | None) -> Purges:
        """Return what all stores purged after a cursor; None: nothing, and the cursor of now.

        Called in every call of the model, so it does not wait for a server. A cursor that is too old, or that this
        store did not give, makes the answer incomplete: it then holds no purge, and the cursor of now. A purge is told
        by the time that it returns.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return what all stores that share these values hold together."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. Calls that come later raise `StoreError`; closing again does nothing."""
