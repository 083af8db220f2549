"""The one thread that runs the model, in turns among those who have work for it.

Work is done in steps: a batch of an encoder, a token of a generation. After each step the next one who has work gets a
turn, so that none waits for longer than the others' steps. What takes long, and cannot be left half-way, another thread
does, which holds the model in turns with these.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


class ModelThread:
    """Runs steps one after another. Thread-safe; `run` is for the event loop."""

    def __init__(self, name: str = "llmcache-model") -> None:
        """Start the thread, which ends with `close`."""
        self._steps: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._has_work = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Steps that wait."""
        return len(self._steps)

    async def run(self, step: Callable[[], _T]) -> _T:
        """Have a step done; if the one who waits for it is cancelled before its turn, it is not.

        Raises:
            RuntimeError: The thread was closed.
            Exception: What the step raised.
        """
        return await asyncio.wrap_future(self.submit(step))

    def submit(self, step: Callable[[], _T]) -> "Future[_T]":
        """Have a step done after those that wait; see `run`."""
        future: Future[_T] = Future()
        with self._has_work:
            if self._is_closed:
                raise RuntimeError("the model's thread was closed")
            self._steps.append((future, step))
            self._has_work.notify()
        return future

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Within: the thread that calls this runs the model in place of this one. What it gets lets others have a turn.

        Raises:
            RuntimeError: The thread was closed; here, or when others are to have a turn.
        """
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
        with self._has_work:
            self._is_closed = True
            self._has_work.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._has_work:
                while not self._steps and not self._is_closed:
                    self._has_work.wait()
                if not self._steps:
                    return
                future, step = self._steps.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(step())
            except BaseException as error:  # handed to the one who waits
                future.set_exception(error)
            del future, step
