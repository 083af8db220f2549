"""Copies of a wrapped model use their own weights, and files made of it are those of the plain model."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, states


def run(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return states(model(**inputs))


def scale(model: nn.Module, factor: float = 1.5) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bart", "deberta"])
def test_a_copy_has_its_own_weights(family: str) -> None:
    model = build(BARE[family])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    cache(**inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, **inputs), plain)
    scale(twin)
    changed = run(twin, **inputs)
    assert not torch.allclose(changed, plain)
    assert torch.equal(states(cache(**inputs))[0], plain[0])
    scale(model, 0.5)
    assert torch.equal(run(twin, **inputs), changed)
    assert cache.stats().n_requests == 4  # the copy reports to nobody


def test_a_copy_can_be_wrapped_and_unwrapped_by_itself() -> None:
    model = build(BARE["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    twin = copy.deepcopy(model)
    with LLMCache.wrap(twin) as second:
        second(**inputs)
        torch.testing.assert_close(states(second(**inputs))[0], plain[0])
        assert second.stats().hits == {"exact": 2}
    assert cache.stats().n_requests == 0
    cache.unwrap()
    assert torch.equal(run(twin, **inputs), plain)
    assert torch.equal(run(copy.deepcopy(copy.deepcopy(twin)), **inputs), plain)


def test_a_copy_of_a_model_under_a_foreign_wrapper_has_its_own_weights() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = build(BARE["bert"])
    for layer in model.encoder.layer:
        add_hook_to_module(layer, ModelHook())
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    LLMCache.wrap(model)
    twin = copy.deepcopy(model)
    scale(model)
    assert torch.equal(run(twin, **inputs), plain)


def test_a_copied_layer_has_its_own_weights() -> None:
    model = build(BARE["bert"])
    LLMCache.wrap(model)
    twin = copy.deepcopy(model.encoder.layer[0])
    hidden = torch.randn(1, 3, 32)
    plain = twin(hidden)
    scale(model)
    assert torch.equal(twin(hidden), plain)


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_wrapped_model_cannot_be_pickled(save: object) -> None:
    model = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model), pytest.raises(WrapError, match=r"unwrap\(\).*state_dict"):
        save(model)  # type: ignore[operator]
    save(model)  # type: ignore[operator]


def test_a_copy_of_a_wrapped_model_can_be_pickled() -> None:
    model = build(BARE["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    LLMCache.wrap(model)
    loaded = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    scale(model)
    assert torch.equal(run(loaded, **inputs), plain)


def test_state_dict_has_the_plain_names_and_values() -> None:
    model = build(CLASSIFIERS["bert"])
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    with LLMCache.wrap(model) as cache:
        cache(**padded([6, 4]))
        wrapped = model.state_dict()
    assert wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[name], plain[name]) for name in plain)


def test_save_pretrained_of_a_wrapped_model_loads_plain(tmp_path: Path) -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    cache(**inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded, **inputs), plain)
    assert all("forward" not in module.__dict__ for module in loaded.modules())
