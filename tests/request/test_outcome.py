"""`cache.last`: what became of each row of a thread's last call."""

import threading
from dataclasses import asdict

import pytest
import torch

from llmcache import LLMCache, Outcome
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded, tokens


def bert(**settings: object) -> LLMCache:
    return LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)


def test_before_the_first_call_there_is_nothing() -> None:
    assert bert().last == ()


def test_exact_hits_and_misses_by_row() -> None:
    cache = bert()
    one, two = tokens(1, 5, seed=1), tokens(1, 5, seed=2)
    cache(input_ids=one)
    (stored,) = cache.last
    assert stored == Outcome(key=stored.key)
    assert len(stored.key) == 43
    cache(input_ids=torch.cat([two, one]))
    miss, hit = cache.last
    assert hit == Outcome(stored.key, "exact", 3, stored.key, 1.0)
    assert miss == Outcome(miss.key)
    assert miss.key != stored.key


@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_a_similar_hit_names_its_source_and_a_miss_the_nearest(mode: str) -> None:
    model = build(CLASSIFIERS["bert"])
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    with torch.no_grad():
        a, b = (torch.nn.functional.normalize(model.bert.embeddings(ids).mean(1), dim=1)[0] for ids in (one, two))
    cosine = float(a @ b)
    for tau, is_hit in ((cosine - 0.01, True), (cosine + 0.01, False)):
        with LLMCache.wrap(model, mode=mode, tau=tau, payload="sequence", layers=[1, 3]) as cache:
            cache(input_ids=one)
            assert cache.last[0].similarity is None  # nothing was there to be found
            source = cache.last[0].key
            cache(input_ids=two)
            (outcome,) = cache.last
        assert outcome.similarity == pytest.approx(cosine, abs=1e-5)
        assert (outcome.rung, outcome.layer, outcome.source) == ((mode, 3, source) if is_hit else (None, None, None))


def test_rows_and_calls_that_are_bypassed_say_why() -> None:
    cache = bert()
    inputs = padded([4, 1])
    inputs["input_ids"][1, 0] = 0  # padding only
    cache(**inputs)
    assert [outcome.bypassed for outcome in cache.last] == [None, "no_content"]
    assert all(outcome.key for outcome in cache.last)
    with cache.disabled():
        cache(**inputs)
    assert cache.last == (Outcome(bypassed="disabled"),) * 2


def test_a_call_that_raised_leaves_nothing() -> None:
    cache = bert()
    cache(input_ids=tokens(1, 5))
    with pytest.raises(IndexError):
        cache(input_ids=torch.full((1, 5), 10_000))
    assert cache.last == ()


def test_of_a_generation_the_prefill_is_told() -> None:
    model = build(GENERATORS["gpt2"])
    cache = LLMCache.wrap(model)
    for rung in (None, "exact"):
        model.generate(**padded([5]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert [outcome.rung for outcome in cache.last] == [rung]
    assert cache.stats().bypassed["decode"] > 0


def test_threads_see_their_own_calls() -> None:
    cache = bert()
    cache(input_ids=tokens(1, 5))
    seen = []

    def work() -> None:
        seen.append(cache.last)
        cache(input_ids=tokens(3, 5, seed=4))
        seen.append(len(cache.last))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(), 3]
    assert len(cache.last) == 1


def test_it_holds_plain_values_and_so_keeps_no_tensor_alive() -> None:
    cache = bert(tau=-1.0)
    ids = tokens(1, 5)
    cache(input_ids=ids)
    cache(input_ids=ids + 1)
    assert cache.last[0].rung == "semantic"
    assert {type(value) for value in asdict(cache.last[0]).values()} == {str, int, float, type(None)}
