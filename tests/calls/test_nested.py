"""Calls within calls: a user's module or hook calls the wrapped model during a call."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import Any

import pytest
import torch

from llmcache import LLMCache
from tests.calls.helpers import agree, assert_close, pair, run, rungs, wrapped
from tests.contract.judge import ask
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

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


def nesting(make: Callable[[LLMCache], Any] | None = None) -> tuple[LLMCache, Any]:
    """Return a wrapped BERT that makes an inner call in each call, and the plain BERT."""
    model, alone = build(BARE["bert"]), build(BARE["bert"])
    model.encoder.layer[1] = Calling(model.encoder.layer[1])
    cache = LLMCache.wrap(model)
    MAKE.append(lambda: (make or (lambda cache: states(cache(**OTHER))))(cache))
    return cache, alone


def test_each_call_gets_its_own_states_and_outcomes() -> None:
    cache, alone = nesting()
    for n in range(3):
        agree(cache, alone, **OUTER)
        assert rungs(cache) == ([None] * 3 if n == 0 else ["exact"] * 3)
    assert len(MADE) == 1  # a hit runs no layer
    for made in MADE:
        assert_close(made, run(alone, **OTHER), OTHER["attention_mask"])
    assert (cache.stats().errors, cache.stats().bypassed, cache.stats().n_stored) == (0, {}, 5)


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


def test_each_call_has_its_own_namespace() -> None:
    def elsewhere(cache: LLMCache) -> None:
        with cache.namespace("inner"):
            cache(**OTHER)

    cache, _ = nesting(elsewhere)
    with cache.namespace("outer"):
        cache(**OUTER)
    assert [cache.purge(namespace=name) for name in ("inner", "outer", "default")] == [2, 3, 0]


def test_last_is_the_outer_calls_though_it_bypassed() -> None:
    cache, _ = nesting()
    cache(**OUTER, something_new=1)
    assert [outcome.bypassed for outcome in cache.last] == ["unknown_argument"] * 3
    assert cache.stats().n_misses == 2


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


def test_requests_observed_within_a_call() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    observed = [{"input_ids": tokens(1, 5, seed=i)} for i in range(3)]
    made: list[int] = []

    def observe(*_: Any) -> None:
        if not made:
            made.append(0)
            made[0] = len(cache.observe(observed))

    cache.model.classifier.register_forward_hook(observe)
    for _ in range(2):
        agree(cache, alone, **OUTER)
    assert (made, cache.stats().n_stored, cache.stats().n_misses, cache.stats().hits) == ([3], 3, 3, {"exact": 3})


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


def test_a_thread_that_is_started_in_a_copy_of_the_context() -> None:
    with ThreadPoolExecutor(1) as pool:

        def elsewhere(cache: LLMCache) -> Any:
            return pool.submit(copy_context().run, lambda: states(cache(**OTHER))).result()

        cache, alone = nesting(elsewhere)
        pool.submit(setattr, IS_INSIDE, "now", True).result()  # calls of the other thread make no inner calls
        for _ in range(2):
            agree(cache, alone, **OUTER)
    assert_close(MADE[0], run(alone, **OTHER), OTHER["attention_mask"])
    assert (cache.stats().errors, cache.stats().n_stored) == (0, 5)
