"""What is stored after the answer: the next call finds it, whatever happens in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.execution import store_queue
from llmcache.models import weights
from tests import inside
from tests.execution.calls import agree, assert_close, pair, run
from tests.execution.test_failures import break_part
from tests.tiny_models import CLASSIFIERS, states, tokens

BERT = CLASSIFIERS["bert"]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are taken for settled at once, not after many calls."""
    monkeypatch.setattr(weights, "_STEADY", -1)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> tuple[LLMCache, nn.Module]:
    """A cache and the model alone; no thread stores anything."""
    monkeypatch.setattr(store_queue, "_IDLE_S", 3600.0)
    return pair(BERT, auto_bypass=False)


def waiting(cache: LLMCache) -> int:
    return len(inside.store_queue(cache))


def wait_until_stored(cache: LLMCache) -> None:
    ends = monotonic() + 30
    while waiting(cache) and monotonic() < ends:
        sleep(0.01)
    assert not waiting(cache)


def test_the_next_call_finds_it(steady: tuple[LLMCache, nn.Module]) -> None:
    for _ in range(3):
        agree(*steady, input_ids=tokens(2, 5))
    cache, _ = steady
    assert cache.stats().hits == {"exact": 4} and cache.stats().stored_later == {"next_call": 1}


def test_one_call_waits_while_others_are_computed(steady: tuple[LLMCache, nn.Module]) -> None:
    cache, _ = steady
    for seed in range(4):
        agree(*steady, input_ids=tokens(1, 5, seed=seed))
        assert waiting(cache) == 1
    assert cache.stats().n_stored == 4 and cache.stats().stored_later == {"next_call": 3, "asked": 1}


def test_a_thread_stores_in_a_quiet_moment() -> None:
    cache, alone = pair(BERT)
    for seed in range(2):  # the thread sleeps in between, and is woken
        agree(cache, alone, input_ids=tokens(1, 5, seed=seed))
        wait_until_stored(cache)
        sleep(3 * store_queue._IDLE_S)
    assert cache.stats().stored_later == {"background": 2} and cache.stats().n_stored == 2
    thread = inside.store_queue(cache)._worker.thread
    cache.unwrap()
    assert thread is not None and not thread.is_alive()


@pytest.mark.parametrize("is_restored", [False, True])
def test_nothing_is_kept_of_weights_that_were_edited_before_it_was_stored(
    steady: tuple[LLMCache, nn.Module], is_restored: bool
) -> None:
    """That they were still whole when the call ended, nobody looked. They are looked at from then on."""
    cache, alone = steady
    agree(cache, alone, input_ids=tokens(1, 5))
    biases = [model.get_parameter("bert.encoder.layer.1.output.dense.bias") for model in (cache.model, alone)]
    with torch.no_grad():
        for bias in biases:
            bias += 0.5
        for bias in biases if is_restored else ():
            bias -= 0.5
    for _ in range(2):
        agree(cache, alone, input_ids=tokens(1, 5))
    stats = cache.stats()
    assert stats.stored_later == {"dropped": 1, "next_call": 1} and stats.hits == {"exact": 1}


@pytest.mark.parametrize("look", ["stats", "save", "purge", "clear", "unwrap", "drain"])
def test_who_asks_what_is_held_finds_it(steady: tuple[LLMCache, nn.Module], look: str, tmp_path: Path) -> None:
    cache, alone = steady
    agree(cache, alone, input_ids=tokens(1, 5))
    assert waiting(cache) == 1
    if look == "save":
        cache.save(tmp_path / "saved")
        cache.unwrap()
        assert LLMCache.load(cache.model, tmp_path / "saved").stats().n_stored == 1
    elif look == "purge":
        assert cache.purge(namespace="default") == 1
    else:
        getattr(cache, look)()
    assert waiting(cache) == 0
    assert cache.stats().n_stored == (0 if look in ("purge", "clear") else 1)


def test_a_failure_to_store_is_counted_and_the_next_call_works(
    steady: tuple[LLMCache, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    cache, alone = steady
    broken = break_part(cache, "memory", "__setitem__")
    for seed in (0, 1, 2):
        agree(cache, alone, input_ids=tokens(1, 5, seed=seed))
    broken.is_broken = False
    agree(cache, alone, input_ids=tokens(1, 5, seed=3))
    stats = cache.stats()
    assert stats.errors == 2 and stats.n_stored == 2  # the third was stored by the fourth call
    assert len([record for record in caplog.records if "failed to store" in record.getMessage()]) == 1


def test_a_queue_that_is_full_has_calls_stored_at_once(
    steady: tuple[LLMCache, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_queue, "MAX_WAITING", 0)
    cache, alone = steady
    for _ in range(2):
        agree(cache, alone, input_ids=tokens(1, 5))
    assert cache.stats().stored_later == {"queue_full": 1} and cache.stats().hits == {"exact": 1}


def test_a_thread_that_died_is_counted_and_replaced(
    steady: tuple[LLMCache, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, alone = steady
    with monkeypatch.context() as patch:
        patch.setattr(store_queue, "_store_when_quiet", lambda ref, worker: worker.wake.clear())
        agree(cache, alone, input_ids=tokens(1, 5))
        worker = inside.store_queue(cache)._worker
        assert worker.thread is not None
        worker.thread.join()
        worker.wake.clear()
    agree(cache, alone, input_ids=tokens(1, 5, seed=1))
    assert worker.thread.is_alive()
    assert cache.stats().health.failures == {"store in the background: RuntimeError": 1}
    assert cache.stats().n_stored == 2


def test_calls_are_stored_in_the_order_in_which_they_were_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank that evicts holds the same requests as one whose calls are stored at once."""
    at_once, _ = pair(BERT, auto_bypass=False, max_entries=6)
    later, _ = pair(BERT, auto_bypass=False, max_entries=6)
    random = Random(0)
    for _ in range(150):
        ids = tokens(1, 5, seed=int(random.paretovariate(0.6)) % 20)
        for cache, least in ((at_once, 10_000), (later, -1)):
            monkeypatch.setattr(weights, "_STEADY", least)
            cache(input_ids=ids)
        assert at_once.last == later.last
    assert later.stats().stored_later["next_call"] > 20
    assert not at_once.stats().stored_later and later.stats().n_evicted == at_once.stats().n_evicted


def test_threads_that_ask_the_same_get_the_same() -> None:
    cache, alone = pair(BERT, tau=1.0, index="flat", auto_bypass=False)
    asked = [tokens(1, 5, seed=seed) for seed in range(6)]
    expected = [run(alone, input_ids=ids) for ids in asked]

    def ask(number: int) -> Tensor:
        with torch.inference_mode():
            answer = states(cache.model(input_ids=asked[number % 6]))
        return answer

    with ThreadPoolExecutor(4) as pool:
        for number, answer in enumerate(pool.map(ask, range(120))):
            assert_close(answer, expected[number % 6])
    stats = cache.stats()
    assert stats.n_requests == 120 and stats.errors == 0 and stats.n_stored == 6


def test_a_cache_that_is_let_go_of_ends_its_thread() -> None:
    cache, alone = pair(BERT)
    agree(cache, alone, input_ids=tokens(1, 5))
    thread = inside.store_queue(cache)._worker.thread
    assert thread in threading.enumerate()
    cache.unwrap()
    assert thread not in threading.enumerate()


def test_what_is_observed_is_not_stored(steady: tuple[LLMCache, nn.Module]) -> None:
    cache, _ = steady
    cache.observe([{"input_ids": tokens(1, 5, seed=seed)} for seed in range(3)])
    assert waiting(cache) == 0 and cache.stats().n_stored == 0


def test_entries_with_an_age_are_stored_at_once() -> None:
    """Else they would be taken for younger than they are."""
    cache, alone = pair(BERT, policy={"name": "ttl", "ttl_s": 60.0})
    agree(cache, alone, input_ids=tokens(1, 5))
    assert waiting(cache) == 0 and cache.stats().n_stored == 1
