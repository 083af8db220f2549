"""Installing and removing: every module's `__dict__` is restored, and an error leaves no call open."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from tests.calls.helpers import X, pair, run, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, TOKEN_HEADS, build, states


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Every module's `__dict__`, containers copied one level deep."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}
        for module in model.modules()
    ]


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


def test_an_install_that_fails_half_way_restores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["gpt2"])
    before = attributes(model)
    with monkeypatch.context() as broken:
        broken.setattr("llmcache.calls.core.HeadSwap", lambda *_: 1 / 0)
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


def test_an_exception_above_the_trunk_is_the_callers_alone() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    with pytest.raises(ValueError, match="Expected input batch_size"):
        cache(**X, labels=torch.zeros(7, dtype=torch.long))
    assert torch.equal(states(cache(**X)), run(alone, **X))


def test_a_hook_on_a_module_that_was_put_in_place_of_an_equal_one_is_run() -> None:
    """An equal module keeps its entries, but a hook on it bypasses the cache."""
    cache = wrapped(BARE["bert"])
    for _ in range(2):
        before = states(cache(**X))
    layer = cache.model.encoder.layer[0].output
    layer.dense = copy.deepcopy(layer.dense)
    assert torch.equal(states(cache(**X)), before) and cache.last[0].rung == "exact"
    layer.dense.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(states(cache(**X)), before)
    assert cache.last[0].bypassed == "hooked"
