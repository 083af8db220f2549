"""Copies of modules: made attribute by attribute where that is all that copying does."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from llmcache import LLMCache
from llmcache.models.twin import make_trial, make_twin
from tests.tiny_models import BARE, build


class Counted(nn.Linear):
    """Copies itself, and says so."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo), is_copy=True)
        return twin


def test_attributes_are_copied_once_each_and_weights_are_shared() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Counted(2, 2))
    first, second, last = model
    first.held = second.held = {"module": model, "numbers": [1, 2], "none": OrderedDict()}
    first.norm = torch.ones(2)
    twin = make_trial(model)
    one, other, counted = twin
    assert one.weight is first.weight and one.held is other.held is not first.held
    assert one.held["module"] is twin and one.held["numbers"] == [1, 2] and one.held["none"] == {}
    assert one.held["numbers"] is not first.held["numbers"] and one.held["none"] is not first.held["none"]
    assert torch.equal(one.norm, first.norm) and one.norm is not first.norm
    assert counted.is_copy and not hasattr(last, "is_copy")


def test_a_twin_of_a_wrapped_model_holds_nothing_of_the_cache() -> None:
    model = build(BARE["bert"])
    names = [sorted(vars(part)) for part in model.modules()]
    with LLMCache.wrap(model):
        assert [sorted(vars(part)) for part in make_twin(model).modules()] == names
