"""A forked process answers as the plain model does, and never waits for a thread of its parent."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from llmcache import LLMCache
from tests.contract.judge import ask, check_same
from tests.forks import in_child, needs_fork
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


def check_children(cache: LLMCache, kind: str) -> None:
    """Fork while threads call the model; compare the answers of child, grandchild and parent with the plain model's."""
    plain = build(KINDS[kind])
    expected = [ask(plain, **call) for call in CALLS]

    def compare() -> str:
        for number, (call, output) in enumerate(zip(CALLS, expected, strict=True)):
            check_same(cache(**call), output, where=f"call {number}")
        return "same"

    def compare_below(n_generations: int) -> list[str]:
        told = [compare()]
        if n_generations > 1:
            told += in_child(compare_below, n_generations - 1)
        finish(cache)
        return told

    for call in CALLS[::2]:
        cache(**call)
    with busy(cache):
        assert in_child(compare_below, 2) == ["same"] * 2
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
def test_a_forked_process_uses_a_store(store: dict[str, Any]) -> None:
    """Child and parent both use the open store: neither waits for the other, or reads a reply meant for it."""
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
