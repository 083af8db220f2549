"""`cache.last`: what became of each row of a thread's last call."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmcache import LLMCache, Outcome
from tests.calls.helpers import rungs, wrapped
from tests.tiny_models import CLASSIFIERS, GENERATORS, padded, tokens

ONE, TWO = tokens(1, 6, seed=1), tokens(1, 6, seed=2)


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(CLASSIFIERS["bert"])


def test_exact_hits_and_misses_by_row(cache: LLMCache) -> None:
    assert cache.last == ()
    cache(input_ids=ONE)
    (stored,) = cache.last
    assert stored == Outcome(key=stored.key)
    assert len(stored.key) == 43
    cache(input_ids=torch.cat([TWO, ONE]))
    miss, hit = cache.last
    assert hit == Outcome(stored.key, "exact", 3, stored.key, 1.0)
    assert miss == Outcome(miss.key)
    assert miss.key != stored.key


def test_rows_and_calls_that_are_bypassed_say_why(cache: LLMCache) -> None:
    inputs = padded([4, 1])
    inputs["input_ids"][1, 0] = 0  # padding only
    cache(**inputs)
    assert [outcome.bypassed for outcome in cache.last] == [None, "no_content"]
    assert all(outcome.key for outcome in cache.last)
    with cache.disabled():
        cache(**inputs)
    assert cache.last == (Outcome(bypassed="disabled"),) * 2


def test_a_call_that_raised_leaves_nothing(cache: LLMCache) -> None:
    cache(input_ids=ONE)
    with pytest.raises(IndexError):
        cache(input_ids=torch.full((1, 5), 10_000))
    assert cache.last == ()


def test_of_a_generation_the_prefill_is_told() -> None:
    cache = wrapped(GENERATORS["gpt2"])
    for rung in (None, "exact"):
        cache.model.generate(**padded([5]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert rungs(cache) == [rung]
    assert cache.stats().bypassed["decode"] > 0


def test_threads_see_their_own_calls(cache: LLMCache) -> None:
    cache(input_ids=ONE)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: cache.last).result() == ()
        pool.submit(cache, input_ids=tokens(3, 5, seed=4)).result()
        assert pool.submit(lambda: len(cache.last)).result() == 3
    assert len(cache.last) == 1
