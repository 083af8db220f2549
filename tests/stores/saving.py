"""Saves to one folder from several processes at once, and kills some: run by `test_save`, with the folder.

Prints how many processes were killed, and how many of them left something behind.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from llmcache import LLMCache
from tests.tiny_models import BARE, build, padded

N_SAVERS, N_LOADS, N_KILLED = 2, 4, 6


def fork(do: Callable[[], None]) -> int:
    """Do something in a process of its own."""
    number = os.fork()
    if number == 0:
        status = 1
        try:
            do()
            status = 0
        finally:
            os._exit(status)
    return number


def save(folder: Path, n_requests: int, n_rounds: int) -> None:
    """Save a cache of so many requests again and again."""
    cache = LLMCache.wrap(build(BARE["bert"]))
    for seed in range(n_requests):
        cache(**padded([5], seed=seed))
    for _ in range(n_rounds):
        cache.save(folder)


def load(folder: Path) -> int:
    """How many requests the save there has; all of them must be whole."""
    with LLMCache.load(build(BARE["bert"]), folder) as cache:
        n_stored = cache.stats().n_stored
        for seed in range(n_stored):
            cache(**padded([5], seed=seed))
        assert cache.stats().n_hits == n_stored, cache.stats()
        return n_stored


def overlap(folder: Path) -> None:
    """Load while others save."""
    save(folder, 1, 1)
    has_loaded = multiprocessing.Event()

    def save_on(n: int) -> None:
        while not has_loaded.is_set():
            save(folder, n, 2)

    savers = [fork(lambda n=n: save_on(n)) for n in range(1, N_SAVERS + 1)]
    try:
        for _ in range(N_LOADS):
            assert load(folder) in range(1, N_SAVERS + 1)
    finally:
        has_loaded.set()
        statuses = [os.waitpid(number, 0)[1] for number in savers]
    assert statuses == [0] * N_SAVERS, statuses


def kill(folder: Path) -> int:
    """Kill processes that save, and return how many left something behind."""
    rng, n_left = random.Random(0), 0
    for _ in range(N_KILLED):
        saver = fork(lambda: save(folder, 2, 10_000))
        time.sleep(0.6 + 0.3 * rng.random())  # it wraps a model first
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        n_left += len(list(folder.iterdir())) > 3
        assert load(folder) in range(1, N_SAVERS + 1)
    save(folder, 1, 1)
    return n_left


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    overlap(where)
    sys.stdout.write(f"{N_KILLED} {kill(where)}")
