"""A store behind the memory of one cache: asked for what is not in memory, written to behind the answers.

    each call     -> follow   what other processes purged leaves the memory
    a local miss  -> read     values of all rows, checked; who asks holds them in memory from then on
    a local put   -> write    behind the answers, with the number that its namespace had when the call was read

Trouble here costs speed, never correctness: it is counted, logged once, and the request is computed.
"""

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol, TypeVar

from torch import Tensor

from llmcache.counters import Counters
from llmcache.request.call import Call
from llmcache.request.rows import Scope
from llmcache.stats import TierStats
from llmcache.stores.base import FORMAT, Bytes, Store, StoreKey
from llmcache.stores.break_even import BreakEven
from llmcache.stores.seal import MismatchError, Opened, Seal
from llmcache.stores.write_behind import NO_NUMBER, Job, WriteBehind
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

_T = TypeVar("_T")
_REST_S = 1.0  # after a question for a number that was not answered
_MOST_NAMES = 10_000  # of namespaces and scopes that are known


class Memory(Protocol):
    """The memory that a store lies behind."""

    def namespaces(self) -> Iterable[str]:
        """Namespaces with anything in memory."""

    def drop(self, namespace: str | None) -> int:
        """Forget a namespace, None: all; also what calls that are under way would put. Returns how many requests."""

    def drop_keys(self, keys: Iterable[str]) -> int:
        """Forget entries and blocks by key; returns how many requests."""


class Tier:
    """A store and how one cache uses it. Thread-safe."""

    def __init__(
        self,
        store: Store,
        seal: Seal,
        settings: str,
        counters: Counters,
        memory: Memory,
        least_tokens: int | None = None,
    ) -> None:
        """Use an open store, which is closed when this is gone.

        `settings` say all that decides values beside a scope and the tokens. `memory` forgets what is purged.
        """
        self._store, self._seal, self._settings = store, seal, settings
        self._behind = WriteBehind(store, seal, counters)
        weakref.finalize(self, self._behind.close)  # also when the interpreter ends, which must not meet it in torch
        self.break_even = BreakEven(least_tokens)
        self._memory = memory
        self._following = forkable(threading.RLock())
        self._cursor: str | None = None
        #: Of all namespaces that memory holds anything of; `NO_NUMBER` where the store did not tell.
        self._numbers: dict[str, int] = {}
        self._n_changes = 0  # of these, by purges
        self._ask_again_s = 0.0
        self._scopes: dict[Scope, str] = {}
        self._counts: Counter[str] = Counter()
        self._mismatched: Counter[str] = Counter()
        self._read_s = 0.0
        self.follow()  # from now on: what was purged before is not in memory
        self._cursor = self._cursor or ""  # of a store that is not there yet, purges may be missing when it is

    # -- purges --------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Have memory forget what was purged in the store, before this returns."""
        with self._following:  # another call that comes meanwhile is not to find what is being forgotten
            try:  # whether or not it is asked for values: no purge is to be missed
                told = self._store.purges(self._cursor)
            except Exception as error:
                if not self._behind.reads.is_open:
                    self._behind.failed("follow the store", error)
                return
            if told.cursor == self._cursor:
                return
            if told.is_complete:
                for purge in told.found:
                    self._forget(purge.namespace, purge.names)
            elif self._cursor is not None:
                self._compare()
            self._cursor = told.cursor

    def number(self, namespace: str) -> int:
        """The number with which values of a namespace are put; `NO_NUMBER` where the store does not tell."""
        for is_last in (False, False, True):
            if (known := self._numbers.get(namespace, NO_NUMBER)) != NO_NUMBER:
                return known
            n_changes, found = self._n_changes, self._ask_number(namespace)
            with self._following:
                if n_changes != self._n_changes:  # by a purge: the answer may be from before it
                    if not is_last:
                        continue  # another call may have been told meanwhile
                    found = NO_NUMBER
                elif found != NO_NUMBER and self._numbers.get(namespace) == NO_NUMBER:
                    self._forget(namespace)  # nobody knows whether what is held came before a purge
                if len(self._numbers) >= _MOST_NAMES:
                    held = {*self._memory.namespaces()}
                    self._numbers = {name: number for name, number in self._numbers.items() if name in held}
                self._numbers[namespace] = found
                break
        return found

    def _ask_number(self, namespace: str) -> int:
        """Ask the store for a number, even while reads fail: without it no value of the namespace is written."""
        if monotonic() < self._ask_again_s or (self._behind.reads.is_open and self._behind.is_resting):
            return NO_NUMBER
        said = self._ask("ask the store for a number", lambda: self._store.numbers([namespace]), is_urgent=True)
        self._ask_again_s = 0.0 if said else monotonic() + _REST_S
        return said[0] if said else NO_NUMBER

    def numbers(self) -> Mapping[str, int]:
        """The known numbers of all namespaces that memory may hold."""
        with self._following:
            return {name: number for name, number in self._numbers.items() if number != NO_NUMBER}

    def expect(self, numbers: Mapping[str, int]) -> None:
        """Note the numbers from when a save was made, now that it fills the memory; the next `follow` compares them."""
        with self._following:
            self._numbers |= numbers
            self._cursor = ""

    def purge(self, namespace: str | None) -> int:
        """Purge a namespace (None: all) in the store and in memory; returns how many requests memory held.

        Raises:
            StoreError: The store could not, and may still serve what it holds. It is gone from memory.
        """
        try:
            self._store.purge(namespace)  # which may take its time; calls go on meanwhile
        finally:  # whether or not the store can tell of it
            with self._following:
                n_requests = self._forget(namespace)
        self.follow()  # with what others did
        return n_requests

    def forget(self, scope: Scope, names: Sequence[str]) -> int:
        """Forget single values in the store and in memory; returns how many requests memory held."""
        self._behind.drain()  # what waits is not to be put afterwards
        try:
            self._store.forget([self._key(scope, name) for name in names])
        finally:
            with self._following:
                n_requests = self._forget(scope.namespace, names)
        return n_requests

    def _forget(self, namespace: str | None, names: Sequence[str] = ()) -> int:
        """Have memory forget. The caller holds the lock."""
        self._n_changes += 1
        if names:
            return self._memory.drop_keys([name.partition(".")[2] for name in names])
        if namespace is None:
            self._numbers.clear()
        else:
            self._numbers.pop(namespace, None)
        n_requests = self._memory.drop(namespace)
        self._n_changes += 1  # for who asked meanwhile
        return n_requests

    def _compare(self) -> None:
        """Forget the namespaces whose numbers have changed, or are not told: purges may be missing."""
        known = dict(self._numbers)
        said = self._ask("ask the store for numbers", lambda: self._store.numbers(list(known)), is_urgent=True)
        now = dict(zip(known, said or (), strict=False))
        gone = [name for name, number in known.items() if now.get(name) != number]
        for name in gone:
            self._forget(name)
        if gone:
            more = "" if len(gone) == 1 else f", and {len(gone) - 1} more"
            logger.warning("llmcache: forgotten, as it may have been purged, is namespace %r%s", min(gone), more)

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, asked: Sequence[tuple[Scope, str]], n_tokens: int) -> list[Opened | None]:
        """Read values by scope and name, in their order, at once; together they save computing `n_tokens`."""
        if not (asked and self.break_even.pays(n_tokens)):
            return [None] * len(asked)
        started, deadline = perf_counter(), monotonic() + self.break_even.patience_s(n_tokens)
        found = self._get(asked, deadline, open_until=deadline)
        took_s, n_found = perf_counter() - started, sum(one is not None for one in found)
        self._counts["asked"] += len(asked)
        self._counts["found"] += n_found
        self._read_s += took_s
        if n_found:
            self.break_even.read(n_tokens, took_s)
        return found

    def computed(self, call: Call, n_tokens: int) -> None:
        """Note how long a call took to compute; not on accelerators, where that means waiting for the device."""
        if call.arguments["input_ids"].device.type == "cpu":
            self.break_even.computed(n_tokens, call.computing_s)

    def peek(self, asked: Sequence[tuple[Scope, str]], patience_s: float) -> list[Opened | None]:
        """Read values likewise, but however much they save, and uncounted; those that came in time are all opened."""
        return self._get(asked, monotonic() + patience_s, open_until=inf)

    def write(
        self, scope: Scope, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], number: int
    ) -> None:
        """Write a value behind the answers, unless the store has it. Nobody writes to its tensors any more."""
        self._behind.add(Job(self._key(scope, name), number, tensors, about))

    @property
    def has_dropped(self) -> bool:
        """Whether values were dropped, which may be written again; see `lacks`."""
        return self._behind.has_dropped

    def lacks(self, scope: Scope, name: str) -> bool:
        """Whether a value was dropped; the caller writes it again."""
        return self._behind.take_dropped(self._key(scope, name))

    def _get(self, asked: Sequence[tuple[Scope, str]], deadline: float, open_until: float) -> list[Opened | None]:
        keys = [self._key(*one) for one in asked]
        values = self._ask("read from the store", lambda: self._store.get_many(keys, deadline))
        return [
            None if value is None or monotonic() >= open_until else self._opened(key, value)
            for key, value in zip(keys, values or [None] * len(keys), strict=True)
        ]

    def _opened(self, key: StoreKey, value: Bytes) -> Opened | None:
        try:
            return self._seal.open(key, value)
        except MismatchError as error:
            self._mismatched[error.reason] += 1
            return None

    def _key(self, scope: Scope, name: str) -> StoreKey:
        if (digest := self._scopes.get(scope)) is None:
            if len(self._scopes) >= _MOST_NAMES:  # a namespace for each session, say
                self._scopes.clear()
            digest = hashlib.sha256(scope.key + f"{FORMAT} {self._settings}".encode()).hexdigest()
            self._scopes[scope] = digest
        return StoreKey(scope.namespace, digest, name)

    def _ask(self, what: str, act: Callable[[], _T], is_urgent: bool = False, is_of_call: bool = True) -> _T | None:
        """The store's answer; None if it fails, or failed so often that only urgent questions are asked."""
        if (self._behind.reads.is_open and not is_urgent) or self._behind.is_closed:
            return None
        try:
            said = act()
        except Exception as error:
            if not self._behind.reads.is_open:
                self._behind.failed(what, error, is_of_call)
            return None
        if not self._behind.reads.is_open:  # else the thread that writes looks first
            self._behind.reads.succeeded()
        return said

    # -- the rest ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until what was put is written or dropped."""
        self._behind.drain()

    def close(self) -> None:
        """Write what waits, and close the store."""
        self._behind.close()

    def stats(self) -> TierStats:
        """Count what this cache read and wrote, and what the store holds."""
        held = self._ask("ask the store what it holds", self._store.stats, is_of_call=False)
        return TierStats(
            n_asked=self._counts["asked"],
            n_found=self._counts["found"],
            n_mismatched=dict(self._mismatched),
            n_written=self._behind.n_written,
            n_dropped=self._behind.n_dropped,
            read_ms=1e3 * self._read_s,
            least_tokens=self.break_even.least_tokens,
            is_answering=not self._behind.reads.is_open,
            n_values=None if held is None else held.n_values,
            nbytes=None if held is None else held.nbytes,
            max_bytes=None if held is None else held.max_bytes,
            n_evicted=None if held is None else held.n_evicted,
        )
