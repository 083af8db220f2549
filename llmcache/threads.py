"""Threads of our own that compute beside calls of the model."""

import threading
from contextlib import suppress

import torch


def compute_alone() -> None:
    """Let this thread compute by itself, with one thread of torch's."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return
    torch.set_num_threads(1)  # also of threads that begin to compute later, unless another one puts it back at once
    others = threading.Thread(target=torch.set_num_threads, args=(n_threads,), name="llmcache-threads")
    with suppress(RuntimeError):  # the interpreter ends, and begins no thread any more
        others.start()
        others.join()
