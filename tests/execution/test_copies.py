"""Copies of a wrapped model use their own weights, and files made of it are those of the plain model."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from tests.execution.calls import X, agree, pair, run, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, build


def scale(model: nn.Module, factor: float = 1.5) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bart", "deberta"])
def test_a_copy_has_its_own_weights(family: str) -> None:
    cache, alone = pair(BARE[family])
    cache(**X)
    twin = copy.deepcopy(cache.model)
    assert torch.equal(run(twin, **X), run(alone, **X))
    scale(twin)
    changed = run(twin, **X)
    assert not torch.allclose(changed, run(alone, **X))
    agree(cache, alone, **X)
    scale(cache.model, 0.5)
    assert torch.equal(run(twin, **X), changed)
    assert cache.stats().n_requests == 4  # the copy reports to nobody


def test_a_copy_can_be_wrapped_and_unwrapped_by_itself() -> None:
    cache, alone = pair(BARE["bert"])
    twin = copy.deepcopy(cache.model)
    with LLMCache.wrap(twin) as second:
        for _ in range(2):
            agree(second, alone, **X)
        assert second.stats().hits == {"exact": 2}
    assert cache.stats().n_requests == 0
    cache.unwrap()
    for model in (twin, copy.deepcopy(copy.deepcopy(twin))):
        assert torch.equal(run(model, **X), run(alone, **X))


def test_a_copy_of_a_model_under_a_foreign_wrapper_has_its_own_weights() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, alone = build(BARE["bert"]), build(BARE["bert"])
    for layer in model.encoder.layer:
        add_hook_to_module(layer, ModelHook())
    LLMCache.wrap(model)
    twin = copy.deepcopy(model)
    scale(model)
    assert torch.equal(run(twin, **X), run(alone, **X))


def test_a_copied_layer_has_its_own_weights() -> None:
    model = wrapped(BARE["bert"]).model
    twin = copy.deepcopy(model.encoder.layer[0])
    hidden = torch.randn(1, 3, 32)
    plain = twin(hidden)
    scale(model)
    assert torch.equal(twin(hidden), plain)


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_wrapped_model_cannot_be_pickled_and_its_copy_can(save: Callable[[nn.Module], Any]) -> None:
    cache, alone = pair(BARE["bert"])
    with pytest.raises(WrapError, match=r"unwrap\(\).*state_dict"):
        save(cache.model)
    save(copy.deepcopy(cache.model))
    loaded = pickle.loads(pickle.dumps(copy.deepcopy(cache.model)))
    scale(cache.model)
    assert torch.equal(run(loaded, **X), run(alone, **X))
    save(cache.unwrap())


def test_what_a_wrapped_model_saves_is_that_of_the_plain_one(tmp_path: Path) -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    cache(**X)
    saved, plain = cache.model.state_dict(), alone.state_dict()
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    cache.model.save_pretrained(tmp_path)
    loaded = type(alone).from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded, **X), run(alone, **X))
    assert all("forward" not in module.__dict__ for module in loaded.modules())
