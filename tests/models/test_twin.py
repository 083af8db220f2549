"""Copies of modules: they share weights, and nothing else."""

from typing import Any

import torch
from torch import nn

from llmcache import LLMCache
from llmcache.models.twin import make_trial, make_twin
from tests.tiny_models import BARE, build


def test_weights_are_shared_and_attributes_copied() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].held = model[1].held = {"module": model}
    model[0].norm = nn.functional.normalize(model[0].weight)  # with a gradient, so that copy.deepcopy refuses it
    twin = make_trial(model)
    assert twin[0].weight is model[0].weight
    assert twin[0].held is twin[1].held is not model[0].held and twin[0].held["module"] is twin
    assert torch.equal(twin[0].norm, model[0].norm) and twin[0].norm is not model[0].norm


def test_a_twin_of_a_wrapped_model_holds_nothing_of_the_cache() -> None:
    model = build(BARE["bert"])
    names = [sorted(vars(part)) for part in model.modules()]
    with LLMCache.wrap(model):
        assert [sorted(vars(part)) for part in make_twin(model).modules()] == names
