"""A store as one cache uses it: read on a miss in memory, written in the background.

    each call     -> follow   removes from memory what other processes purged
    a local miss  -> read     returns the verified values of all rows; the caller puts them into memory
    a local put   -> write    queues a value, with the number and the cursor from when the call was read

A failure costs speed, never correctness: it is counted, logged once, and the request is computed.
"""

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic, perf_counter
from typing import Any, TypeVar

from torch import Tensor

from llmcache.memory.stores.base import FORMAT, Bytes, Memory, Store, StoreKey, forgets_of
from llmcache.memory.stores.break_even import BreakEven
from llmcache.memory.stores.seal import MismatchError, Opened, Seal
from llmcache.memory.stores.write_behind import NO_NUMBER, Job, WriteBehind
from llmcache.request.counters import Counters
from llmcache.request.rows import Scope
from llmcache.stats import TierStats
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

_T = TypeVar("_T")
_REST_S = 1.0  # pause after the store failed to return a number
_MOST_NAMES = 10_000  # remembered namespaces and scopes
_UNKNOWN = NO_NUMBER, NO_NUMBER


class Tier:
    """A store as one cache uses it. Thread-safe."""

    def __init__(
        self,
        store: Store,
        seal: Seal,
        settings: str,
        counters: Counters,
        memory: Memory,
        least_tokens: int | None = None,
    ) -> None:
        """Use an open store, and close it when this object is collected.

        `settings` is a text of everything that determines values besides scope and tokens. Purges apply to `memory`.
        """
        self._store, self._seal, self._settings = store, seal, settings
        self._behind = WriteBehind(store, seal, counters)
        self.drain, self.close = self._behind.drain, self._behind.close
        weakref.finalize(self, self._behind.close)  # also at exit, when the thread must not be running torch
        self.break_even = BreakEven(least_tokens)  # told how long calls on the CPU took to compute
        self._memory = memory
        self._following = forkable(threading.RLock())
        self._cursor: str | None = None
        #: Numbers of all namespaces in memory, and of `forgets_of` them; `_UNKNOWN` if the store did not return them.
        self._numbers: dict[str, tuple[int, int]] = {}
        self._n_changes = 0  # changes of these numbers by purges
        self._ask_again_s = 0.0
        self._scopes: dict[Scope, str] = {}
        self._n_asked = self._n_found = 0
        self._mismatched: Counter[str] = Counter()
        self._read_s = 0.0
        self.follow()  # starts at the current cursor: memory holds nothing from earlier purges
        self._cursor = self._cursor or ""  # of an unreachable store: when it answers, purges may be missing

    # -- purges --------------------------------------------------------------------------------------------------------

    def follow(self) -> str:
        """Remove from memory what was purged in the store since the last call; return the cursor reached."""
        with self._following:  # keeps other calls from finding what is being forgotten
            try:  # even while reads are suspended: no purge may be missed
                purges = self._store.purges(self._cursor)
            except Exception as error:
                if not self._behind.reads.is_open:
                    self._behind.failed("follow the store", error)
                return self._cursor or ""
            if purges.cursor != self._cursor:
                if purges.is_complete:
                    for purge in purges.found:
                        self._forget(purge.namespace, purge.names)
                elif self._cursor is not None:
                    self._compare()
                self._cursor = purges.cursor
            return purges.cursor

    def number(self, namespace: str) -> int:
        """Return the number to put a namespace's values with; `NO_NUMBER` if the store does not return one."""
        for is_last in (False, False, True):
            if (known := self._numbers.get(namespace, _UNKNOWN)) != _UNKNOWN:
                return known[0]
            n_changes, current = self._n_changes, self._ask_number(namespace)
            self.follow()  # memory must know of every purge that the number does
            with self._following:
                if n_changes != self._n_changes:  # a purge meanwhile: the number may be outdated
                    if not is_last:
                        continue  # another call may have read it meanwhile
                    current = _UNKNOWN
                elif current != _UNKNOWN and self._numbers.get(namespace) == _UNKNOWN:
                    self._forget(namespace)  # entries in memory may be older than a purge
                if len(self._numbers) >= _MOST_NAMES:
                    held = {*self._memory.namespaces()}
                    self._numbers = {name: number for name, number in self._numbers.items() if name in held}
                self._numbers[namespace] = current
                break
        return current[0]

    def _ask_number(self, namespace: str) -> tuple[int, int]:
        """Read numbers from the store, even while reads fail: without them no value of the namespace is written."""
        if monotonic() < self._ask_again_s or (self._behind.reads.is_open and self._behind.is_resting):
            return _UNKNOWN
        answer = self._ask_numbers([namespace])
        self._ask_again_s = 0.0 if answer else monotonic() + _REST_S
        return answer.get(namespace, _UNKNOWN)

    def _ask_numbers(self, namespaces: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Read the numbers of namespaces and of `forgets_of` them, by namespace; empty if the store fails."""
        asked = [*namespaces, *map(forgets_of, namespaces)]
        answer = self._ask("ask the store for numbers", lambda: self._store.numbers(asked), is_urgent=True) or []
        return dict(zip(namespaces, zip(answer, answer[len(namespaces) :], strict=False), strict=False))

    def numbers(self) -> Mapping[str, tuple[int, int]]:
        """Return the known numbers of all namespaces that memory may hold, and of `forgets_of` them."""
        for namespace in self._memory.namespaces():
            self.number(namespace)
        self.follow()  # before memory is read
        with self._following:
            return {name: number for name, number in self._numbers.items() if number != _UNKNOWN}

    def expect(self, numbers: Mapping[str, tuple[int, int]]) -> None:
        """Set the `numbers` stored with a save that was loaded into memory; the next `follow` compares them."""
        with self._following:
            self._numbers |= numbers
            self._cursor = ""

    def purge(self, namespace: str | None) -> int:
        """Purge a namespace (None: all) in the store and in memory; return how many requests memory held.

        `StoreError`: the store failed, and may still serve these values. Memory is purged anyway.
        """
        return self._drop(lambda: self._store.purge(namespace), namespace)

    def forget(self, namespace: str, named: Mapping[Scope, Sequence[str]]) -> int:
        """Forget values of a namespace in the store and in memory, by scope; as `purge`."""
        keys = [self._key(scope, name) for scope, names in named.items() for name in names]
        return self._drop(lambda: self._store.forget(keys), namespace, [key.name for key in keys])

    def _drop(self, act: Callable[[], object], namespace: str | None, names: Sequence[str] = ()) -> int:
        """Remove values from memory, and from the store by `act`, which may be slow; calls go on meanwhile."""
        with self._following:
            n_requests = self._forget(namespace, names)
        try:
            act()
        finally:  # also what was read from the store meanwhile, even if it failed
            with self._following:
                self._forget(namespace, names)
        self.follow()  # also apply purges by other processes
        return n_requests

    def now(self, namespace: str) -> dict[str, Any]:
        """Return what `forgotten_since` needs to know of the present."""
        self.number(namespace)
        return {"since": self.follow(), "forgets": self._numbers.get(namespace, _UNKNOWN)[1]}

    def forgotten_since(self, namespace: str, then: Mapping[str, Any]) -> set[str] | None:
        """Return the keys of a namespace forgotten since it was `now`; None if some are unknown, or it was purged."""
        purges = self._store.purges(then["since"])
        if not purges.is_complete:  # too long ago
            return set() if self.now(namespace)["forgets"] == then["forgets"] != NO_NUMBER else None
        names = [one.names for one in purges.found if one.namespace in (None, namespace)]
        return {name.partition(".")[2] for some in names for name in some} if all(names) else None

    def _forget(self, namespace: str | None, names: Sequence[str] = ()) -> int:
        """Remove a purged namespace or values from memory; return how many requests. The caller holds the lock."""
        if namespace is None:
            self._numbers.clear()
        else:
            self._numbers.pop(namespace, None)
            if names:
                return self._memory.drop_names(namespace, names)
        self._n_changes += 1
        n_requests = self._memory.drop(namespace)
        self._n_changes += 1  # again, for numbers read while memory was being purged
        return n_requests

    def _compare(self) -> None:
        """Forget the namespaces whose number changed or cannot be read: purges may have been missed."""
        known = dict(self._numbers)
        now = self._ask_numbers(list(known))
        gone = [name for name, number in known.items() if now.get(name) != number]
        for name in gone:
            self._forget(name)
        if gone:
            more = "" if len(gone) == 1 else f", and {len(gone) - 1} more"
            logger.warning("llmcache: forgotten, as it may have been purged, is namespace %r%s", min(gone), more)

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, asked: Sequence[tuple[Scope, str]], n_tokens: int) -> list[Opened | None]:
        """Read values by scope and name, in order, in one read; together they save computing `n_tokens` tokens."""
        if not (asked and self.break_even.pays(n_tokens)):
            return [None] * len(asked)
        started, deadline = perf_counter(), monotonic() + self.break_even.patience_s(n_tokens)
        values = self._get(asked, deadline, open_until=deadline)
        took_s, n_found = perf_counter() - started, sum(one is not None for one in values)
        self._n_asked += len(asked)
        self._n_found += n_found
        self._read_s += took_s
        if n_found:
            self.break_even.looked_up(n_tokens, took_s)
        return values

    def peek(self, asked: Sequence[tuple[Scope, str]], patience_s: float) -> list[Opened | None]:
        """Read values as `read` does, but whether or not it pays, and uncounted; open all that came in time."""
        return self._get(asked, monotonic() + patience_s, open_until=inf)

    def write(
        self, scope: Scope, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any], number: int, since: str
    ) -> None:
        """Queue a value, see `Put`, to be written unless the store has it. Its tensors are not modified afterwards."""
        self._behind.add(Job(self._key(scope, name), number, since, tensors, about))

    @property
    def has_dropped(self) -> bool:
        """Whether values were dropped that can be queued again; see `lacks`."""
        return bool(self._behind.dropped)

    def lacks(self, scope: Scope, name: str) -> bool:
        """Whether a value was dropped; the caller is expected to queue it again."""
        return self._behind.take_dropped(self._key(scope, name))

    def _get(self, asked: Sequence[tuple[Scope, str]], deadline: float, open_until: float) -> list[Opened | None]:
        keys = [self._key(*one) for one in asked]
        numbers = {name: self.number(name) for name in {key.namespace for key in keys}}
        values = self._ask("read from the store", lambda: self._store.get_many(keys, deadline))
        return [
            None if value is None or monotonic() >= open_until else self._opened(key, numbers[key.namespace], value)
            for key, value in zip(keys, values or [None] * len(keys), strict=True)
        ]

    def _opened(self, key: StoreKey, number: int, value: Bytes) -> Opened | None:
        if number == NO_NUMBER:
            return None
        try:
            return self._seal.open(key, number, value)
        except MismatchError as error:
            self._mismatched[error.reason] += 1
            return None

    def _key(self, scope: Scope, name: str) -> StoreKey:
        if (digest := self._scopes.get(scope)) is None:
            if len(self._scopes) >= _MOST_NAMES:  # for example one namespace per session
                self._scopes.clear()
            digest = hashlib.sha256(scope.key + f"{FORMAT} {self._settings}".encode()).hexdigest()
            self._scopes[scope] = digest
        return StoreKey(scope.namespace, digest, name)

    def _ask(self, what: str, act: Callable[[], _T], is_urgent: bool = False, is_of_call: bool = True) -> _T | None:
        """Return the store's answer; None if it fails or is closed, or while reads are suspended unless `is_urgent`."""
        if (self._behind.reads.is_open and not is_urgent) or self._behind.is_closed:
            return None
        try:
            answer = act()
        except Exception as error:
            if not self._behind.reads.is_open:
                self._behind.failed(what, error, is_of_call)
            return None
        if not self._behind.reads.is_open:  # else the writer thread closes the breaker
            self._behind.reads.succeeded()
        return answer

    # -- the rest ------------------------------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Return what this cache has read and written, and what the store holds."""
        held = self._ask("ask the store what it holds", self._store.stats, is_of_call=False)
        return TierStats(
            n_asked=self._n_asked,
            n_found=self._n_found,
            n_mismatched=dict(self._mismatched),
            n_written=self._behind.n_written,
            n_dropped=self._behind.n_dropped,
            read_ms=1e3 * self._read_s,
            least_tokens=self.break_even.least_tokens,
            is_answering=not self._behind.reads.is_open,
            **{name: getattr(held, name, None) for name in ("n_values", "nbytes", "max_bytes", "n_evicted")},
        )
