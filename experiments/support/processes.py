"""Processes of our own, each of which begins as if Python had just been started."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def begin(work: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Have `work(say, *args)` done by a process of its own; with it, the connection on which it tells."""
    context = multiprocessing.get_context("forkserver")  # a clean process, which has imported the module once
    context.set_forkserver_preload([work.__module__])
    listen, say = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(say, *args))
    process.start()
    say.close()
    return process, listen
