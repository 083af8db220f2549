"""`only_if_cached()`: a call is answered from the cache or raises; a server tries this before it queues a request."""

from typing import Any

import pytest
import torch

from llmcache import LLMCache, NotCachedError
from tests.calls.helpers import wrapped
from tests.contract.streams import calibrated
from tests.tiny_models import CLASSIFIERS, padded
from tests.topics import known, requests

ONE, TWO = padded([6], seed=1), padded([6], seed=2)
BOTH = {name: torch.cat([ONE[name], TWO[name]]) for name in ONE}


@pytest.fixture
def cache() -> LLMCache:
    return wrapped(CLASSIFIERS["bert"])


def _tried(cache: LLMCache, inputs: dict[str, torch.Tensor]) -> Any:
    with cache.only_if_cached():
        return cache(**inputs)


def test_an_unknown_request_raises_before_a_layer_runs_and_leaves_no_trace(cache: LLMCache) -> None:
    cache(**ONE)
    before = cache.stats()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "layer_norm", lambda *_: pytest.fail("something was computed"))
        with pytest.raises(NotCachedError, match="row 0 of this call is not in the cache") as caught:
            _tried(cache, TWO)
    assert caught.value.rows == (0,)
    after = cache.stats()
    assert (after.n_requests, after.n_misses, after.errors) == (before.n_requests, before.n_misses, 0)
    assert cache.last == ()
    cache(**TWO)  # computed as usual
    assert cache.stats().n_misses == 2


def test_of_a_batch_it_is_told_which_rows_are_missing(cache: LLMCache) -> None:
    cache(**ONE)
    with pytest.raises(NotCachedError) as caught:
        _tried(cache, BOTH)
    assert caught.value.rows == (1,)
    assert cache.stats().n_hits == 0
    cache(**BOTH)
    _tried(cache, BOTH)
    assert cache.stats().hits == {"exact": 3}


def test_a_call_that_must_bypass_the_cache_raises_too(cache: LLMCache) -> None:
    cache(**ONE)
    with pytest.raises(NotCachedError, match="this call is not") as caught, cache.disabled():
        _tried(cache, ONE)
    assert caught.value.rows is None
    assert cache.stats().bypassed == {}


@pytest.mark.slow
def test_similar_requests_are_served_and_each_request_is_audited_once() -> None:
    with calibrated(audit=0.5, max_drop=0.2) as cache:
        n_computed, asked = 0, requests(150, seed=7)[0]
        for one in asked:
            try:
                _tried(cache, one)
            except NotCachedError:
                n_computed += 1
                cache(**one)
        assert cache.stats().n_requests == known(cache).n_requests == len(asked)
        assert cache.stats().hits["semantic"] > 0 < n_computed
