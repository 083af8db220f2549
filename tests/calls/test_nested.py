"""Calls within and beside calls: a user's module, a hook or another thread acts during a call."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import Any

import pytest
import torch
import transformers as tf

from llmcache import LLMCache
from tests.calls.helpers import X, agree, pair, rungs, wrapped
from tests.contract.judge import ask, check_same, plain_answer
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, tokens

OUTER, OTHER = padded([6, 4, 5]), padded([7, 3], seed=50)
GENERATION = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}

MAKE: list[Callable[[], Any]] = []  # the inner call
MADE: list[Any] = []  # results of inner calls
IS_INSIDE = threading.local()


class Calling(torch.nn.Module):
    """A layer that makes an inner call whenever an outer call runs it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not getattr(IS_INSIDE, "now", False):
            IS_INSIDE.now = True
            try:
                MADE.append(MAKE[0]())
            finally:
                IS_INSIDE.now = False
        return self.layer(*args, **kwargs)


@pytest.fixture(autouse=True)
def _begin() -> Iterator[None]:
    yield
    MAKE.clear()
    MADE.clear()
    IS_INSIDE.now = False


def nesting(make: Callable[[LLMCache], Any]) -> tuple[LLMCache, Any]:
    """Return a wrapped BERT that makes an inner call in each call, and the plain BERT."""
    model, alone = build(BARE["bert"]), build(BARE["bert"])
    model.encoder.layer[1] = Calling(model.encoder.layer[1])
    cache = LLMCache.wrap(model)
    MAKE.append(lambda: make(cache))
    return cache, alone


def here(cache: LLMCache) -> Any:
    return cache(**OTHER)


def in_another_namespace(cache: LLMCache) -> Any:
    with cache.namespace("inner"):
        return cache(**OTHER)


def in_a_thread(cache: LLMCache) -> Any:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(setattr, IS_INSIDE, "now", True).result()  # calls of the other thread make no inner calls
        return pool.submit(copy_context().run, here, cache).result()


@pytest.mark.parametrize("make", [here, in_another_namespace, in_a_thread])
def test_each_call_gets_its_own_states_outcomes_and_namespace(make: Callable[[LLMCache], Any]) -> None:
    cache, alone = nesting(make)
    for rung in (None, "exact", "exact"):
        agree(cache, alone, **OUTER)
        assert rungs(cache) == [rung] * 3
    (made,) = MADE  # a hit runs no layer
    check_same(made, ask(alone, **OTHER))
    assert (cache.stats().errors, cache.stats().bypassed, cache.stats().n_stored) == (0, {}, 5)
    assert cache.purge(namespace="inner") == 2 * (make is in_another_namespace)
    cache(**OUTER, something_new=1)
    assert [outcome.bypassed for outcome in cache.last] == ["unknown_argument"] * 3  # not the inner


@pytest.mark.parametrize("is_caught", [True, False])
def test_an_inner_call_that_raises(is_caught: bool) -> None:
    """If the error is caught, the outer call goes on; else both calls end."""

    def fail(cache: LLMCache) -> None:
        with suppress(IndexError) if is_caught else nullcontext():
            cache(input_ids=torch.full((1, 4), 10_000))

    cache, alone = nesting(fail)
    if is_caught:
        agree(cache, alone, **OUTER)
        assert len(cache.last) == 3
    else:
        with pytest.raises(IndexError):
            cache(**OUTER)
        assert (cache.last, cache.stats().n_stored) == ((), 0)
        IS_INSIDE.now = True
    for _ in range(2):
        agree(cache, alone, **OUTER)
    assert cache.stats().n_stored == 3


def test_generation_within_a_call_and_calls_within_a_generation() -> None:
    model, alone = build(GENERATORS["llama"]), build(GENERATORS["llama"])
    prompt, other = tokens(1, 6, seed=8), tokens(1, 5, seed=3)
    model.model.layers[1].mlp = Calling(model.model.layers[1].mlp)
    MAKE.append(lambda: model.generate(other, **GENERATION))
    cache = LLMCache.wrap(model, prefix={"block": 2})
    for inputs in (OUTER, OUTER, padded([6, 6, 6])):
        agree(cache, alone, **inputs)
    expected = alone.generate(other, **GENERATION)
    assert MADE and all(torch.equal(made, expected) for made in MADE)
    for rung in (None, "exact"):
        assert torch.equal(model.generate(prompt, **GENERATION), alone.generate(prompt, **GENERATION))
        assert rungs(cache) == [rung]  # of the prefill, whatever decode steps call
    assert cache.stats().errors == 0


class Asks(torch.nn.Module):
    """A classifier whose head calls the trunk again, on other text."""

    def __init__(self) -> None:
        super().__init__()
        self.body: Any = CLASSIFIERS["bert"]()
        self.config = self.body.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        output = self.body(input_ids=input_ids, attention_mask=attention_mask)
        self.body.bert(input_ids=input_ids.flip(1))
        return output


def test_of_two_forwards_of_the_trunk_in_one_answer_nothing_is_learned() -> None:
    cache = wrapped(Asks, learn=118, max_drop=0.05, answer="class", payload="cls", allow_unsafe=True)
    ask(cache.model, input_ids=tokens(4, 6))
    assert cache.calibrated is not None and cache.calibrated._observed == []
    assert (cache.stats().n_stored, cache.stats().errors) == (8, 0)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_weights_that_change_while_threads_run_are_followed() -> None:
    cache, start = wrapped(CLASSIFIERS["bert"]), threading.Barrier(8)
    for _ in range(3):
        with torch.no_grad():
            cache.model.bert.encoder.layer[0].output.dense.weight.mul_(1.1)
        expected = plain_answer(cache, **X)
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(lambda _: (start.wait(), cache(**X))[1], range(8)):
                check_same(answer, expected)


@pytest.mark.parametrize(("kind", "n_known"), [("dynamic", 0), ("dynamic", 4), ("dynamic", 6), ("static", 4)])
def test_a_call_during_which_the_cache_is_taken_off_ends_right(kind: str, n_known: int) -> None:
    """The call keeps the hits found before `unwrap`, and a decode step continues its K/V."""
    cache, alone = pair(GENERATORS["llama"], prefix={"block": 2})
    ids, step = tokens(2, 6), tokens(2, 1, seed=5)
    if n_known:
        cache(ids[:, :n_known])
    static = tf.StaticCache(config=alone.config, max_cache_len=10)
    kv_cache = static if kind == "static" else tf.DynamicCache()
    cache.model.lm_head.register_forward_pre_hook(lambda *_: cache.unwrap() and None)
    first, after = (ask(cache.model, input_ids=one, past_key_values=kv_cache).logits for one in (ids, step))
    check_same(torch.cat([first, after], dim=1), ask(alone, input_ids=torch.cat([ids, step], dim=1)).logits)
