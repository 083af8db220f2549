"""Does work while no call runs, or, if calls leave no idle time, in a small share of theirs."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from llmcache.support.threads import at_fork, compute_alone, forkable

Owner = TypeVar("Owner")

_MIN_WAIT_S = 0.001  # least time between two checks of the thread during a call
_MAX_CREDIT_S = 0.1  # saved up while no job waits: later calls must not pay for it all at once
_STEPS = 20  # of the queue's length; each step reached in its second half halves `scale`


class Preempted(BaseException):
    """A job stopped midway because a call began. Not an `Exception`, so that no handler takes it for a failure."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Owner]):
    """A piece of work. It must not raise, nor reference its owner: a waiting job would keep the owner alive."""

    do: Callable[[Owner], None]
    added_s: float = field(default_factory=monotonic)  # monotonic
    is_short: bool = True  # a call may do it, and takes that much longer


class IdleWorker(Generic[Owner]):
    """A queue of jobs, done one at a time with little effect on calls. Thread-safe.

    A thread does the jobs while no call is under way and none has just ended, with one torch thread. A job that calls
    `give_way` stops when a call begins, and is done again later. If calls leave no idle time, they do short jobs
    themselves (`catch_up`), for at most a share of the time that calls take. The thread starts with the first job and
    ends with the owner, which it does not keep alive.
    """

    def __init__(
        self,
        owner: Owner,
        in_background: bool = True,
        idle_s: float = 0.02,
        patience_s: float = 1.0,
        max_jobs: int = 1000,
        share: float = 0.02,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Begin without jobs, and without a thread.

        Args:
            owner: Passed to every job; jobs are dropped when it is gone.
            in_background: A thread and `catch_up` do jobs; else only `drain` does.
            idle_s: Seconds without a call after which the processor counts as idle.
            patience_s: Seconds that a job waits before `catch_up` may do it.
            max_jobs: Jobs at which the queue is full.
            share: Largest share of the time of calls that `catch_up` may take, 0 to 1; a single job may exceed it.
            clock: Monotonic, in seconds.
        """
        self._owner = weakref.ref(owner)
        self._in_background = in_background
        self._idle_s = idle_s
        self._patience_s = patience_s
        self._max_jobs = max_jobs
        self._share = share
        self._clock = clock
        self._credit_s = 0.0  # time that calls may still spend on jobs; negative after a job that took longer
        self._jobs: deque[Job[Owner]] = deque()
        self._condition = forkable(threading.Condition())
        # One job at a time, in any thread. Reentrant: a job may enter `paused` to drop others.
        self._working = forkable(threading.RLock(), is_waited_for=False)
        self._is_working = False
        self.worked_s = 0.0  # time in jobs, those that stopped midway included
        self._n_calls = 0
        self._last_call_s = clock()
        self._counted_s = self._last_call_s  # up to here the time of calls has earned credit
        self._thread: threading.Thread | None = None
        self._is_closed = False
        at_fork(self._reset_after_fork)
        weakref.finalize(owner, self.close)  # also at exit, when no thread may be inside torch

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_full(self) -> bool:
        """Whether the queue is full. Calls that checked earlier may still add a few jobs."""
        return len(self._jobs) >= self._max_jobs

    @property
    def scale(self) -> float:
        """The share of the usual work to add now, a power of one half: the longer the queue, the smaller."""
        n_full = len(self._jobs) * _STEPS // max(self._max_jobs, 1) if self._in_background else 0
        return float(0.5 ** min(max(n_full - _STEPS // 2 + 1, 0), _STEPS // 2))

    def add(self, job: Job[Owner]) -> None:
        """Queue a job; after `close`, drop it."""
        with self._condition:
            if self._is_closed:
                return
            self._jobs.append(job)
            if self._in_background and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="llmcache-audit", daemon=True)
                self._thread.start()
            self._condition.notify()

    def __enter__(self) -> None:
        """Call `catch_up` and `enter` before a call; `leave` follows at its end."""
        self.catch_up()
        self.enter()

    def __exit__(self, *raised: object) -> None:
        self.leave()

    def enter(self) -> None:
        with self._condition:
            if not self._n_calls:
                self._counted_s = self._clock()
            self._n_calls += 1

    def leave(self) -> None:
        with self._condition:
            self._n_calls = max(0, self._n_calls - 1)  # a call that forks also ends in the child
            self._last_call_s = now = self._clock()
            earned_s = self._share * (now - self._counted_s)
            self._credit_s, self._counted_s = min(self._credit_s + earned_s, _MAX_CREDIT_S), now

    def catch_up(self) -> float:
        """Do a short job that has waited for `patience_s`, if the share allows it; return the seconds taken, or 0."""
        if not self._jobs or self._credit_s <= 0 or not self._in_background:
            return 0.0
        started = self._clock()
        with self._condition:
            first = next((job for job in self._jobs if job.is_short), None)
        if first is None or started - first.added_s < self._patience_s or not self._working.acquire(blocking=False):
            return 0.0
        try:
            self._do_one(first)
        finally:
            self._working.release()
            spent_s = self._clock() - started
            with self._condition:
                self._credit_s -= spent_s
        return spent_s

    def give_way(self) -> None:
        """Raise `Preempted` in the background thread if a call has begun or the worker was closed: see `Preempted`."""
        if threading.current_thread() is self._thread and (self._n_calls or self._is_closed):
            raise Preempted

    def drain(self) -> int:
        """Wait for the job under way, then do all waiting jobs; return how many this thread did."""
        n_done = 0
        while self._do_one():
            n_done += 1
        return n_done

    def paused(self) -> AbstractContextManager[object]:
        """Return a context in which no other job runs. Entering waits for the job under way, or that job enters it."""
        return self._working

    def close(self) -> None:
        """Drop all jobs and end the thread, after the job under way. A second call does nothing."""
        with self._condition:
            self._is_closed = True
            self._jobs.clear()
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _reset_after_fork(self) -> None:
        """Reset in a forked child: no thread, no job under way, no calls of other threads."""
        self._thread, self._is_working, self._n_calls = None, False, 0

    def _run(self) -> None:
        compute_alone()
        while True:
            with self._condition:
                # Calls do not notify when they end, which would slow each one: while jobs wait, the thread polls.
                while not self._is_closed and (wait_s := self._wait_s()) != 0:
                    self._condition.wait(wait_s)
                if self._is_closed:
                    return
            self._do_one(is_background=True)

    def _wait_s(self) -> float | None:
        """Return the seconds to wait before a job may begin; 0: now, None: there is no job."""
        if not self._jobs:
            return None
        if self._n_calls:
            return max(self._idle_s, _MIN_WAIT_S)
        return max(0.0, self._last_call_s + self._idle_s - self._clock())

    def _do_one(self, job: Job[Owner] | None = None, is_background: bool = False) -> bool:
        """Do a job, by default the oldest; return whether it was waiting. In the background, do none during a call."""
        with self._working:
            with self._condition:
                may_begin = not (self._is_working or (is_background and self._n_calls))
                job = next((one for one in self._jobs if may_begin and job in (None, one)), None)
                if job is not None:
                    self._jobs.remove(job)
            owner = self._owner()
            if job is None or owner is None:
                return False
            self._is_working, started = True, self._clock()
            try:
                Context().run(job.do, owner)  # without the caller's context variables: its namespace, `disabled`
            except Preempted:
                with self._condition:
                    if not self._is_closed:
                        self._jobs.appendleft(job)
            finally:
                self._is_working = False
                self.worked_s += self._clock() - started
        return True
