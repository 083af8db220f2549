"""`cache.last`: the outcome of each row of a thread's last call."""

import pytest
import torch

from llmcache import LLMCache, Outcome
from tests.calls.helpers import wrapped
from tests.tiny_models import CLASSIFIERS, padded, tokens

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
