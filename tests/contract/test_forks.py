"""A forked process answers as the plain model does, and never waits for a thread of its parent."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmcache import LLMCache
from tests.contract.judge import ask, check_same
from tests.forks import in_child, needs_fork
from tests.redis_server import redis_server
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, tokens

pytestmark = [needs_fork, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]

CALLS = [{"input_ids": tokens(1 + seed % 2, 9 + seed % 3, seed)} for seed in range(4)]
KINDS = {"encoder": CLASSIFIERS["bert"], "decoder": GENERATORS["gpt2"]}


@contextmanager
def busy(cache: LLMCache, n_threads: int = 2) -> Iterator[None]:
    """Within: other threads keep calling the model, with known and new requests."""
    has_ended = threading.Event()

    def work(number: int) -> None:
        seed = 1_000 * number
        while not has_ended.is_set():
            cache(input_ids=tokens(1, 12, seed))
            cache(**CALLS[seed % len(CALLS)])
            seed += 1
            time.sleep(0.002)

    threads = [threading.Thread(target=work, args=(number + 1,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


def check_children(cache: LLMCache, kind: str, n_children: int = 2) -> None:
    """Fork while threads call the model; compare the answers of children and parent with the plain model's."""
    plain = build(KINDS[kind])
    expected = [ask(plain, **call) for call in CALLS]

    def compare(then: Callable[[], object] = lambda: None) -> str:
        for number, (call, output) in enumerate(zip(CALLS, expected, strict=True)):
            check_same(cache(**call), output, where=f"call {number}")
        then()
        return "same"

    for call in CALLS[::2]:
        cache(**call)
    with busy(cache):
        told = [in_child(lambda: compare(lambda: finish(cache))) for _ in range(n_children)]
    assert told == ["same"] * n_children
    assert compare() == "same"
    assert cache.stats().store is not None or cache.stats().errors == 0  # late reads of a store count as errors


def finish(cache: LLMCache) -> None:
    """Read the counters, drain and unwrap: none of it may wait for a thread that the fork left behind."""
    cache.stats()
    cache.drain()
    cache.unwrap()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_process_answers_from_memory(kind: str) -> None:
    """A child keeps the entries in memory, answers as the plain model does, and can drain and unwrap."""
    with LLMCache.wrap(build(KINDS[kind]), auto_bypass=False) as cache:
        known = CALLS[0]
        cache(**known)
        check_children(cache, kind)

        def served() -> int:
            cache(**known)
            return cache.stats().n_hits

        before = cache.stats().n_hits
        assert in_child(served) == before + 1
        assert cache.stats().n_hits == before


@pytest.mark.slow
def test_a_forked_process_uses_a_store_on_disk(tmp_path: Path) -> None:
    """Child and parent both use the open store; neither waits for the other."""
    store = {"name": "disk", "folder": str(tmp_path / "store")}
    with LLMCache.wrap(build(KINDS["encoder"]), store=store, auto_bypass=False) as cache:
        check_children(cache, "encoder")
        check_what_a_child_stores(cache)


@pytest.mark.slow
def test_a_forked_process_uses_a_store_on_redis(tmp_path: Path) -> None:
    """A child has its own connections and thread: no reply of the server reaches the wrong process."""
    with redis_server(tmp_path) as server:
        store = {"name": "redis", "url": server.url, "timeout_ms": 5_000.0}
        with LLMCache.wrap(build(KINDS["encoder"]), store=store, auto_bypass=False) as cache:
            check_children(cache, "encoder")
            check_what_a_child_stores(cache)


def check_what_a_child_stores(cache: LLMCache) -> None:
    """Check that a child's entries reach the store, and that purges reach the other process, both ways."""

    def store_new() -> int:
        for seed in range(3):
            cache(input_ids=tokens(1, 11, 90_000 + seed))
        cache.drain()
        return held(cache)

    cache.drain()
    before = held(cache)
    assert in_child(store_new) >= before + 3
    assert held(cache) >= before + 3
    known = CALLS[0]
    cache(**known)
    n_hits = cache.stats().n_hits
    assert in_child(lambda: cache.purge(namespace="default")) >= 1
    cache(**known)
    assert cache.stats().n_hits == n_hits, "served after a child had purged it"
    listen, say = os.pipe()

    def wait_and_ask() -> int:
        before = cache.stats().n_hits
        os.read(listen, 1)
        cache(**known)
        return cache.stats().n_hits - before

    cache(**known)
    with ExitStack() as stack:
        stack.callback(os.close, listen)
        stack.callback(os.close, say)
        purge = threading.Timer(0.2, lambda: (cache.purge(namespace="default"), os.write(say, b"x")))
        purge.start()
        assert in_child(wait_and_ask) == 0, "served after the parent had purged it"
        purge.join()


def held(cache: LLMCache) -> int:
    stats = cache.stats().store
    assert stats is not None and stats.n_values is not None
    return stats.n_values


@pytest.mark.slow
def test_processes_of_multiprocessing_and_their_children_answer() -> None:
    """Children of multiprocessing's start method `fork`, and their children, answer as the plain model does."""
    plain, context = build(KINDS["encoder"]), multiprocessing.get_context("fork")
    expected = [ask(plain, **call) for call in CALLS]

    def work(number: int, queue: Any) -> None:
        check_same(cache(**CALLS[number]), expected[number])
        queue.put(in_child(lambda: check_same(cache(**CALLS[0]), expected[0]) or number))

    with LLMCache.wrap(build(KINDS["encoder"]), auto_bypass=False) as cache:
        cache(**CALLS[0])
        queue = context.SimpleQueue()
        with busy(cache):
            workers = [context.Process(target=work, args=(number, queue)) for number in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(20)
        assert [worker.exitcode for worker in workers] == [0] * 2
        assert sorted(queue.get() for _ in workers) == [0, 1]
