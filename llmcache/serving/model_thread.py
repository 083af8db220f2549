"""The single thread that runs the model, one step after another.

A step is an encoder's batch, or one token of each generation. Steps run first come first served. Long work that cannot
be split into steps runs in other threads, one of which holds the model between two steps.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from llmcache.serving.fair_queue import FairQueue

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; call `run` from an event loop."""

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(1, "llmcache-model")
        self._waiting = FairQueue[Hold]()
        self._is_asked = False  # a hold is queued or given
        self._lock = threading.Lock()

    async def run(self, step: Callable[[], _T]) -> _T:
        """Run a step and return its result. Cancelling the caller before the step starts drops the step."""
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Queue a step; see `run`."""
        return self._steps.submit(step)

    @contextmanager
    def held(self, tenant: str) -> Iterator["Hold"]:
        """Let the calling thread run the model in this context, when its tenant is due."""
        hold = Hold(partial(self._ask, tenant))
        hold.begin()
        try:
            yield hold
        finally:
            hold.end()

    def _ask(self, tenant: str, hold: "Hold") -> None:
        with self._lock:
            if not self._is_asked:
                self.submit(self._give)
                self._is_asked = True
            self._waiting.put(tenant, hold)

    def _give(self) -> None:
        """Let waiting threads run the model, for a chunk in all; queue the next behind steps that came meanwhile."""
        used = 0.0
        while used < 1:
            with self._lock:
                if not self._waiting:
                    self._is_asked = False
                    return
                hold = self._waiting.pop()
            used += hold.give()
        try:
            self.submit(self._give)
        except RuntimeError:  # the thread is closing: no steps come
            self._give()

    def close(self) -> None:
        """Run the queued steps and end the thread. Idempotent."""
        self._steps.shutdown()


class Hold:
    """A thread's hold on the model, which it takes and gives back."""

    def __init__(self, queue: Callable[["Hold"], None]) -> None:
        """Wait for nothing yet; `queue` queues for the model."""
        self._queue = queue
        self._begun, self._over = threading.Semaphore(0), threading.Semaphore(0)
        #: Part of the chunk that it ran last, 0 to 1. No step runs between holds until they add up to one.
        self.share = 1.0

    def begin(self) -> None:
        self._queue(self)
        self._begun.acquire()

    def end(self) -> None:
        self._over.release()

    def give_way(self) -> None:
        """Let queued steps run, and other threads that wait."""
        self.end()
        self.begin()

    def give(self) -> float:
        """Let the thread run the model, wait until it gives it back, and return its share."""
        self._begun.release()
        self._over.acquire()
        return self.share
