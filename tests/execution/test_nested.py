"""Calls within calls: a hook, or a module of one's own, calls the wrapped model while it is being called."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests import inside
from tests.execution.calls import agree, assert_close, pair, run, rungs, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, padded, states, tokens

OUTER, OTHER = padded([6, 4, 5]), padded([7, 3], seed=50)
WRONG = torch.full((1, 4), 10_000)
# Where in the model the inner call is made: in the embeddings, before, in and after a layer, after the last one.
PLACES = ["embeddings", "encoder.layer.0", "encoder.layer.1.attention", "encoder.layer.3"]


class Within:
    """A hook that makes a call at each call of its module, but for those that it makes itself."""

    handle: Any

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.is_inside = threading.local()
        self.made: list[Any] = []

    def __call__(self, *_: Any) -> None:
        if not getattr(self.is_inside, "now", False):
            self.is_inside.now = True
            try:
                self.made.append(self._make())
            finally:
                self.is_inside.now = False


def hook(cache: LLMCache, place: str, make: Callable[[], Any] | None = None) -> Within:
    """Have a call made within those of a wrapped model, on `OTHER` unless told."""
    within = Within(make or (lambda: states(cache(**OTHER))))
    within.handle = cache.model.get_submodule(place).register_forward_hook(within)
    return within


def check_made(within: Within, alone: nn.Module) -> None:
    """Assert that calls were made on `OTHER`, and what each answered."""
    assert within.made
    for made in within.made:
        assert_close(made, run(alone, **OTHER), OTHER["attention_mask"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fingerprint", ["mean", "minhash"])
def test_each_call_gets_its_own_states(place: str, fingerprint: str) -> None:
    settings = {"tau": 0.9999, "allow_unsafe": True, "fingerprint": fingerprint}
    cache, alone = pair(BARE["bert"], layers="all", auto_bypass=False, **settings)
    within = hook(cache, place)
    for n in range(3):
        agree(cache, alone, **OUTER)
        assert rungs(cache) == ([None] * 3 if n == 0 else ["exact"] * 3)
    check_made(within, alone)
    # The embeddings are run in hits, too, layers are not; hooks on either keep the door shut.
    stats = cache.stats()
    assert (stats.errors, stats.bypassed, stats.n_misses) == (0, {}, 5)
    assert stats.hits["exact"] == 6 + 2 * (len(within.made) - 1)


def test_rows_of_a_mixed_batch_keep_theirs() -> None:
    cache, alone = pair(BARE["gpt2"], layers="all", prefix=False)
    cache(**OUTER)
    hook(cache, "h.1")
    output = agree(cache, alone, **{name: torch.cat([OUTER[name], more]) for name, more in padded([6, 4], 9).items()})
    assert rungs(cache) == ["exact"] * 3 + [None] * 2
    assert {layer.keys.shape[2] for layer in output.past_key_values.layers} == {6}


def test_an_inner_call_that_is_answered_at_the_door() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    for _ in range(2):
        agree(cache, alone, **OTHER)
    within = hook(cache, "bert.encoder.layer.2.attention")  # within a layer, which keeps the door open
    agree(cache, alone, **OUTER)
    assert rungs(cache) == [None] * 3
    check_made(within, alone)
    agree(cache, alone, **OUTER)
    assert (cache.stats().hits, cache.stats().n_stored) == ({"exact": 7}, 5)


def test_an_inner_call_that_raises_leaves_the_outer_one_as_it_is() -> None:
    cache, alone = pair(BARE["bert"])

    def fail() -> None:
        with suppress(IndexError):
            cache(input_ids=WRONG)

    hook(cache, "encoder.layer.1", fail)
    for _ in range(2):
        agree(cache, alone, **OUTER)
        assert len(cache.last) == 3
    assert (cache.stats().hits, cache.stats().n_stored) == ({"exact": 3}, 3)


def test_an_error_that_passes_through_both_ends_both() -> None:
    cache, alone = pair(BARE["bert"])
    within = hook(cache, "encoder.layer.1", lambda: cache(input_ids=WRONG))
    with pytest.raises(IndexError):
        cache(**OUTER)
    within.handle.remove()
    assert (cache.last, cache.stats().n_stored) == ((), 0)
    agree(cache, alone, **OUTER)
    assert cache.stats().n_stored == 3


def test_each_call_has_its_own_namespace() -> None:
    cache = wrapped(BARE["bert"])

    def elsewhere() -> None:
        with cache.namespace("inner"):
            cache(**OTHER)

    hook(cache, "encoder.layer.1", elsewhere)
    with cache.namespace("outer"):
        cache(**OUTER)
    assert [cache.purge(namespace=name) for name in ("inner", "outer", "default")] == [2, 3, 0]


@pytest.mark.parametrize("why", ["disabled", "output_attentions"])
def test_last_is_the_outer_calls_though_it_went_by(why: str) -> None:
    cache = wrapped(BARE["bert"])
    cache.model.set_attn_implementation("eager")

    def enabled() -> None:
        token = cache._flow.is_disabled.set(False)
        cache(**OTHER)
        cache._flow.is_disabled.reset(token)

    hook(cache, "encoder.layer.1", enabled)
    with cache.disabled() if why == "disabled" else nullcontext():
        cache(**OUTER, output_attentions=why == "output_attentions")
    assert [outcome.bypassed for outcome in cache.last] == [why] * 3
    assert cache.stats().n_misses == 2


GENERATION = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}


def test_last_is_the_prefills_though_a_decode_step_makes_a_call() -> None:
    cache, alone = pair(GENERATORS["llama"])
    prompt = tokens(1, 6)
    hook(cache, "model.layers.1")
    cache.model.generate(prompt, **GENERATION)
    (first,) = cache.last
    assert torch.equal(cache.model.generate(prompt, **GENERATION), alone.generate(prompt, **GENERATION))
    assert (cache.last[0].rung, cache.last[0].key) == ("exact", first.key)


def test_generation_within_a_call() -> None:
    cache, alone = pair(GENERATORS["llama"], prefix_block=2)
    prompt = tokens(1, 5, seed=3)
    within = hook(cache, "model.layers.1.mlp", lambda: cache.model.generate(prompt, **GENERATION))
    for inputs in (OUTER, OUTER, padded([6, 6, 6])):
        agree(cache, alone, **inputs)
    expected = alone.generate(prompt, **GENERATION)
    assert within.made and all(torch.equal(made, expected) for made in within.made)
    assert cache.stats().errors == 0


def test_requests_observed_within_a_call() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    observed = [{"input_ids": tokens(1, 5, seed=i)} for i in range(3)]
    within = hook(cache, "bert.encoder.layer.1", lambda: cache.observe(observed))
    for _ in range(2):
        agree(cache, alone, **OUTER)
    assert [len(made) for made in within.made] == [3] * len(within.made)
    assert (cache.stats().n_stored, cache.stats().n_misses, cache.stats().hits) == (3, 3, {"exact": 3})


class Asks(nn.Module):
    """A classifier whose head calls the trunk again, on other text."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.body = CLASSIFIERS["bert"]()
        self.config = self.body.config
        self.asks = asks

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        output = self.body(input_ids=input_ids, attention_mask=attention_mask)
        if self.asks:
            self.body.bert(input_ids=input_ids.flip(1))
        return output


@pytest.mark.parametrize("asks", [False, True])
def test_an_answer_is_noted_beside_the_call_that_it_is_of(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards of the trunk in one answer: it is recorded beside neither."""
    settings = {"decide": "consensus", "payload": "cls", "allow_unsafe": True, "answer": "class"}
    cache = wrapped(lambda: Asks(asks), tau=0.9, **settings)
    noted: list[str] = []
    monkeypatch.setattr(inside.banks(cache), "sign", lambda key, answer, generation: noted.append(key))
    cache(input_ids=tokens(1, 6))
    assert noted == ([] if asks else [cache.last[0].key])
    assert (cache.stats().n_stored, cache.stats().errors) == (1 + asks, asks)


def test_an_answer_is_noted_beside_its_own_call_though_a_hook_of_the_head_makes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = wrapped(CLASSIFIERS["bert"], tau=0.99, decide="consensus")
    noted: list[str] = []
    observer = inside.observer(cache)
    see = observer.see
    monkeypatch.setattr(observer, "see", lambda call, output: (noted.append(call.rows[0].key), see(call, output))[1])
    hook(cache, "classifier", lambda: cache(input_ids=tokens(2, 4, seed=5)))
    cache(input_ids=tokens(1, 6))
    assert len(noted) == len(set(noted)) == 2
    assert (cache.stats().n_stored, cache.stats().errors) == (3, 0)


def test_a_thread_that_a_hook_starts_in_a_copy_of_its_context() -> None:
    """It finds the outer call there, which is another thread's."""
    cache, alone = pair(BARE["bert"])
    with ThreadPoolExecutor(1) as pool:
        within = hook(
            cache,
            "encoder.layer.1",
            lambda: pool.submit(copy_context().run, lambda: states(cache(**OTHER))).result(),
        )
        pool.submit(setattr, within.is_inside, "now", True).result()  # the other thread's calls make no more
        for _ in range(2):
            agree(cache, alone, **OUTER)
    check_made(within, alone)
    assert (cache.stats().errors, cache.stats().n_stored) == (0, 5)


@pytest.mark.slow
def test_threads_that_call_within_calls() -> None:
    cache, alone = pair(BARE["bert"], auto_bypass=False)
    rows = [padded([3 + i % 4, 5], seed=i) for i in range(6)]
    within = hook(cache, "encoder.layer.1")

    def work(seed: int) -> None:
        for i in range(12):
            agree(cache, alone, **rows[(seed + i) % len(rows)])
            assert len(cache.last) == 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    check_made(within, alone)
    assert (cache.stats().errors, cache.stats().bypassed) == (0, {})
