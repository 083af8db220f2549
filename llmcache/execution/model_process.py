"""A process of its own that runs the trunk: other threads' Python code and the trunk's do not wait for each other.

In one process, a forward of a small model and other threads take turns at the interpreter's lock some hundred times.
The process has a twin of the trunk, whose tensors are in memory that both share, so that edits in place are seen by
both. It runs the same operations with the same settings of torch, so that its outputs are equal bit for bit, which is
checked when it is started.

Sizes: B rows, T tokens of a call.
"""

import atexit
import multiprocessing.process
import signal
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.execution.eager import torch_settings
from llmcache.execution.graphs import TrunkRun
from llmcache.threads import at_fork, forkable

_START_S = 120.0  # in which it has to have imported what it needs
_CALL_S = 300.0  # in which a call has to be computed; later it is taken for stuck
_END_S = 10.0

_Packed = tuple[np.ndarray[Any, Any], torch.dtype]


class ModelProcess:
    """Runs one trunk for calls of any shape. Thread-safe: one call at a time."""

    def __init__(self, run: TrunkRun) -> None:
        """Start the process.

        Args:
            run: What it is to run. Its tensors are moved to shared memory.

        Raises:
            Exception: It cannot be handed over, has no memory to share, or did not start in time.
        """
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, run, torch_settings()), name="llmcache-model", daemon=True
        )
        self._lock = forkable(threading.Lock(), is_waited_for=False)
        self._is_ours = True
        at_fork(self._let_go)
        self._process.start()
        theirs.close()
        atexit.register(self.close)  # before multiprocessing's own, which would wait for it
        try:
            self._receive(_START_S)
        except Exception:
            self.close()
            raise

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """What the trunk puts out for inputs (B, T) by name, in the order of `Output.names`.

        Raises:
            RuntimeError: The trunk failed there.
            OSError: The process is gone, or stuck; it is ended then. Or it serves the process that this one was forked
                from, whose answers come by the same pipe.
        """
        if not self._is_ours:
            raise OSError("the model's process serves the process that this one was forked from")
        with self._lock:
            try:
                self._connection.send({name: one.numpy() for name, one in inputs.items()})
                found = self._receive(_CALL_S)
            except (EOFError, OSError) as error:
                self._end()
                raise OSError(f"the model's process is gone: {error}") from error
        if isinstance(found, str):
            raise RuntimeError(found)
        # Which may be read-only, by how they were sent.
        return [torch.from_numpy(np.require(values, requirements="W")).view(dtype) for values, dtype in found]

    def close(self) -> None:
        """End the process, after the call that it computes. Twice does nothing."""
        atexit.unregister(self.close)
        with self._lock:
            self._end()

    def _receive(self, most_s: float) -> Any:
        if not self._connection.poll(most_s):
            raise TimeoutError(f"no answer for {most_s:g} s")
        return self._connection.recv()

    def _end(self) -> None:
        """It ends by itself where nobody is left to ask it."""
        self._connection.close()
        if not self._is_ours:
            return
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _let_go(self) -> None:
        """In a forked process."""
        self._is_ours = False
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # a child that ends kills them
        self._connection.close()


# -- in the process ----------------------------------------------------------------------------------------------------


def _serve(connection: "Connection[Any, Any]", run: TrunkRun, settings: tuple[Any, ...]) -> None:
    """Answer calls until nobody is left to make them."""
    for one in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a service: who asks ends first
        signal.signal(one, signal.SIG_IGN)
    _set(settings)
    try:
        connection.send(None)
        while True:
            connection.send(_run(run, connection.recv()))
    except (EOFError, OSError):
        pass


def _run(run: TrunkRun, inputs: Mapping[str, np.ndarray[Any, Any]]) -> list[_Packed] | str:
    """The packed output, or what went wrong."""
    try:
        with torch.inference_mode():
            made = run({name: torch.from_numpy(one) for name, one in inputs.items()})
        return [_packed(one) for one in made]
    except Exception as error:  # told to who asks, who runs it again
        return f"{type(error).__name__}: {error}"


def _packed(one: Tensor) -> _Packed:
    """A tensor as numpy has it, which knows no bfloat16, and its dtype."""
    return one.contiguous().view(torch.uint8).numpy(), one.dtype


def _set(settings: Sequence[Any]) -> None:
    """Have these settings of torch; see `torch_settings`."""
    n_threads, dtype, precision, is_deterministic = settings
    torch.set_num_threads(n_threads)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(is_deterministic)
