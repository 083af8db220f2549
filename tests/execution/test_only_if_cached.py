"""A call that is answered from the cache or not at all: what a server does before it queues a request."""

from contextlib import suppress
from typing import Any

import pytest
import torch

from llmcache import LLMCache, NotCachedError
from llmcache.execution.cost import CostModel
from tests.execution.calls import pair, run, wrapped
from tests.tiny_models import CLASSIFIERS, padded
from tests.topics import N_CALIBRATED, batched, classifier, requests

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
    before, ran = cache.stats(), []
    layer = cache.model.bert.encoder.layer[0].attention  # type: ignore[union-attr]
    handle = layer.register_forward_hook(lambda *_: ran.append(1))  # type: ignore[operator]
    with pytest.raises(NotCachedError, match="row 0 of this call is not in the cache") as caught:
        _tried(cache, TWO)
    handle.remove()
    assert caught.value.rows == (0,)
    assert not ran
    after = cache.stats()
    assert (after.n_requests, after.n_misses, after.errors) == (before.n_requests, before.n_misses, 0)
    assert cache.last == ()
    cache(**TWO)  # computed as ever
    assert cache.stats().n_misses == 2


def test_a_known_one_is_served_and_counted_once(cache: LLMCache) -> None:
    stored = cache(**ONE).logits
    assert torch.equal(_tried(cache, ONE).logits, stored)
    assert cache.stats().hits == {"exact": 1}
    assert cache.last[0].rung == "exact"


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


def test_namespaces_hold(cache: LLMCache) -> None:
    with cache.namespace("a"):
        cache(**ONE)
        _tried(cache, ONE)
    with pytest.raises(NotCachedError), cache.namespace("b"):
        _tried(cache, ONE)


@pytest.mark.slow
def test_similar_requests_are_served_and_the_audit_counts_each_request_once() -> None:
    stream, _ = requests(600)
    cache = LLMCache.wrap(classifier(), answer="class", learn=N_CALIBRATED, max_drop=0.2, audit=0.5)
    for call in batched(stream[:N_CALIBRATED]):
        cache(**call)
    n_computed = 0
    for one in stream[N_CALIBRATED:]:
        try:
            _tried(cache, one)
        except NotCachedError:
            n_computed += 1
            cache(**one)
    stats = cache.stats()
    assert stats.n_requests == len(stream)
    assert stats.hits.get("semantic", 0) > 0
    assert n_computed > 0
    assert stats.audit is not None
    assert stats.audit.n_requests == len(stream) - N_CALIBRATED


def test_where_calls_bypass_the_cache_only_known_requests_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    cache(**ONE)
    cost = cache._components.cost
    assert cost is not None
    monkeypatch.setattr(CostModel, "is_bypassed", lambda self, n_tokens: True)
    assert torch.equal(_tried(cache, ONE).logits, run(alone, **ONE))
    with pytest.raises(NotCachedError) as caught:
        _tried(cache, TWO)
    assert caught.value.rows is None  # it was not even read


def _tried_in_part(cache: LLMCache, inputs: dict[str, torch.Tensor]) -> Any:
    with cache.only_if_cached(leave_out=True):
        return cache(**inputs)


def test_rows_that_are_missing_may_be_left_out(cache: LLMCache) -> None:
    stored = cache(**TWO).logits
    before = cache.stats()
    logits = _tried_in_part(cache, BOTH).logits
    after = cache.stats()
    assert torch.isnan(logits[0]).all()
    torch.testing.assert_close(logits[1:], stored)
    assert [outcome.rung for outcome in cache.last] == [None, "exact"]
    assert (after.n_requests - before.n_requests, after.n_misses - before.n_misses) == (1, 0)
    assert after.hits == {"exact": 1}
    assert after.n_layers_skipped == before.n_layers_skipped + cache.model.config.num_hidden_layers  # type: ignore[operator, union-attr]
    cache(**ONE)  # nothing was stored of what was left out
    assert cache.stats().n_misses == 2
    assert not torch.isnan(_tried_in_part(cache, BOTH).logits).any()


def test_where_none_is_there_all_are_missing(cache: LLMCache) -> None:
    cache(**padded([6], seed=3))
    with pytest.raises(NotCachedError) as caught:
        _tried_in_part(cache, BOTH)
    assert caught.value.rows == (0, 1)
    assert cache.stats().errors == 0


def test_the_cost_model_is_told_of_each_request_once_by_the_call_that_looked_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = LLMCache.wrap(CLASSIFIERS["bert"]().eval())
    told: list[tuple[int, ...]] = []
    cost = cache._components.cost
    assert cost is not None
    monkeypatch.setattr(cost, "took", lambda n_tokens, n_rows, n_hits, *_: told.append((n_tokens, n_rows, n_hits)))
    monkeypatch.setattr(cost, "computed", lambda n_tokens, times: told.append((n_tokens, times.storing_s > 0)))
    with torch.inference_mode():
        cache(**TWO)  # so that it is known how the trunk packs its output
        told.clear()
        with pytest.raises(NotCachedError):
            _tried_in_part(cache, ONE)
        with cache.looked_up():
            cache(**ONE)
        _tried_in_part(cache, {name: torch.cat([BOTH[name], padded([6], seed=3)[name]]) for name in BOTH})
        with pytest.raises(NotCachedError):
            _tried(cache, padded([6], seed=4))  # whoever asks so tells of it when it is computed
    assert told == [(6, 1, 0), (6, True), (18, 3, 2)]
    assert cache.stats().errors == 0


def test_a_call_that_could_not_be_looked_up_is_told_of_by_who_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(CLASSIFIERS["bert"]().eval())
    told: list[int] = []
    cost = cache._components.cost
    assert cost is not None
    monkeypatch.setattr(cost, "took", lambda n_tokens, *_: told.append(n_tokens))
    with torch.inference_mode():
        with pytest.raises(NotCachedError) as caught:
            _tried_in_part(cache, ONE)  # nobody knows yet how the trunk packs its output
        assert caught.value.rows is None
        assert not told
        cache(**ONE)
    assert told == [6]


def test_of_a_second_namespace_hits_alone_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(CLASSIFIERS["bert"]().eval())
    told: list[tuple[int, int]] = []
    cost = cache._components.cost
    assert cost is not None
    monkeypatch.setattr(cost, "took", lambda n_tokens, n_rows, n_hits, *_: told.append((n_rows, n_hits)))
    with torch.inference_mode():
        with cache.namespace("public"):
            cache(**TWO)
        told.clear()
        with pytest.raises(NotCachedError):
            _tried_in_part(cache, BOTH)
        with cache.namespace("public"), cache.looked_up():
            _tried_in_part(cache, BOTH)
        with pytest.raises(NotCachedError), cache.namespace("public"), cache.looked_up():
            _tried_in_part(cache, ONE)
    assert told == [(2, 0), (1, 1)]


def test_embeddings_that_somebody_says_were_looked_up_are_computed() -> None:
    model = CLASSIFIERS["bert"]().eval()
    embeddings = model.get_input_embeddings()(ONE["input_ids"])
    with torch.inference_mode():
        own = model(inputs_embeds=embeddings).logits
        cache = LLMCache.wrap(model)
        with cache.looked_up():
            assert torch.equal(cache(inputs_embeds=embeddings).logits, own)
    assert cache.stats().errors == 0
    assert cache.stats().bypassed == {"inputs_embeds": 1}


def test_a_hit_that_is_to_be_checked_is_left_out_and_checked_by_who_computes_it() -> None:
    policy = {"name": "divergence", "check_rate": 1.0}
    cache = LLMCache.wrap(
        CLASSIFIERS["bert"]().eval(), fingerprint="minhash", tau=0.2, policy=policy, auto_bypass=False
    )
    with torch.inference_mode():
        cache(**ONE)
        similar = {name: tensor.clone() for name, tensor in ONE.items()}
        similar["input_ids"][0, 2] += 1
        with pytest.raises(NotCachedError):
            _tried_in_part(cache, similar)
        assert cache.stats().n_revalidated == 0
        with cache.looked_up():
            cache(**similar)
    assert cache.stats().n_revalidated == 1
    assert cache.stats().errors == 0


def test_what_was_looked_up_is_computed_stored_and_counted_as_missed(cache: LLMCache) -> None:
    own = cache(**ONE).logits
    with cache.looked_up():
        assert torch.equal(cache(**ONE).logits, own)
        cache(**TWO)
    assert [outcome.rung for outcome in cache.last] == [None]
    assert (cache.stats().n_misses, cache.stats().n_hits) == (3, 0)
    cache(**TWO)
    assert cache.stats().hits == {"exact": 1}


@pytest.mark.slow
def test_similar_rows_of_a_batch_are_served_and_the_audit_counts_each_request_once() -> None:
    stream, _ = requests(600)
    cache = LLMCache.wrap(classifier(), answer="class", learn=N_CALIBRATED, max_drop=0.2, audit=0.5)
    calls = list(batched(stream))
    n_rows = [len(call["input_ids"]) for call in calls]
    n_learned = next(i for i in range(len(calls)) if sum(n_rows[:i]) >= N_CALIBRATED)
    for call in calls[:n_learned]:
        cache(**call)
    n_in_part = 0
    for call in calls[n_learned:]:
        missing = list(range(len(call["input_ids"])))
        with suppress(NotCachedError):
            _tried_in_part(cache, call)
            missing = [number for number, outcome in enumerate(cache.last) if outcome.rung is None]
            n_in_part += bool(missing)
        if missing:
            with cache.looked_up():
                cache(**{name: tensor[missing] for name, tensor in call.items()})
    stats = cache.stats()
    assert n_in_part > 0
    assert stats.hits.get("semantic", 0) > 0
    assert stats.n_requests == sum(n_rows)
    assert stats.errors == 0
    assert stats.audit is not None
    assert stats.audit.n_requests == sum(n_rows[n_learned:])


@pytest.mark.slow
def test_requests_that_are_never_computed_are_no_drift() -> None:
    stream, _ = requests(N_CALIBRATED + 3000)
    cache = LLMCache.wrap(classifier(), answer="class", learn=N_CALIBRATED, max_drop=0.05, audit=0.5)
    for call in batched(stream[:N_CALIBRATED]):
        cache(**call)
    n_left_out = 0
    for call in batched(stream[N_CALIBRATED:], 20):
        try:
            _tried_in_part(cache, call)
            n_left_out += sum(outcome.rung is None for outcome in cache.last)
        except NotCachedError:
            n_left_out += len(call["input_ids"])
    stats = cache.stats()
    assert stats.audit is not None
    assert stats.audit.status == "certified"
    assert 0 < stats.audit.n_requests == stats.hits["semantic"] + stats.hits.get("exact", 0)
    assert n_left_out > 100
