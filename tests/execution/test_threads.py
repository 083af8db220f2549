"""Many threads and async tasks on one wrapped model."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import STORES, Entry, LLMCache
from llmcache.banks.stores import MemoryStore
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, states, tokens

N_THREADS = 8


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["last", "all"])
@pytest.mark.parametrize("max_entries", [None, 5])
def test_eight_threads_get_the_plain_answers(layers: str, max_entries: int | None) -> None:
    model = build(BARE["bert"])
    rows = padded([3, 4, 5, 6, 7, 8, 5, 6, 3, 8, 4, 7], seed=11)
    valid = rows["attention_mask"].bool()
    with torch.inference_mode():
        plain = model(**rows).last_hidden_state
    cache = LLMCache.wrap(model, layers=layers, max_entries=max_entries, auto_bypass=False)
    barrier = threading.Barrier(N_THREADS)

    def work(seed: int) -> int:
        chance = random.Random(seed)
        barrier.wait()
        n = 0
        for _ in range(12):
            picked = chance.sample(range(12), chance.choice([1, 2, 3, 5]))
            output = cache(**{name: value[picked] for name, value in rows.items()}).last_hidden_state
            torch.testing.assert_close(output[valid[picked]], plain[picked][valid[picked]], atol=1e-5, rtol=1e-5)
            n += len(picked)
        return n

    with ThreadPoolExecutor(N_THREADS) as pool:
        n_rows = sum(pool.map(work, range(N_THREADS)))
    stats = cache.stats()
    assert stats.n_requests == n_rows == stats.n_hits + stats.n_misses
    assert stats.n_hits > 0
    assert (stats.errors, stats.bypassed) == (0, {})
    assert stats.n_stored <= 12
    assert all(n <= (max_entries or 12) for n in stats.n_entries.values())


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"policy": {"name": "divergence", "check_rate": 0.5}}, 1e-4),
        ({"compression": {"name": "pca", "dim": 32, "fit_on": 40}}, 0.05),  # all axes: what is left is float16
    ],
    ids=["divergence", "pca"],
)
def test_eight_threads_check_and_fit(settings: dict[str, object], tolerance: float) -> None:
    model = build(BARE["bert"])
    rows = padded([3, 4, 5, 6, 7, 8, 5, 6, 3, 8, 4, 7], seed=11)
    valid = rows["attention_mask"].bool()
    with torch.inference_mode():
        plain = model(**rows).last_hidden_state
    cache = LLMCache.wrap(model, tau=0.9999, exact=False, payload="sequence", **settings)
    barrier = threading.Barrier(N_THREADS)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        barrier.wait()
        for _ in range(8):
            picked = chance.sample(range(12), 3)
            output = cache(**{name: value[picked] for name, value in rows.items()}).last_hidden_state
            close = {"atol": tolerance, "rtol": tolerance}
            torch.testing.assert_close(output[valid[picked]], plain[picked][valid[picked]], **close)

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))
    stats = cache.stats()
    assert stats.n_requests == N_THREADS * 8 * 3 == stats.n_hits + stats.n_misses + stats.n_revalidated
    assert stats.n_hits > 0
    assert (stats.n_revalidated > 0) == ("policy" in settings)
    assert (stats.errors, stats.n_stored) == (0, 12)


def test_wrong_inputs_of_one_thread_do_not_disturb_the_others() -> None:
    model = build(CLASSIFIERS["bert"])
    rows = padded([6, 4])
    with torch.inference_mode():
        plain = model(**rows).logits
    cache = LLMCache.wrap(model)

    def work(seed: int) -> None:
        for i in range(10):
            if seed % 2 and i % 2:
                with pytest.raises(IndexError):
                    cache(input_ids=torch.full((1, 4), 10_000))
            else:
                torch.testing.assert_close(cache(**rows).logits, plain, atol=1e-5, rtol=1e-5)

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))


def test_threads_in_their_own_namespaces() -> None:
    model = build(CLASSIFIERS["bert"])
    rows = padded([6, 4])
    cache = LLMCache.wrap(model, tau=-1.0)

    def work(seed: int) -> None:
        with cache.namespace(f"tenant-{seed}"):
            for i in range(3):
                cache(input_ids=rows["input_ids"][i % 2 :][:1], attention_mask=rows["attention_mask"][i % 2 :][:1])

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))
    stats = cache.stats()
    # In each namespace: a miss, then its neighbour at any similarity, then the first again.
    assert (stats.n_misses, stats.hits) == (N_THREADS, {"semantic": N_THREADS, "exact": N_THREADS})
    assert [cache.purge(namespace=f"tenant-{i}") for i in range(N_THREADS)] == [1] * N_THREADS


def test_one_threads_settings_are_not_anothers() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    rows = padded([6])
    with cache.disabled(), cache.namespace("mine"), ThreadPoolExecutor(1) as pool:
        pool.submit(cache, **rows).result()
    assert cache.stats().bypassed == {}
    assert cache.purge(namespace="mine") == 0
    assert cache.purge(namespace="default") == 1


def test_tasks_in_their_own_namespaces() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    rows = padded([6])

    async def request(name: str, in_thread: bool) -> None:
        with cache.namespace(name):
            for _ in range(2):
                await asyncio.sleep(0)
                await (asyncio.to_thread(cache, **rows) if in_thread else asyncio.sleep(0, cache(**rows)))

    async def serve() -> None:
        await asyncio.gather(*(request(f"tenant-{i}", in_thread=i % 2 == 0) for i in range(6)))
        cache(**rows)

    asyncio.run(serve())
    assert (cache.stats().n_misses, cache.stats().hits) == (7, {"exact": 6})
    assert cache.purge(namespace="default") == 1


def test_weights_that_change_while_threads_run_are_followed() -> None:
    model = build(CLASSIFIERS["bert"])
    rows = padded([6, 4])
    cache = LLMCache.wrap(model)
    for _ in range(3):
        with torch.no_grad():
            model.bert.encoder.layer[0].output.dense.weight.mul_(1.1)
        with cache.disabled():
            plain = states(cache(**rows))
        with ThreadPoolExecutor(N_THREADS) as pool:
            for answer in pool.map(lambda _: cache(**rows).logits, range(N_THREADS)):
                torch.testing.assert_close(answer, plain, atol=1e-5, rtol=1e-5)


class Slow(MemoryStore):
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
def slow(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(STORES, "slow", Slow)
    monkeypatch.setattr(Slow, "has_begun", threading.Event())
    monkeypatch.setattr(Slow, "may_end", threading.Event())
    monkeypatch.setattr(Slow, "holds", False)
    return "slow"


@pytest.mark.parametrize("settings", [{}, {"tau": 0.9999}, {"tau": 0.9999, "mode": "paper"}], ids=str)
def test_a_slow_read_of_one_call_holds_up_no_other(slow: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = build(CLASSIFIERS["bert"])
    asked = [{"input_ids": tokens(1, 6, seed=seed)} for seed in range(3)]
    with torch.inference_mode():
        plain = [model(**inputs).logits for inputs in asked]
    cache = LLMCache.wrap(model, store=slow, auto_bypass=False, **settings)
    for inputs in asked[:2]:
        cache(**inputs)
    Slow.holds = True
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(cache, **asked[0])
        assert Slow.has_begun.wait(20)

        def others() -> None:
            for inputs, expected in zip(asked[1:] * 2, plain[1:] * 2, strict=True):  # a hit, a miss, two hits
                torch.testing.assert_close(cache(**inputs).logits, expected)
            cache.save(tmp_path)
            assert cache.purge(namespace="none") == 0

        try:
            pool.submit(others).result(20)
            stats = cache.stats()
            assert (stats.n_hits, stats.n_misses, stats.n_stored) == (3, 3, 3)
            assert not late.done()
        finally:
            Slow.may_end.set()
        torch.testing.assert_close(late.result(20).logits, plain[0])
    assert (cache.stats().n_hits, cache.stats().errors) == (4, 0)


def test_what_is_evicted_while_it_is_read_is_computed(slow: str) -> None:
    model = build(CLASSIFIERS["bert"])
    one, two = ({"input_ids": tokens(1, 6, seed=seed)} for seed in (1, 2))
    with torch.inference_mode():
        plain = model(**one).logits
    cache = LLMCache.wrap(model, store=slow, max_entries=1, auto_bypass=False)
    cache(**one)
    Slow.holds = True
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(cache, **one)
        assert Slow.has_begun.wait(20)
        try:
            cache(**two)
        finally:
            Slow.may_end.set()
        assert torch.equal(late.result(20).logits, plain)
    assert (cache.stats().hits, cache.stats().n_misses, cache.stats().errors) == ({}, 3, 0)
