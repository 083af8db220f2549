"""The one thread that runs the model, in turns among those who have work for it.

Work is done in steps: a batch of an encoder, a token of a generation. After each step the next one who has work gets a
turn, so that none waits for longer than the others' steps. What takes long, and cannot be left half-way, another thread
does, which holds the model in turns with these.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; `run` is for the event loop."""

    def __init__(self) -> None:
        """Begin with no step."""
        self._steps = ThreadPoolExecutor(1, "llmcache-model")

    async def run(self, step: Callable[[], _T]) -> _T:
        """Have a step done; if the one who waits for it is cancelled before its turn, it is not."""
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Have a step done after those that wait; see `run`."""
        return self._steps.submit(step)

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within: the calling thread runs the model in place of this one. What it gets lets others have a turn."""
        over = self._take()

        def turn() -> None:
            nonlocal over
            over.set()
            over = self._take()

        try:
            yield turn
        finally:
            over.set()

    def _take(self) -> threading.Event:
        """Wait for a turn, which lasts until the event is set."""
        begun, over = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            over.wait()

        self.submit(hold)
        begun.wait()
        return over

    def close(self) -> None:
        """Do what waits, and end the thread. Twice does nothing."""
        self._steps.shutdown()
