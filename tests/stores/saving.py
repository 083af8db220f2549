"""Saves to one folder from several processes at once, and kills some; `test_save` runs it."""

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import torch

from llmcache import LLMCache
from tests.tiny_models import BARE, build, padded

N_SAVERS, N_LOADS = 2, 4
N_KILLED, MOST_KILLED = 6, 100  # more than 6 only until one was killed while it wrote


def save(folder: Path, n_requests: int, n_rounds: int, may_end: Any = None, has_saved: Any = None) -> None:
    """Save a cache of `n_requests` requests `n_rounds` times, and on until `may_end` is set."""
    cache = LLMCache.wrap(build(BARE["bert"]))
    for seed in range(n_requests):
        cache(**padded([5], seed=seed))
    while n_rounds > 0 or not (may_end is None or may_end.is_set()):
        cache.save(folder)
        n_rounds -= 1
        if has_saved is not None:
            has_saved.set()


def load(folder: Path) -> int:
    """Load the save and assert that all its requests hit; return their number."""
    with LLMCache.load(build(BARE["bert"]), folder) as cache:
        n_stored = cache.stats().n_stored
        for seed in range(n_stored):
            cache(**padded([5], seed=seed))
        assert cache.stats().n_hits == n_stored, cache.stats()
        return n_stored


def overlap(folder: Path) -> None:
    """Load while other processes save."""
    save(folder, 1, 1)
    fork = multiprocessing.get_context("fork")
    has_loaded = fork.Event()
    savers = [fork.Process(target=save, args=(folder, n, 1, has_loaded)) for n in range(1, N_SAVERS + 1)]
    for saver in savers:
        saver.start()
    try:
        for _ in range(N_LOADS):
            assert load(folder) in range(1, N_SAVERS + 1)
    finally:
        has_loaded.set()
        for saver in savers:
            saver.join()
    assert [saver.exitcode for saver in savers] == [0] * N_SAVERS


def kill(folder: Path) -> tuple[int, int]:
    """Kill processes that save; return how many, and how many of them left files behind."""
    rng, n_killed, n_left = random.Random(0), 0, 0
    while n_killed < N_KILLED or (not n_left and n_killed < MOST_KILLED):
        fork = multiprocessing.get_context("fork")
        has_saved = fork.Event()
        saver = fork.Process(target=save, args=(folder, 2, 10_000, None, has_saved))
        saver.start()
        has_saved.wait()
        time.sleep(0.1 * rng.random())
        saver.kill()
        saver.join()
        n_killed += 1
        n_left += len(list(folder.iterdir())) > 3
        assert load(folder) in range(1, N_SAVERS + 1)
    save(folder, 1, 1)
    return n_killed, n_left


def check(folder: Path) -> tuple[int, int]:
    """Save from several processes, then kill some; return what `kill` does."""
    torch.set_num_threads(1)
    overlap(folder)
    return kill(folder)
