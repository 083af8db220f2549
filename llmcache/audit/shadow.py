"""Work that may wait for moments in which nobody else needs the processor."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_SOON_S = 0.001  # after which the thread looks again while a call is under way, at least


@dataclass(frozen=True, slots=True)
class Job(Generic[Owner]):
    """What is to be done. It must not raise, nor hold its owner: who waits would keep it alive.

    Attributes:
        do: Does it, given the owner.
        added_s: When it came, by a clock that never goes back.
    """

    do: Callable[[Owner], None]
    added_s: float = field(default_factory=monotonic)


class Shadow(Generic[Owner]):
    """A queue of jobs, done one after the other by a thread of its own while no call is under way. Thread-safe.

    The thread begins with the first job and ends with the owner, which it does not keep alive. It computes with as many
    threads as torch gives it: `torch.set_num_threads` would also hold for every thread that begins later.
    """

    def __init__(
        self,
        owner: Owner,
        in_background: bool = True,
        idle_s: float = 0.02,
        patience_s: float = 5.0,
        max_jobs: int = 1000,
    ) -> None:
        """Begin without jobs, and without a thread.

        Args:
            owner: Handed to every job; jobs are dropped when it is gone.
            in_background: There will be a thread; else only `drain` does jobs.
            idle_s: Seconds without a call after which the processor is taken to be free.
            patience_s: Seconds after which a job is done all the same.
            max_jobs: Jobs at which the queue is full.
        """
        self._owner = weakref.ref(owner)
        self._in_background = in_background
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._max_jobs = max_jobs
        self._jobs: deque[Job[Owner]] = deque()
        self._condition = threading.Condition()
        self._working = threading.RLock()  # one job at a time, whoever does it; a job may ask for others to be dropped
        self._is_working = False
        self._n_calls = 0
        self._last_call_s = monotonic()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        weakref.finalize(owner, self.close)  # also when the interpreter ends, which must not meet a thread in torch

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """Whether no more should be added. Calls that asked before may add a few all the same."""
        return len(self._jobs) >= self._max_jobs

    def add(self, job: Job[Owner]) -> None:
        """Have a job done some time; after `close`, never."""
        with self._condition:
            if self._is_closed:
                return
            self._jobs.append(job)
            is_alive = self._thread is not None and self._thread.is_alive()  # a forked process is left without
            if self._in_background and not is_alive:
                self._thread = threading.Thread(target=self._run, name="llmcache-shadow", daemon=True)
                self._thread.start()
            self._condition.notify()

    def enter(self) -> None:
        """A call has begun."""
        with self._condition:
            self._n_calls += 1

    def leave(self) -> None:
        """A call has ended."""
        with self._condition:
            self._n_calls -= 1
            self._last_call_s = monotonic()

    def drain(self) -> int:
        """Do the jobs that wait, after the one under way, until none is left; returns how many this thread did."""
        n_done = 0
        while self._do_one():
            n_done += 1
        return n_done

    def paused(self) -> AbstractContextManager[object]:
        """Within, after the job under way, none is done; a job itself may say this, too."""
        return self._working

    def close(self) -> None:
        """Forget all jobs and end the thread, after the job under way. Twice does nothing."""
        with self._condition:
            self._is_closed = True
            self._jobs.clear()
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                # Not told when calls end, which would cost each of them: while jobs wait it looks by itself.
                while not self._is_closed and (wait_s := self._wait_s()) != 0:
                    self._condition.wait(wait_s)
                if self._is_closed:
                    return
            self._do_one()

    def _wait_s(self) -> float | None:
        """Seconds after which to look again, 0 if a job may begin, None while there is none."""
        if not self._jobs:
            return None
        now = monotonic()
        idle_s = max(self._idle_s, _SOON_S) if self._n_calls else self._last_call_s + self._idle_s - now
        return max(0.0, min(idle_s, self._jobs[0].added_s + self._patience_s - now))

    def _do_one(self) -> bool:
        """Do the oldest job; whether there was one."""
        with self._working:
            with self._condition:
                job = self._jobs.popleft() if self._jobs and not self._is_working else None
            owner = self._owner()
            if job is None or owner is None:
                return False
            self._is_working = True
            try:
                Context().run(job.do, owner)  # nothing of the caller's: neither its namespace nor what it turned off
            finally:
                self._is_working = False
        return True
