"""`unwrap()` while a call is under way, in another thread or from a hook: the call ends as the plain model's."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

SEEN, FRESH = padded([6, 6, 6]), padded([6, 6], seed=40)
MIXED = {name: torch.cat([SEEN[name], FRESH[name]]) for name in SEEN}
FAMILIES = {
    "bert": ("encoder.layer", BARE),
    "gpt2": ("h", BARE),
    "t5": ("encoder.block", BARE),
    "mpnet": ("encoder.layer", BARE),
}


def plain(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    with torch.inference_mode():
        return model(**inputs)


def once(do: Callable[[], Any]) -> Callable[..., None]:
    """A hook that does something the first time."""
    left = [do]

    def hook(*_: Any) -> None:
        if left:
            left.pop()()

    return hook


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", [SEEN, MIXED], ids=["hit", "mixed"])
@pytest.mark.parametrize("where", range(4))
def test_a_call_ends_as_it_should(family: str, inputs: dict[str, Tensor], where: int) -> None:
    """Between any two layers: those that are left compute what the rows skipped so far."""
    path, models = FAMILIES[family]
    model = build(models[family])
    expected = plain(model, inputs)
    cache = LLMCache.wrap(model, fingerprint="mean", tau=0.9999, allow_unsafe=True, prefix=False)
    cache(**SEEN)
    reached = []
    layer = model.get_submodule(path)[where]
    layer.register_forward_hook(once(lambda: reached.append(cache.unwrap())))
    with torch.inference_mode():
        output = model(**inputs)
    assert reached
    torch.testing.assert_close(states(output), states(expected), atol=1e-5, rtol=1e-5)
    if family == "gpt2":
        for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
    assert not any("forward" in module.__dict__ for module in model.modules())
    n = len(inputs["input_ids"])
    assert cache.stats().bypassed == ({"unwrapped": n} if where < 3 else {})  # all is done after the last
    assert {outcome.bypassed for outcome in cache.last} == ({"unwrapped"} if where < 3 else {None})
    assert cache.stats().errors == 0


@pytest.mark.parametrize("prefix", [True, False])
def test_the_callers_kv_cache_is_filled_once(prefix: bool) -> None:
    model = build(GENERATORS["llama"])
    cache = LLMCache.wrap(model, prefix=prefix, prefix_block=2)
    ids = {"input_ids": tokens(2, 6)}
    cache(**ids)
    for make in (tf.DynamicCache, lambda: tf.StaticCache(config=model.config, max_cache_len=10), None):
        cache = LLMCache.wrap(cache.unwrap(), prefix=prefix, prefix_block=2)
        cache(**ids)
        layer = model.model.layers[2]
        handle = layer.register_forward_hook(once(cache.unwrap))
        with torch.inference_mode():
            given = None if make is None else make()
            output = model(**ids, past_key_values=given)
            first, kv_cache = output.logits, output.past_key_values
            assert given in (None, kv_cache)
            assert int(kv_cache.get_seq_length()) == 6
            after = model(tokens(2, 1, seed=5), past_key_values=kv_cache).logits
            whole = model(torch.cat([ids["input_ids"], tokens(2, 1, seed=5)], dim=1)).logits
        torch.testing.assert_close(first, whole[:, :6], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[:, -1], whole[:, -1], atol=1e-5, rtol=1e-5)
        assert cache.stats().bypassed == {"unwrapped": 2}
        handle.remove()


@pytest.mark.parametrize("where", ["layers.3", "norm"])
def test_a_state_that_enters_after_the_norm(where: str) -> None:
    model = build(BARE["llama"])
    weights = SEEN["attention_mask"].unsqueeze(-1) / SEEN["attention_mask"].sum(1)[:, None, None]
    expected = (states(plain(model, SEEN)) * weights).sum(1)
    cache = LLMCache.wrap(model, payload="mean", allow_unsafe=True)
    cache(**SEEN)
    model.get_submodule(where).register_forward_pre_hook(once(cache.unwrap))
    with torch.inference_mode():
        found = (states(model(**SEEN)) * weights).sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_prefix_that_was_put_in() -> None:
    model = build(GENERATORS["llama"])
    text = tokens(1, 20)
    expected = plain(model, {"input_ids": text}).logits
    cache = LLMCache.wrap(model, prefix_block=4)
    cache(text[:, :12])
    swap = model.model.layers[2].__dict__["forward"]
    original = swap.original
    swap.original = lambda *args, **kwargs: (cache.unwrap(), original(*args, **kwargs))[1]
    with torch.inference_mode():
        torch.testing.assert_close(model(text).logits, expected, atol=1e-5, rtol=1e-5)
    assert cache.last[0].n_prefix == 12


def test_the_cache_is_off_before_another_thread_reaches_the_next_layer() -> None:
    model = build(CLASSIFIERS["bert"])
    expected = plain(model, SEEN).logits
    cache = LLMCache.wrap(model, fingerprint="mean", tau=0.9999)
    cache(**SEEN)
    inside, is_off = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def wait() -> None:
        inside.wait()
        is_off.wait()

    model.bert.encoder.layer[1].register_forward_hook(once(wait))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(plain, model, SEEN)
        inside.wait()
        cache.unwrap()
        second = LLMCache.wrap(model)  # nor does another cache disturb it
        is_off.wait()
        torch.testing.assert_close(call.result().logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second(**SEEN).logits, expected, atol=1e-5, rtol=1e-5)
    assert second.stats().n_misses == 3


@pytest.mark.slow
def test_calls_while_the_cache_is_put_on_and_taken_off() -> None:
    model = build(BARE["bert"])
    rows = [padded([6, 5], seed=seed) for seed in range(4)]
    expected = [states(plain(model, row)) for row in rows]
    until, has_ended = monotonic() + 1.5, threading.Event()

    def work(seed: int) -> int:
        n = 0
        while not has_ended.is_set():
            row = (seed + n) % len(rows)
            valid = rows[row]["attention_mask"].bool()
            found = states(plain(model, rows[row]))
            torch.testing.assert_close(found[valid], expected[row][valid], atol=1e-5, rtol=1e-5)
            n += 1
        return n

    before = [dict(module.__dict__) for module in model.modules()]
    n_hits = 0
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(work, seed) for seed in range(3)]
        while monotonic() < until and not any(call.done() for call in calls):
            with LLMCache.wrap(model, fingerprint="mean", tau=0.9999, allow_unsafe=True) as cache:
                while cache.stats().n_requests < 12 and monotonic() < until:
                    cache(**rows[0])
            n_hits += cache.stats().n_hits
            assert cache.stats().errors == 0
        has_ended.set()
        assert sum(call.result() for call in calls) > 0
    assert n_hits > 0
    assert [dict(module.__dict__) for module in model.modules()] == before
