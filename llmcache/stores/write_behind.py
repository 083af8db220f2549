"""Writes values to a store behind the answers, in a thread of its own, which tries again where that fails.

Values are dropped if too much waits, or if they cannot be written. They are offered again when they are next used.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from torch import Tensor

from llmcache.counters import Counters
from llmcache.stores.base import Put, Store, StoreKey
from llmcache.stores.seal import Seal
from llmcache.threads import at_fork, compute_alone, forkable

NO_NUMBER = -1  # that no namespace has: what is put with it is dropped
MAX_WAITING_BYTES = 256 << 20
_AT_ONCE_BYTES = 32 << 20  # sealed and put together
_PATIENCE_S = 60.0  # for what waits when the store is closed
_FAILURES = 3  # in a row, after which a store is not asked until it answers again
_REST_S, _LONGEST_REST_S = 0.1, 2.0  # before it is asked again
_MOST_DROPPED = 65_536  # that are known to have been dropped


@dataclass(frozen=True, slots=True)
class Job:
    """A value to be sealed and put; see `Put`. Nobody writes to its tensors."""

    key: StoreKey
    number: int
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class Breaker:
    """Keeps a store from being asked after some failures in a row, for a rest that is longer each time."""

    n_failed: int = 0
    _rest_s: float = 0.0
    _until: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it failed so often."""
        return self.n_failed >= _FAILURES

    @property
    def left_s(self) -> float:
        """Seconds until it may be tried again; 0 if it may be."""
        return max(0.0, self._until - monotonic())

    def failed(self) -> None:
        self.n_failed += 1
        if self.is_open:
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) or _REST_S
            self._until = monotonic() + self._rest_s

    def succeeded(self) -> None:
        self.n_failed, self._rest_s, self._until = 0, 0.0, 0.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class WriteBehind:
    """Jobs that wait for a store, and the thread that does them. Thread-safe.

    It holds nothing of the cache, which may go while it works. Reads may be late on a store that takes writes, so each
    has a breaker of its own; while that of the reads is open, the thread looks when the store answers again.
    """

    store: Store
    seal: Seal
    counters: Counters
    reads: Breaker = field(default_factory=Breaker)
    n_written: int = 0
    n_dropped: int = 0
    is_closed: bool = False
    _jobs: deque[Job] = field(default_factory=deque)
    _nbytes: int = 0
    _dropped: dict[StoreKey, None] = field(default_factory=dict)  # the latest at the end
    _writes: Breaker = field(default_factory=Breaker)
    _is_busy: bool = False
    _changed: threading.Condition = field(default_factory=lambda: forkable(threading.Condition()))
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        at_fork(self._begin_anew)

    def add(self, job: Job) -> None:
        """Queue a value to be written.

        It is dropped, and counted, if too much waits, if writes fail, or if the number of its namespace is not known:
        no store would take it.
        """
        with self._changed:
            is_too_much = self._nbytes + job.nbytes > MAX_WAITING_BYTES
            if self.is_closed or self.is_resting or is_too_much or job.number == NO_NUMBER:
                self._drop([job])
                return
            self._jobs.append(job)
            self._nbytes += job.nbytes
            self._rouse()

    @property
    def has_dropped(self) -> bool:
        """Whether values were dropped that may be offered again."""
        return bool(self._dropped)

    def take_dropped(self, key: StoreKey) -> bool:
        """Whether a value was dropped; it counts as offered again from now on."""
        with self._changed:
            return self._dropped.pop(key, self) is None

    def failed(self, what: str, error: Exception, is_of_call: bool = True) -> None:
        """Count a failure of what calls wait for; after some, the thread looks when the store answers again."""
        self.counters.error(what, error, is_of_call)
        with self._changed:
            self.reads.failed()
            if self.reads.is_open and not self.is_closed:
                self._rouse()

    @property
    def is_resting(self) -> bool:
        """Whether writes failed, and are not tried again yet."""
        return self._writes.left_s > 0

    def drain(self) -> None:
        """Wait until all that waited is written or dropped, for a minute at most."""
        with self._changed:
            if self._thread not in (None, threading.current_thread()):
                self._changed.wait_for(lambda: not (self._jobs or self._is_busy), _PATIENCE_S)

    def close(self) -> None:
        """Write what waits, end the thread and close the store. Twice does nothing."""
        self.drain()
        with self._changed:
            if self.is_closed:
                return
            self.is_closed = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_PATIENCE_S)
        self.store.close()

    def _begin_anew(self) -> None:
        """In a forked process, begin empty: the parent writes what waits."""
        self._jobs.clear()
        self._nbytes, self._is_busy, self._thread = 0, False, None

    def _rouse(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="llmcache-store-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        compute_alone()
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                if not (self._jobs or self.is_closed):  # whoever wakes it may have opened the breaker
                    self._changed.wait(self.reads.left_s if self.reads.is_open else None)
                if self.is_closed and not self._jobs:
                    return
                jobs, self._is_busy = self._take(), True
            if jobs:
                self._write(jobs)
            if self.reads.is_open and not self.reads.left_s:
                try:
                    self.store.numbers([])
                except Exception:
                    self.reads.failed()
                else:
                    self.reads.succeeded()

    def _take(self) -> list[Job]:
        """Take the jobs that are sealed and put together next. The caller holds the lock."""
        jobs, nbytes = list[Job](), 0
        while self._jobs and nbytes < _AT_ONCE_BYTES:
            jobs.append(self._jobs.popleft())
            nbytes += jobs[-1].nbytes
        return jobs

    def _write(self, jobs: Sequence[Job]) -> None:
        """Write jobs together; tried again a moment later where that fails, and dropped where it goes on to fail."""
        while not self.is_resting:
            try:
                n_written = self._put(jobs)
            except Exception as error:
                self._writes.failed()
                if self._writes.is_open or self._has_closed_within(_REST_S):
                    self.counters.error("write to the store", error)
                    break
            else:
                self._writes.succeeded()
                with self._changed:
                    self.n_written += n_written
                    self._nbytes -= sum(job.nbytes for job in jobs)
                return
        with self._changed:
            self._drop(jobs)
            self._nbytes -= sum(job.nbytes for job in jobs)

    def _has_closed_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_closed, seconds)

    def _put(self, jobs: Sequence[Job]) -> int:
        """Put values that the store does not hold; returns how many they were."""
        absent = {*self.store.absent([job.key for job in jobs])}
        puts = []
        for job in jobs:
            if job.key in absent:
                with self.counters.guard("seal a value"):  # it will not do so next time either
                    puts.append(Put(job.key, self.seal.close(job.key, job.tensors, job.about), job.number))
        if puts:
            self.store.put_many(puts)
        return len(puts)

    def _drop(self, jobs: Sequence[Job]) -> None:
        """The caller holds the lock."""
        self.n_dropped += len(jobs)
        for job in jobs:
            self._dropped.pop(job.key, None)
            self._dropped[job.key] = None
        for key in list(islice(self._dropped, max(0, len(self._dropped) - _MOST_DROPPED))):
            del self._dropped[key]
