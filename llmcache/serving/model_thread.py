"""The single thread that runs the model, one step after another.

A step is an encoder's batch, or one token of each generation. Steps run first come first served. Long work that cannot
be split into steps runs in other threads, one of which holds the model for a turn between two steps.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from llmcache.serving.turns import Turns

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; call `run` from an event loop."""

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(1, "llmcache-model")
        self._waiting = Turns[tuple[threading.Event, threading.Event]]()  # begin and end of turns
        self._has_turn = False  # a turn is queued or taken
        self._lock = threading.Lock()

    async def run(self, step: Callable[[], _T]) -> _T:
        """Run a step and return its result. Cancelling the caller before the step starts drops the step."""
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Queue a step; see `run`."""
        return self._steps.submit(step)

    @contextmanager
    def held(self, tenant: str) -> Iterator[Callable[[], None]]:
        """Let the calling thread run the model in this context, when it is its tenant's turn.

        Yields a function that lets queued steps run, and other threads that wait for a turn.
        """
        over = self._take_turn(tenant)

        def turn() -> None:
            nonlocal over
            over.set()
            over = self._take_turn(tenant)

        try:
            yield turn
        finally:
            over.set()

    def _take_turn(self, tenant: str) -> threading.Event:
        """Wait for a turn; return the event that ends it."""
        begun, over = threading.Event(), threading.Event()
        with self._lock:
            self._waiting.put(tenant, (begun, over))
            if not self._has_turn:
                self.submit(self._give_turn)
                self._has_turn = True
        begun.wait()
        return over

    def _give_turn(self) -> None:
        """Let one thread run the model; queue the next turn behind the steps that have come meanwhile."""
        with self._lock:
            begun, over = self._waiting.pop()
        begun.set()
        over.wait()
        with self._lock:
            self._has_turn = bool(self._waiting)
            if self._has_turn:
                self.submit(self._give_turn)

    def close(self) -> None:
        """Run the queued steps and end the thread. Idempotent."""
        self._steps.shutdown()
