"""The single thread that runs the model, one step after another.

A step is an encoder's batch or one token of a generation. Steps run first come first served, so that a request waits
at most for one step of each other request. Long work that cannot be split into steps runs in another thread, which
holds the model for a turn at a time.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; call `run` from an event loop."""

    def __init__(self) -> None:
        self._steps = ThreadPoolExecutor(1, "llmcache-model")

    async def run(self, step: Callable[[], _T]) -> _T:
        """Run a step and return its result. Cancelling the caller before the step starts drops the step."""
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Queue a step; see `run`."""
        return self._steps.submit(step)

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Let the calling thread run the model in this context. Yields a function that lets queued steps run."""
        over = self._take_turn()

        def turn() -> None:
            nonlocal over
            over.set()
            over = self._take_turn()

        try:
            yield turn
        finally:
            over.set()

    def _take_turn(self) -> threading.Event:
        """Wait for a turn; return the event that ends it."""
        begun, over = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            over.wait()

        self.submit(hold)
        begun.wait()
        return over

    def close(self) -> None:
        """Run the queued steps and end the thread. Idempotent."""
        self._steps.shutdown()
