"""Writes values to a store in a background thread, with retries.

Values are dropped if the queue is full or writing fails. They are queued again when they are next used.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any

from torch import Tensor

from llmcache.memory.stores.base import Put, Store, StoreKey
from llmcache.memory.stores.seal import Seal
from llmcache.request.counters import Counters
from llmcache.support.threads import at_fork, compute_alone, forkable

NO_NUMBER = -1  # no namespace has this number; values put with it are dropped
MAX_WAITING_BYTES = 256 << 20
_AT_ONCE_BYTES = 32 << 20  # bytes sealed and put together
_PATIENCE_S = 60.0  # wait for queued values in `drain` and `close`
_FAILURES = 3  # failures in a row that open a breaker
_REST_S, _LONGEST_REST_S = 0.1, 2.0  # first and longest pause before a retry
_MOST_DROPPED = 65_536  # dropped keys that are remembered


@dataclass(frozen=True, slots=True)
class Job:
    """A value to seal and put; see `Put`. Its tensors are not modified."""

    key: StoreKey
    number: int
    since: str
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(slots=True)
class Breaker:
    """Suspends use of a store after `_FAILURES` failures in a row, for longer each time."""

    n_failed: int = 0
    _rest_s: float = 0.0
    _until: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.n_failed >= _FAILURES

    @property
    def left_s(self) -> float:
        """Seconds until the next try; 0 if it may be tried now."""
        return max(0.0, self._until - monotonic())

    def failed(self) -> None:
        self.n_failed += 1
        if self.is_open:
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S) or _REST_S
            self._until = monotonic() + self._rest_s

    def succeeded(self) -> None:
        self.n_failed, self._rest_s, self._until = 0, 0.0, 0.0


class WriteBehind:
    """A queue of jobs for a store, and the thread that writes them. Thread-safe.

    It holds no reference to the cache, which may be collected meanwhile. Reads can time out on a store that accepts
    writes, so reads and writes have a breaker each. While that of reads is open, the thread tests if the store answers.
    """

    def __init__(self, store: Store, seal: Seal, counters: Counters) -> None:
        self.store, self.seal, self.counters = store, seal, counters
        self.reads, self._writes = Breaker(), Breaker()
        self.n_written = self.n_dropped = self._nbytes = 0
        self.is_closed = self._is_busy = False
        self._jobs: deque[Job] = deque()
        self.dropped: dict[StoreKey, None] = {}  # keys of dropped values, which can be queued again; the latest last
        self._changed = forkable(threading.Condition())
        self._thread: threading.Thread | None = None
        at_fork(self._reset_after_fork)

    def add(self, job: Job) -> None:
        """Queue a value to be written; drop it if the queue is full, writes fail or its number is unknown."""
        with self._changed:
            is_too_much = self._nbytes + job.nbytes > MAX_WAITING_BYTES
            if self.is_closed or self.is_resting or is_too_much or job.number == NO_NUMBER:
                self._drop([job])
                return
            self._jobs.append(job)
            self._nbytes += job.nbytes
            self._wake()

    def take_dropped(self, key: StoreKey) -> bool:
        """Whether a value was dropped; if so, remove it from the dropped ones."""
        with self._changed:
            return self.dropped.pop(key, self) is None

    def failed(self, what: str, error: Exception, is_of_call: bool = True) -> None:
        """Count a failure of a read; once the breaker opens, the thread tests whether the store answers."""
        self.counters.error(what, error, is_of_call)
        with self._changed:
            self.reads.failed()
            if self.reads.is_open and not self.is_closed:
                self._wake()

    @property
    def is_resting(self) -> bool:
        return self._writes.left_s > 0

    def drain(self) -> None:
        """Wait until all queued values are written or dropped, for a minute at most."""
        with self._changed:
            if self._thread not in (None, threading.current_thread()):
                self._changed.wait_for(lambda: not (self._jobs or self._is_busy), _PATIENCE_S)

    def close(self) -> None:
        """Write the queued values, stop the thread and close the store. A second call does nothing."""
        self.drain()
        with self._changed:
            if self.is_closed:
                return
            self.is_closed = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_PATIENCE_S)
        self.store.close()

    def _reset_after_fork(self) -> None:
        """Empty the queue in a forked child: the parent writes it."""
        self._jobs.clear()
        self._nbytes, self._is_busy, self._thread = 0, False, None

    def _wake(self) -> None:
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
                if not (self._jobs or self.is_closed):  # it may be woken because the breaker opened
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
        """Remove the next jobs from the queue, up to `_AT_ONCE_BYTES`. The caller holds the lock."""
        jobs, nbytes = list[Job](), 0
        while self._jobs and nbytes < _AT_ONCE_BYTES:
            jobs.append(self._jobs.popleft())
            nbytes += jobs[-1].nbytes
        return jobs

    def _write(self, jobs: Sequence[Job]) -> None:
        """Write jobs together, with retries; drop them if writing keeps failing."""
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
        """Put the values that the store lacks; return how many were put."""
        absent = {*self.store.absent([job.key for job in jobs])}
        puts = []
        for job in jobs:
            if job.key in absent:
                with self.counters.guard("seal a value"):  # a retry would fail as well
                    value = self.seal.close(job.key, job.number, job.tensors, job.about)
                    puts.append(Put(job.key, value, job.number, job.since))
        if puts:
            self.store.put_many(puts)
        return len(puts)

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Drop jobs, count them and remember their keys. The caller holds the lock."""
        self.n_dropped += len(jobs)
        for job in jobs:
            self.dropped.pop(job.key, None)
            self.dropped[job.key] = None
        for key in list(islice(self.dropped, max(0, len(self.dropped) - _MOST_DROPPED))):
            del self.dropped[key]
