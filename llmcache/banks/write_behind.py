"""What is to lie in a store is written behind the answers, by a thread of its own; what is too much is left out."""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from llmcache.banks.stores.base import Put, Store, StoreKey
from llmcache.banks.stores.seal import Seal
from llmcache.counters import Counters
from llmcache.threads import compute_alone

MAX_WAITING_BYTES = 256 << 20
_AT_ONCE_BYTES = 32 << 20  # sealed and put together
_PATIENCE_S = 60.0  # for what waits when the store is closed
_FAILURES = 3  # in a row, after which a store is not asked until it answers again
_REST_S, _LONGEST_REST_S = 0.1, 30.0  # before it is pinged


@dataclass(frozen=True, slots=True)
class Job:
    """A value that is to be made and put; see `Put`. Its tensors are not written to.

    What `is_note` is announced, for others to read at once, and lies nowhere.
    """

    key: StoreKey
    generation: int
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    nbytes: int
    is_note: bool = False

    def put(self, seal: Seal) -> Put:
        """What is put, sealed."""
        sealed = seal.close(self.key, self.tensors, self.about)
        if self.is_note:
            return Put(self.key, b"", self.generation, bytes(sealed))
        return Put(self.key, sealed, self.generation)


@dataclass(slots=True)
class Breaker:
    """Whether a store may be asked: not after some failures in a row."""

    n_failed: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it may not."""
        return self.n_failed >= _FAILURES


@dataclass(slots=True, eq=False)
class WriteBehind:
    """Jobs that wait for a store, and the thread that does them. Thread-safe.

    It holds nothing of the cache, which may go while it works.
    """

    store: Store
    seal: Seal
    counters: Counters
    breaker: Breaker = field(default_factory=Breaker)
    n_written: int = 0
    n_dropped: int = 0
    is_closed: bool = False
    _jobs: deque[Job] = field(default_factory=deque)
    _tasks: deque[Callable[[], object]] = field(default_factory=deque)
    _nbytes: int = 0
    _is_busy: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _process: int = 0  # a forked one is left without the thread

    def add(self, job: Job) -> None:
        """Have a value written later. It is dropped, and counted, where too much waits or the store does not answer."""
        with self._changed:
            if self.is_closed or self.breaker.is_open or self._nbytes + job.nbytes > MAX_WAITING_BYTES:
                self.n_dropped += 1
                return
            self._jobs.append(job)
            self._nbytes += job.nbytes
            self._rouse()

    def do(self, what: str, task: Callable[[], object]) -> None:
        """Have something done after what waits, once the store answers; what fails is a failure of the store."""

        def act() -> None:
            try:
                task()
            except Exception as error:
                self.failed(what, error)

        with self._changed:
            if not self.is_closed:
                self._tasks.append(act)
                self._rouse()

    def failed(self, what: str, error: Exception) -> None:
        """Count a failure of the store; after some, the thread looks when it answers again."""
        self.counters.error(what, error)
        with self._changed:
            self.breaker.n_failed += 1
            if self.breaker.is_open and not self.is_closed:
                self._rouse()

    def drain(self) -> None:
        """Wait until all that waited is written or dropped, for a minute at most."""
        with self._changed:
            if threading.current_thread() is not self._thread and self._process == os.getpid():
                self._changed.wait_for(lambda: not (self._has_work or self._is_busy), _PATIENCE_S)

    def close(self) -> None:
        """Write what waits, end the thread and close the store. Twice does nothing."""
        self.drain()
        with self._changed:
            if self.is_closed:
                return
            self.is_closed = True
            self._changed.notify_all()
        if self._thread not in (None, threading.current_thread()) and self._process == os.getpid():
            self._thread.join(_PATIENCE_S)
        self.store.close()

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs) or (bool(self._tasks) and not self.breaker.is_open)

    def _rouse(self) -> None:
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._run, name="llmcache-store-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        compute_alone()
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._has_work or self.is_closed or self.breaker.is_open)
                if self.is_closed and not self._jobs:
                    return
                jobs, self._jobs, self._is_busy = list(self._jobs), deque(), True
            if self.breaker.is_open:
                self._drop(jobs)
                self._wait_for_the_store()
            else:
                self._write(jobs)
                while self._tasks and not self.breaker.is_open:
                    self._tasks.popleft()()

    def _write(self, jobs: Sequence[Job]) -> None:
        puts: list[Put] = []
        nbytes, n_done = 0, 0
        for i, job in enumerate(jobs):
            if self.breaker.is_open:
                self.n_dropped += len(puts)
                self._done(jobs[n_done:i])
                self._drop(jobs[i:])
                return
            try:
                if not self.store.contains_prefix([job.key]):
                    puts.append(job.put(self.seal))
                    nbytes += job.nbytes
                if puts and (nbytes >= _AT_ONCE_BYTES or i + 1 == len(jobs)):
                    self.store.put_many(puts)
                    self.n_written += len(puts)
                    self.breaker.n_failed, puts, nbytes = 0, [], 0
            except Exception as error:
                self.n_dropped += len(puts) or 1
                puts, nbytes = [], 0
                self.failed("write to the store", error)
            if not puts:
                self._done(jobs[n_done : i + 1])
                n_done = i + 1

    def _drop(self, jobs: Sequence[Job]) -> None:
        self.n_dropped += len(jobs)
        self._done(jobs)

    def _done(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._nbytes -= sum(job.nbytes for job in jobs)

    def _wait_for_the_store(self) -> None:
        """Ping it now and then until it answers."""
        rest_s = _REST_S
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.is_closed, rest_s)
                if self.is_closed:
                    return
            try:
                self.store.ping()
            except Exception:
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
            else:
                self.breaker.n_failed = 0
                return
