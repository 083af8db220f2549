"""The single thread that runs the model, one step after another.

A step is an encoder's batch, or one token of each generation. Steps run first come first served. Long work that cannot
be split into steps runs in other threads, one of which holds the model for a turn between two steps.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from llmcache.serving.turns import Turns

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; call `run` from an event loop."""

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(1, "llmcache-model")
        self._waiting = Turns[Turn]()
        self._has_turn = False  # a turn is queued or taken
        self._lock = threading.Lock()

    async def run(self, step: Callable[[], _T]) -> _T:
        """Run a step and return its result. Cancelling the caller before the step starts drops the step."""
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Queue a step; see `run`."""
        return self._steps.submit(step)

    @contextmanager
    def held(self, tenant: str) -> Iterator["Turn"]:
        """Let the calling thread run the model in this context, when it is its tenant's turn."""
        turn = Turn(partial(self._queue_turn, tenant))
        turn.begin()
        try:
            yield turn
        finally:
            turn.end()

    def _queue_turn(self, tenant: str, turn: "Turn") -> None:
        with self._lock:
            if not self._has_turn:
                self.submit(self._give_turns)
                self._has_turn = True
            self._waiting.put(tenant, turn)

    def _give_turns(self) -> None:
        """Let waiting threads run the model, one turn in all; queue the next behind the steps that came meanwhile."""
        used = 0.0
        while used < 1:
            with self._lock:
                if not self._waiting:
                    self._has_turn = False
                    return
                turn = self._waiting.pop()
            used += turn.give()
        try:
            self.submit(self._give_turns)
        except RuntimeError:  # the thread is closing: no steps come
            self._give_turns()

    def close(self) -> None:
        """Run the queued steps and end the thread. Idempotent."""
        self._steps.shutdown()


class Turn:
    """A thread's turns to run the model.

    Attributes:
        share: Part of the last turn that was used, 0 to 1. No step runs between turns until they add up to one.
    """

    def __init__(self, queue: Callable[["Turn"], None]) -> None:
        """Wait for nothing yet; `queue` queues for a turn."""
        self._queue = queue
        self._begun, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self.share = 1.0

    def begin(self) -> None:
        """Wait for a turn."""
        self._queue(self)
        self._begun.acquire()

    def end(self) -> None:
        """End the turn."""
        self._over.release()

    def give_way(self) -> None:
        """Let queued steps run, and other threads that wait for a turn."""
        self.end()
        self.begin()

    def give(self) -> float:
        """Let the turn begin, wait for its end, and return its share."""
        self._begun.release()
        self._over.acquire()
        return self.share
