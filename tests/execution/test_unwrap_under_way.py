"""`unwrap()` while a call is under way, in another thread or from a hook: the call ends as the plain model's."""

import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
import torch
import transformers as tf
from torch import Tensor

from llmcache import LLMCache
from tests.execution.calls import (
    BY_STATES,
    LAYERS,
    MIXED,
    SEEN,
    agree,
    assert_close,
    attributes,
    once,
    pair,
    quietly,
    run,
)
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("inputs", [SEEN, MIXED], ids=["hit", "mixed"])
@pytest.mark.parametrize("where", range(4))
def test_a_call_ends_as_it_should(family: str, inputs: dict[str, Tensor], where: int) -> None:
    """Between any two layers: those that are left compute what the rows skipped so far."""
    cache, alone = pair(BARE[family], prefix=False, **BY_STATES)
    cache(**SEEN)
    layer = cache.model.get_submodule(LAYERS[family])[where]
    layer.register_forward_hook(once(cache.unwrap))
    output, expected = quietly(cache.model, **inputs), quietly(alone, **inputs)
    assert_close(states(output), states(expected))
    if family == "gpt2":
        for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert_close(ours.keys, theirs.keys)
            assert_close(ours.values, theirs.values)
    assert not any("forward" in module.__dict__ for module in cache.model.modules())
    if where < 3:  # after the last layer all is done
        assert cache.stats().bypassed == {"unwrapped": len(inputs["input_ids"])}
        assert {outcome.bypassed for outcome in cache.last} == {"unwrapped"}
    assert cache.stats().errors == 0


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["dynamic", "static", "none"])
def test_the_callers_kv_cache_is_filled_once(prefix: bool, kind: str) -> None:
    cache, alone = pair(GENERATORS["llama"], prefix=prefix, prefix_block=2)
    ids, step = tokens(2, 6), tokens(2, 1, seed=5)
    cache(ids)
    given = {
        "dynamic": tf.DynamicCache(),
        "static": tf.StaticCache(config=alone.config, max_cache_len=10),
        "none": None,
    }[kind]
    cache.model.model.layers[2].register_forward_hook(once(cache.unwrap))
    output = quietly(cache.model, input_ids=ids, past_key_values=given)
    first, kv_cache = output.logits, output.past_key_values
    assert given in (None, kv_cache)
    assert int(kv_cache.get_seq_length()) == 6
    after = run(cache.model, input_ids=step, past_key_values=kv_cache)
    whole = run(alone, input_ids=torch.cat([ids, step], dim=1))
    assert_close(first, whole[:, :6])
    assert_close(after[:, -1], whole[:, -1])
    assert cache.stats().bypassed == {"unwrapped": 2}


@pytest.mark.parametrize("where", ["layers.3", "norm"])
def test_a_state_that_enters_after_the_norm(where: str) -> None:
    cache, alone = pair(BARE["llama"], payload="mean", allow_unsafe=True)
    cache(**SEEN)
    cache.model.get_submodule(where).register_forward_pre_hook(once(cache.unwrap))
    assert_close(run(cache.model, **SEEN).mean(1), run(alone, **SEEN).mean(1))


def test_a_prefix_that_was_put_in() -> None:
    cache, alone = pair(GENERATORS["llama"], prefix_block=4)
    text = tokens(1, 20)
    cache(text[:, :12])
    swap = cache.model.model.layers[2].__dict__["forward"]
    original = swap.original
    swap.had_own_forward, swap._original = True, lambda *args, **kwargs: (cache.unwrap(), original(*args, **kwargs))[1]
    assert_close(run(cache.model, input_ids=text), run(alone, input_ids=text))
    assert cache.last[0].n_prefix == 12


def test_the_cache_is_off_before_another_thread_reaches_the_next_layer() -> None:
    cache, alone = pair(CLASSIFIERS["bert"], fingerprint="mean", tau=0.9999)
    cache(**SEEN)
    inside, is_off = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    cache.model.bert.encoder.layer[1].register_forward_hook(once(lambda: (inside.wait(), is_off.wait())))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(run, cache.model, **SEEN)
        inside.wait()
        second = LLMCache.wrap(cache.unwrap())  # nor does another cache disturb it
        is_off.wait()
        assert_close(call.result(), run(alone, **SEEN))
    agree(second, alone, **SEEN)
    assert second.stats().n_misses == 3


@pytest.mark.slow
def test_calls_while_the_cache_is_put_on_and_taken_off() -> None:
    model = build(BARE["bert"])
    rows = [padded([6, 5], seed=seed) for seed in range(4)]
    expected = [run(model, **row) for row in rows]
    until, has_ended = monotonic() + 1.5, threading.Event()

    def work(seed: int) -> int:
        n = 0
        while not has_ended.is_set():
            row = (seed + n) % len(rows)
            assert_close(run(model, **rows[row]), expected[row], rows[row]["attention_mask"])
            n += 1
        return n

    before = attributes(model)
    n_hits = 0
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(work, seed) for seed in range(3)]
        while monotonic() < until and not any(call.done() for call in calls):
            with LLMCache.wrap(model, **BY_STATES) as cache:
                while cache.stats().n_requests < 12 and monotonic() < until:
                    cache(**rows[0])
            n_hits += cache.stats().n_hits
            assert cache.stats().errors == 0
        has_ended.set()
        assert sum(call.result() for call in calls) > 0
    assert n_hits > 0
    assert attributes(model) == before
