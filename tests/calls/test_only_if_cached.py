"""`only_if_cached()`: a call is answered from the cache or raises; a server tries this before it queues a request."""

from typing import Any

import pytest
import torch

from llmcache import LLMCache, NotCachedError
from tests.calls.helpers import wrapped
from tests.contract.streams import calibrated
from tests.tiny_models import CLASSIFIERS, tokens
from tests.topics import known, requests

BOTH = tokens(2, 6)


@pytest.fixture
def cache() -> LLMCache:
    """A cache that knows the first request."""
    cache = wrapped(CLASSIFIERS["bert"])
    cache(input_ids=BOTH[:1])
    return cache


def tried(cache: LLMCache, ids: torch.Tensor) -> Any:
    with cache.only_if_cached():
        return cache(input_ids=ids)


@pytest.mark.parametrize(("ids", "missing"), [(BOTH[1:], 0), (BOTH, 1)], ids=["one", "of a batch"])
def test_an_unknown_row_is_named_before_a_layer_runs_and_leaves_no_trace(
    cache: LLMCache, ids: torch.Tensor, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "layer_norm", lambda *_: pytest.fail("something was computed"))
        with pytest.raises(NotCachedError, match=f"row {missing} of this call is not in the cache") as caught:
            tried(cache, ids)
    assert caught.value.rows == (missing,)
    stats = cache.stats()
    assert (stats.n_requests, stats.n_misses, stats.errors, cache.last) == (1, 1, 0, ())
    cache(input_ids=ids)  # computed as usual
    tried(cache, ids)
    assert cache.stats().n_misses == 2


def test_a_call_that_must_bypass_the_cache_raises_too(cache: LLMCache) -> None:
    with pytest.raises(NotCachedError, match="this call is not") as caught, cache.disabled():
        tried(cache, BOTH[:1])
    assert caught.value.rows is None
    assert cache.stats().bypassed == {}


@pytest.mark.slow
def test_similar_requests_are_served_and_each_request_is_audited_once() -> None:
    with calibrated(audit=0.5, max_drop=0.2) as cache:
        n_computed, asked = 0, requests(60, seed=7)[0]
        for one in asked:
            try:
                tried(cache, one["input_ids"])
            except NotCachedError:
                n_computed += 1
                cache(**one)
        assert cache.stats().n_requests == known(cache).n_requests == len(asked)
        assert cache.stats().hits["semantic"] > 0 < n_computed
