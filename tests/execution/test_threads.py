"""Many threads and async tasks on one wrapped model."""

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import LLMCache
from llmcache.banks.entry import Entry
from llmcache.banks.memory import Memory
from tests.execution.calls import X, agree, assert_close, pair, plain, run, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, padded, tokens

N_THREADS = 8
ONE = padded([6])


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What each of several threads makes of its number; all begin at once."""
    barrier = threading.Barrier(N_THREADS)

    def begin(seed: int) -> Any:
        barrier.wait()
        return work(seed)

    with ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(begin, range(N_THREADS)))


def ask_in_threads(settings: dict[str, Any], n_calls: int, tolerance: float) -> LLMCache:
    """A cache whose threads asked some of 12 rows again and again, which were answered as the plain model does."""
    cache, alone = pair(BARE["bert"], **settings)
    rows = padded([3, 4, 5, 6, 7, 8, 5, 6, 3, 8, 4, 7], seed=11)
    valid, expected = rows["attention_mask"].bool(), run(alone, **rows)

    def work(seed: int) -> int:
        chance = random.Random(seed)
        n = 0
        for _ in range(n_calls):
            picked = chance.sample(range(12), chance.choice([1, 2, 3, 5]))
            output = cache(**{name: value[picked] for name, value in rows.items()}).last_hidden_state
            found, wanted = output[valid[picked]], expected[picked][valid[picked]]
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            n += len(picked)
        return n

    n_rows = sum(in_threads(work))
    stats = cache.stats()
    assert stats.n_requests == n_rows == stats.n_hits + stats.n_misses + stats.n_revalidated
    assert stats.n_hits > 0
    assert (stats.errors, stats.bypassed) == (0, {})
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("max_entries", [None, 5])
def test_eight_threads_get_the_plain_answers(layers: str, max_entries: int | None) -> None:
    settings = {"layers": layers, "max_entries": max_entries, "auto_bypass": False}
    stats = ask_in_threads(settings, n_calls=12, tolerance=1e-5).stats()
    assert stats.n_stored <= 12
    assert all(n <= (max_entries or 12) for n in stats.n_entries.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"policy": {"name": "divergence", "check_rate": 0.5}}, 1e-4),
        ({"compression": {"name": "pca", "dim": 32, "fit_on": 40}}, 0.05),  # all axes: what is left is float16
    ],
    ids=["divergence", "pca"],
)
def test_eight_threads_check_and_fit(settings: dict[str, Any], tolerance: float) -> None:
    settings = {"tau": 0.9999, "exact": False, "payload": "sequence", **settings}
    stats = ask_in_threads(settings, n_calls=8, tolerance=tolerance).stats()
    assert (stats.n_revalidated > 0) == ("policy" in settings)
    assert stats.n_stored == 12


def test_wrong_inputs_of_one_thread_do_not_disturb_the_others() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])

    def work(seed: int) -> None:
        for i in range(10):
            if seed % 2 and i % 2:
                with pytest.raises(IndexError):
                    cache(input_ids=torch.full((1, 4), 10_000))
            else:
                agree(cache, alone, **X)

    in_threads(work)


def test_threads_in_their_own_namespaces() -> None:
    cache = wrapped(CLASSIFIERS["bert"], tau=-1.0)

    def work(seed: int) -> None:
        with cache.namespace(f"tenant-{seed}"):
            for i in (0, 1, 0):
                cache(**{name: value[i : i + 1] for name, value in X.items()})

    in_threads(work)
    stats = cache.stats()
    # In each namespace: a miss, then its neighbour at any similarity, then the first again.
    assert (stats.n_misses, stats.hits) == (N_THREADS, {"semantic": N_THREADS, "exact": N_THREADS})
    assert [cache.purge(namespace=f"tenant-{i}") for i in range(N_THREADS)] == [1] * N_THREADS


def test_one_threads_settings_are_not_anothers() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    with cache.disabled(), cache.namespace("mine"), ThreadPoolExecutor(1) as pool:
        pool.submit(cache, **ONE).result()
    assert cache.stats().bypassed == {}
    assert [cache.purge(namespace=name) for name in ("mine", "default")] == [0, 1]


def test_tasks_in_their_own_namespaces() -> None:
    cache = wrapped(CLASSIFIERS["bert"])

    async def request(name: str, in_thread: bool) -> None:
        with cache.namespace(name):
            for _ in range(2):
                await asyncio.sleep(0)
                await (asyncio.to_thread(cache, **ONE) if in_thread else asyncio.sleep(0, cache(**ONE)))

    async def serve() -> None:
        await asyncio.gather(*(request(f"tenant-{i}", in_thread=i % 2 == 0) for i in range(6)))
        cache(**ONE)

    asyncio.run(serve())
    assert (cache.stats().n_misses, cache.stats().hits) == (7, {"exact": 6})
    assert cache.purge(namespace="default") == 1


def test_weights_that_change_while_threads_run_are_followed() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    for _ in range(3):
        with torch.no_grad():
            cache.model.bert.encoder.layer[0].output.dense.weight.mul_(1.1)
        expected = plain(cache, **X)
        for answer in in_threads(lambda _: cache(**X).logits):
            assert_close(answer, expected)


class Slow(Memory):
    """Reads of the next key to come wait until they are let go."""

    holds = False
    has_begun, may_end = threading.Event(), threading.Event()

    def __getitem__(self, key: str) -> Entry:
        if Slow.holds:
            Slow.holds = False
            Slow.has_begun.set()
            assert Slow.may_end.wait(20)
        return super().__getitem__(key)


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.assembly.Memory", Slow)
    monkeypatch.setattr(Slow, "has_begun", threading.Event())
    monkeypatch.setattr(Slow, "may_end", threading.Event())
    monkeypatch.setattr(Slow, "holds", False)


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("settings", [{}, {"tau": 0.9999}, {"tau": 0.9999, "mode": "paper"}], ids=str)
def test_a_slow_read_of_one_call_holds_up_no_other(settings: dict[str, Any], tmp_path: Path) -> None:
    cache, alone = pair(CLASSIFIERS["bert"], auto_bypass=False, **settings)
    first, second, third = ({"input_ids": tokens(1, 6, seed=seed)} for seed in range(3))
    cache(**first)
    cache(**second)
    Slow.holds = True
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(cache, **first)
        assert Slow.has_begun.wait(20)

        def others() -> None:
            for inputs in (second, third, second, third):  # a hit, a miss, two hits
                agree(cache, alone, **inputs)
            cache.save(tmp_path)
            assert cache.purge(namespace="none") == 0

        try:
            pool.submit(others).result(20)
            stats = cache.stats()
            assert (stats.n_hits, stats.n_misses, stats.n_stored) == (3, 3, 3)
            assert not late.done()
        finally:
            Slow.may_end.set()
        assert_close(late.result(20).logits, run(alone, **first))
    assert (cache.stats().n_hits, cache.stats().errors) == (4, 0)


@pytest.mark.usefixtures("_slow")
def test_what_is_evicted_while_it_is_read_is_computed() -> None:
    cache, alone = pair(CLASSIFIERS["bert"], max_entries=1, auto_bypass=False)
    one, two = ({"input_ids": tokens(1, 6, seed=seed)} for seed in (1, 2))
    cache(**one)
    Slow.holds = True
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(cache, **one)
        assert Slow.has_begun.wait(20)
        try:
            cache(**two)
        finally:
            Slow.may_end.set()
        assert torch.equal(late.result(20).logits, run(alone, **one))
    assert (cache.stats().hits, cache.stats().n_misses, cache.stats().errors) == ({}, 3, 0)
