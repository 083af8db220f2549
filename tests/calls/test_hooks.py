"""Installing and removing: every module's `__dict__` is restored, and an error leaves no call open."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from llmcache.models.hooks import parts_of
from tests.calls.helpers import X, agree, attributes, pair, run
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, TOKEN_HEADS, build, states, tokens


def foreign(module: nn.Module) -> Any:
    """What accelerate's `add_hook_to_module` puts in place of a forward."""
    old = module.forward

    def new_forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    return functools.update_wrapper(functools.partial(new_forward, module), old)


@pytest.mark.parametrize("inputs", [None, torch.full((1, 4), 10_000)], ids=["the body fails", "the model fails"])
def test_the_context_manager_unwraps_after_an_error(inputs: torch.Tensor | None) -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    with pytest.raises((KeyError, IndexError)), LLMCache.wrap(model) as cache:
        assert isinstance(cache, LLMCache)
        if inputs is None:
            raise KeyError("mine")
        cache(input_ids=inputs)
    assert attributes(model) == before


def test_a_foreign_forward_put_on_top_stays_and_unwrap_can_be_tried_again() -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    cache = LLMCache.wrap(model)
    ours = model.forward
    model.forward = foreign(model)
    with pytest.raises(WrapError, match=r"BertModel.*then call unwrap"):
        cache.unwrap()
    model.forward = ours  # the wrapper is removed, as the error asks
    cache.unwrap()
    assert attributes(model) == before
    LLMCache.wrap(model).unwrap()


def test_an_install_that_fails_half_way_restores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["gpt2"])
    before = attributes(model)
    with monkeypatch.context() as broken:
        broken.setattr("llmcache.core.HeadSwap", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLMCache.wrap(model)
    assert attributes(model) == before
    LLMCache.wrap(model).unwrap()


def test_wrapping_twice_is_refused() -> None:
    model = build(CLASSIFIERS["bert"])
    other_head = TOKEN_HEADS["span"]()
    other_head.bert = model.bert
    cache = LLMCache.wrap(model)
    before = attributes(model)
    for again in (model, model.bert, other_head, nn.Sequential(model)):
        with pytest.raises(WrapError, match="already wrapped"):
            LLMCache.wrap(again)
    assert attributes(model) == before  # the refusal broke nothing
    cache.unwrap()
    with LLMCache.wrap(model.bert), pytest.raises(WrapError):
        LLMCache.wrap(model)
    LLMCache.wrap(model).unwrap()


def test_unwrap_returns_the_model_and_is_idempotent() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    assert cache.unwrap() is model
    before = attributes(model)
    second = LLMCache.wrap(model)
    assert cache.unwrap() is model  # the old cache does not take the new one off
    assert attributes(model) != before
    second.unwrap()
    assert attributes(model) == before


def test_an_exception_in_a_layer_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = pair(BARE["bert"])
    layers = cache.model.encoder.layer
    with monkeypatch.context() as broken:
        broken.setattr(torch.nn.functional, "gelu", lambda *_: 1 / 0)
        broken.setattr(layers[2].intermediate.intermediate_act_fn, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache(**X)
    stats = cache.stats()
    assert (stats.n_stored, stats.n_requests, stats.nbytes) == (0, 0, 0)
    # A layer called by itself is outside any call.
    assert layers[0](torch.zeros(1, 3, 32)).shape == (1, 3, 32)
    assert torch.equal(states(cache(**X)), run(alone, **X))
    agree(cache, alone, **X)
    assert cache.stats().hits == {"exact": 2}


def test_an_exception_above_the_trunk_is_the_callers_alone() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    with pytest.raises(ValueError, match="Expected input batch_size"):
        cache(**X, labels=torch.zeros(7, dtype=torch.long))
    assert torch.equal(states(cache(**X)), run(alone, **X))


def test_a_layer_run_by_hand_is_the_plain_layer() -> None:
    cache, alone = pair(BARE["bert"])
    cache(input_ids=tokens(2, 5))
    hidden = torch.randn(2, 5, 32)
    with torch.no_grad():
        assert torch.equal(cache.model.encoder.layer[2](hidden), alone.encoder.layer[2](hidden))
        assert torch.equal(cache.model.encoder(hidden).last_hidden_state, alone.encoder(hidden).last_hidden_state)


@pytest.mark.parametrize("family", BARE)
def test_parts_of_a_module_are_all_its_modules_once(family: str) -> None:
    model: Any = build(BARE[family])
    model.again = next(model.children())  # at two places
    model.register_module("empty", None)
    parts = parts_of(model)
    assert {*parts} == {*model.modules()} - {model}
    assert len(parts) == len({*parts})
