"""What calls computed is stored after their answers: when the next call looks up, or in a quiet moment before it.

Storing takes some hundredths of a small model's time, and so does a second look at the weights, which must have stayed
as they were all through a call. So both wait until one of three comes: the next call, which has found the weights as
they are in any case, and finds what was stored, in the order in which it was computed; 20 ms without a call, after
which a thread stores it; or a question about what is held. Of weights that were edited lately nothing waits: what
cannot be shown to be theirs later is dropped.

Trouble here costs speed, never correctness: it is counted, logged once, and the request is not stored.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from time import perf_counter

from llmcache.counters import Counters
from llmcache.execution.old_call import Call
from llmcache.models.mark import Mark
from llmcache.threads import at_fork, compute_alone, forkable

_IDLE_S = 0.02  # without a call, after which the processor is taken to be free
MAX_WAITING = 16  # calls; a thread whose calls are looked up has one at most

#: `(call, clock at which it had computed, mark of the weights as the next call found them, or None) -> if it was kept`.
Store = Callable[[Call, float | None, Mark | None], bool]


@dataclass(slots=True)
class _Worker:
    """The thread of one queue, which it does not keep alive."""

    wake: threading.Event = field(default_factory=lambda: forkable(threading.Event()))
    closed: threading.Event = field(default_factory=lambda: forkable(threading.Event()))
    thread: threading.Thread | None = None

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self.closed.set()
        self.wake.set()
        if self.thread not in (None, threading.current_thread()):
            self.thread.join()


class StoreQueue:
    """Calls that were answered and are to be stored. Thread-safe."""

    def __init__(self, store: Store, counters: Counters, spent: Callable[[Call, float], None]) -> None:
        """Begin with none, and without a thread.

        Args:
            store: Stores what was kept of a call, if it still may be.
            counters: Told what fails, and what storing took.
            spent: Takes each call that was stored in the next one, and the seconds that took.
        """
        self._store = store
        self._counters = counters
        self._spent = spent
        self._waiting: deque[tuple[int, Call, float | None]] = deque()
        self._settling = forkable(threading.Lock())  # one call at a time, in their order
        self._settler = 0  # the thread that does
        self._rousing = forkable(threading.Lock())
        self.n_added = 0  # calls, so far
        self._worker = _Worker()
        at_fork(self._begin_anew)
        weakref.finalize(self, self._worker.close)  # also when the interpreter ends, which must not meet it in torch

    def __len__(self) -> int:
        return len(self._waiting)

    def holds(self, key: str) -> bool:
        """Whether a request waits to be stored under this key."""
        return any(row.key == key for _, call, _ in tuple(self._waiting) for row in call.rows)

    @property
    def takes(self) -> bool:
        """Whether a call may be added: not too many wait, and the cache is not taken off. If not, that is counted."""
        if self._worker.closed.is_set():
            return False
        if is_full := len(self._waiting) >= MAX_WAITING:
            self._counters.stored_later("queue_full")
        return not is_full

    def add(self, call: Call, ended: float | None) -> None:
        """Have a call stored later.

        Args:
            call: It has succeeded, and nobody writes to it any more.
            ended: Clock at which it had computed.
        """
        self._waiting.append((self.n_added, call, ended))
        self.n_added += 1
        if not self._worker.wake.is_set():  # it sleeps, or there is none
            with self._counters.guard("begin to store in the background"), self._rousing:
                self._rouse()  # where that fails, the next call does the work all the same

    def settle(self, when: str, n_before: int = 0, mark: Mark | None = None) -> float:
        """Store what waits, after what another thread is storing; returns the seconds that took.

        Args:
            when: See `Stats.stored_later`.
            n_before: Calls that had been added when `mark` was taken.
            mark: Of the weights, as they were found just now; None: they were not looked at.
        """
        if not self._waiting or self._settler == threading.get_ident():
            return 0.0
        begun = perf_counter()
        with self._settling:
            self._settler = threading.get_ident()
            try:
                while self._waiting:
                    self._settle_first(when, n_before, mark)
            finally:
                self._settler = 0
        return perf_counter() - begun

    def close(self) -> None:
        """Store what waits, and end the thread; calls that come later are stored at once. Twice does nothing."""
        self.settle("asked")
        self._worker.close()

    def _begin_anew(self) -> None:
        """In a forked process: no thread; what waits is stored here as well."""
        self._settler, self._worker.thread = 0, None
        self._worker.wake.clear()

    def _settle_first(self, when: str, n_before: int, mark: Mark | None) -> None:
        started, is_kept = perf_counter(), False
        number, call, ended = self._waiting[0]
        try:
            with self._counters.guard("store a request"):
                is_kept = self._store(call, ended, mark if number < n_before else None)
        finally:
            self._waiting.popleft()  # not before: until it is stored, who looks for it has to wait
        took = perf_counter() - started
        self._counters.stored_later(when if is_kept else "dropped", took)
        if when == "next_call":
            self._spent(call, took)

    def _rouse(self) -> None:
        """Have the thread look soon; begin it where there is none, or no longer."""
        worker = self._worker
        if worker.thread is None or not worker.thread.is_alive():
            has_died = worker.thread is not None
            worker.thread = threading.Thread(
                target=_store_when_quiet, args=(weakref.ref(self), worker), name="llmcache-store", daemon=True
            )
            worker.thread.start()
            if has_died:
                self._counters.error("store in the background", RuntimeError("the thread has died; there is another"))
        worker.wake.set()


def _store_when_quiet(ref: "weakref.ref[StoreQueue]", worker: _Worker) -> None:
    """What the thread does: not told when calls come, which would cost each of them, it looks now and then."""
    compute_alone()
    n_added = 0
    try:
        while True:
            worker.wake.wait()
            if worker.closed.wait(_IDLE_S) or (queue := ref()) is None:
                return
            if queue.n_added != n_added:
                n_added = queue.n_added  # calls are coming
            elif len(queue):
                Context().run(queue.settle, "background")
            else:
                worker.wake.clear()
                if len(queue) or worker.closed.is_set():  # that came meanwhile, and saw that the thread was awake
                    worker.wake.set()
            del queue
    finally:
        worker.wake.clear()  # the next call to be added begins another thread
