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
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

OUTER, OTHER = padded([6, 4, 5]), padded([7, 3], seed=50)
# Where in the model the inner call is made: in the embeddings, before, in and after a layer, after the last one.
PLACES = ["embeddings", "encoder.layer.0", "encoder.layer.1.attention", "encoder.layer.3"]


class Within:
    """A hook that makes a call at each call of its module, but for those that it makes itself."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._is_inside = threading.local()
        self.made: list[Any] = []

    def __call__(self, *_: Any) -> None:
        if not getattr(self._is_inside, "now", False):
            self._is_inside.now = True
            try:
                self.made.append(self._make())
            finally:
                self._is_inside.now = False


def plain(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        return states(model(**inputs))


def close(found: Tensor, expected: Tensor, inputs: dict[str, Tensor]) -> None:
    where = inputs["attention_mask"].bool() if found.ndim == 3 else slice(None)
    torch.testing.assert_close(found[where], expected[where], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fingerprint", ["mean", "minhash"])
def test_each_call_gets_its_own_states(place: str, fingerprint: str) -> None:
    model = build(BARE["bert"])
    outer, other = plain(model, OUTER), plain(model, OTHER)
    settings = {"tau": 0.9999, "allow_unsafe": True, "fingerprint": fingerprint}
    cache = LLMCache.wrap(model, layers="all", auto_bypass=False, **settings)
    within = Within(lambda: states(cache(**OTHER)))
    model.get_submodule(place).register_forward_hook(within)
    for n in range(3):
        close(states(cache(**OUTER)), outer, OUTER)
        assert [outcome.rung for outcome in cache.last] == ([None] * 3 if n == 0 else ["exact"] * 3)
    for made in within.made:
        close(made, other, OTHER)
    # The embeddings are run in hits, too, layers are not; hooks on either keep the door shut.
    stats = cache.stats()
    assert (stats.errors, stats.bypassed) == (0, {})
    assert stats.n_misses == 5
    assert stats.hits["exact"] == 6 + 2 * (len(within.made) - 1)


def test_rows_of_a_mixed_batch_keep_theirs() -> None:
    model = build(BARE["gpt2"])
    both = {name: torch.cat([value, padded([6, 4], seed=9)[name]]) for name, value in OUTER.items()}
    expected = plain(model, both)
    cache = LLMCache.wrap(model, layers="all", prefix=False)
    cache(**OUTER)
    within = Within(lambda: cache(**OTHER))
    model.h[1].register_forward_hook(within)
    output = cache(**both)
    close(states(output), expected, both)
    assert [outcome.rung for outcome in cache.last] == ["exact"] * 3 + [None] * 2
    assert {layer.keys.shape[2] for layer in output.past_key_values.layers} == {6}


def test_an_inner_call_that_is_answered_at_the_door() -> None:
    model = build(CLASSIFIERS["bert"])
    outer, other = plain(model, OUTER), plain(model, OTHER)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        close(states(cache(**OTHER)), other, OTHER)
    made = Within(lambda: states(cache(**OTHER)))
    # Of a module within a layer, which keeps the door open.
    model.bert.encoder.layer[2].attention.register_forward_hook(made)
    close(states(cache(**OUTER)), outer, OUTER)
    assert [outcome.rung for outcome in cache.last] == [None] * 3
    close(made.made[0], other, OTHER)
    close(states(cache(**OUTER)), outer, OUTER)
    assert (cache.stats().hits, cache.stats().n_stored) == ({"exact": 7}, 5)


def test_an_inner_call_that_raises_leaves_the_outer_one_as_it_is() -> None:
    model = build(BARE["bert"])
    expected = plain(model, OUTER)
    cache = LLMCache.wrap(model)

    def fail() -> None:
        with suppress(IndexError):
            cache(input_ids=torch.full((1, 4), 10_000))

    handle = model.encoder.layer[1].register_forward_hook(Within(fail))
    for _ in range(2):
        close(states(cache(**OUTER)), expected, OUTER)
        assert len(cache.last) == 3
    handle.remove()
    assert cache.stats().hits == {"exact": 3}
    assert cache.stats().n_stored == 3


def test_an_error_that_passes_through_both_ends_both() -> None:
    model = build(BARE["bert"])
    expected = plain(model, OUTER)
    cache = LLMCache.wrap(model)
    handle = model.encoder.layer[1].register_forward_hook(Within(lambda: cache(input_ids=torch.full((1, 4), 10_000))))
    with pytest.raises(IndexError):
        cache(**OUTER)
    handle.remove()
    assert (cache.last, cache.stats().n_stored) == ((), 0)
    close(states(cache(**OUTER)), expected, OUTER)
    assert cache.stats().n_stored == 3


def test_each_call_has_its_own_namespace() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)

    def elsewhere() -> None:
        with cache.namespace("inner"):
            cache(**OTHER)

    model.encoder.layer[1].register_forward_hook(Within(elsewhere))
    with cache.namespace("outer"):
        cache(**OUTER)
    assert [cache.purge(namespace=name) for name in ("inner", "outer", "default")] == [2, 3, 0]


@pytest.mark.parametrize("why", ["disabled", "output_attentions"])
def test_last_is_the_outer_calls_though_it_went_by(why: str) -> None:
    model = build(BARE["bert"])
    model.set_attn_implementation("eager")
    cache = LLMCache.wrap(model)
    more = {"output_attentions": True} if why == "output_attentions" else {}

    def enabled() -> None:
        token = cache._flow.is_disabled.set(False)
        cache(**OTHER)
        cache._flow.is_disabled.reset(token)

    model.encoder.layer[1].register_forward_hook(Within(enabled))
    with cache.disabled() if why == "disabled" else nullcontext():
        cache(**OUTER, **more)
    assert [outcome.bypassed for outcome in cache.last] == [why] * 3
    assert cache.stats().n_misses == 2


def test_last_is_the_prefills_though_a_decode_step_makes_a_call() -> None:
    model = build(GENERATORS["llama"])
    cache = LLMCache.wrap(model)
    prompt = tokens(1, 6)
    model.model.layers[1].register_forward_hook(Within(lambda: cache(**OTHER)))
    settings = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    model.generate(prompt, **settings)
    key = cache.last[0].key
    assert len(cache.last) == 1
    with cache.disabled():
        expected = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert (cache.last[0].rung, cache.last[0].key) == ("exact", key)


def test_generation_within_a_call() -> None:
    model = build(GENERATORS["llama"])
    prompt = tokens(1, 5, seed=3)
    settings = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    expected, generated = plain(model, OUTER), model.generate(prompt, **settings)
    cache = LLMCache.wrap(model, prefix_block=2)
    within = Within(lambda: model.generate(prompt, **settings))
    model.model.layers[1].mlp.register_forward_hook(within)
    for inputs in (OUTER, OUTER, padded([6, 6, 6])):
        found = states(cache(**inputs))
        if inputs is OUTER:
            close(found, expected, inputs)
    assert within.made
    assert all(torch.equal(made, generated) for made in within.made)
    assert cache.stats().errors == 0


def test_requests_observed_within_a_call() -> None:
    model = build(CLASSIFIERS["bert"])
    expected = plain(model, OUTER)
    cache = LLMCache.wrap(model)
    within = Within(lambda: cache.observe([{"input_ids": tokens(1, 5, seed=i)} for i in range(3)]))
    model.bert.encoder.layer[1].register_forward_hook(within)
    for _ in range(2):
        close(states(cache(**OUTER)), expected, OUTER)
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
    model = build(lambda: Asks(asks))
    cache = LLMCache.wrap(model, tau=0.9, decide="consensus", payload="cls", allow_unsafe=True, answer="class")
    noted: list[str] = []
    monkeypatch.setattr(cache._components.banks, "sign", lambda key, answer: noted.append(key))
    cache(input_ids=tokens(1, 6))
    key = cache.last[0].key
    assert noted == ([] if asks else [key])
    assert (cache.stats().n_stored, cache.stats().errors) == (1 + asks, asks)


def test_an_answer_is_noted_beside_its_own_call_though_a_hook_of_the_head_makes_another() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, tau=0.99, decide="consensus")
    noted: list[str] = []
    observe = cache._components.observer
    assert observe is not None
    see = observe.see
    observe.see = lambda call, output: (noted.append(call.rows[0].key), see(call, output))[1]  # type: ignore[method-assign]
    model.classifier.register_forward_hook(Within(lambda: cache(input_ids=tokens(2, 4, seed=5))))
    cache(input_ids=tokens(1, 6))
    assert len(noted) == len(set(noted)) == 2
    assert (cache.stats().n_stored, cache.stats().errors) == (3, 0)


def test_a_thread_that_a_hook_starts_in_a_copy_of_its_context() -> None:
    """It finds the outer call there, which is another thread's."""
    model = build(BARE["bert"])
    outer, other = plain(model, OUTER), plain(model, OTHER)
    cache = LLMCache.wrap(model)
    with ThreadPoolExecutor(1) as pool:
        within = Within(lambda: pool.submit(copy_context().run, lambda: states(cache(**OTHER))).result())
        is_inside = within._is_inside
        pool.submit(setattr, is_inside, "now", True).result()  # the other thread's calls make no more
        model.encoder.layer[1].register_forward_hook(within)
        for _ in range(2):
            close(states(cache(**OUTER)), outer, OUTER)
    for made in within.made:
        close(made, other, OTHER)
    assert (cache.stats().errors, cache.stats().n_stored) == (0, 5)


def test_threads_that_call_within_calls() -> None:
    model = build(BARE["bert"])
    rows = [padded([3 + i % 4, 5], seed=i) for i in range(6)]
    expected, other = [plain(model, row) for row in rows], plain(model, OTHER)
    cache = LLMCache.wrap(model, auto_bypass=False)
    within = Within(lambda: states(cache(**OTHER)))
    model.encoder.layer[1].register_forward_hook(within)

    def work(seed: int) -> None:
        for i in range(12):
            number = (seed + i) % len(rows)
            close(states(cache(**rows[number])), expected[number], rows[number])
            assert len(cache.last) == 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for made in within.made:
        close(made, other, OTHER)
    assert (cache.stats().errors, cache.stats().bypassed) == (0, {})
