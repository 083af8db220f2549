"""The digest covers tensors and settings wherever they are kept, and follows their edits."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from llmcache.models.weights import Weights
from tests.tiny_models import BARE, build


class Holder(nn.Module):
    """Keeps tensors wherever modules may keep them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.aside = [nn.Linear(2, 2)]
        self.weight.quant_state = SimpleNamespace(code=torch.randn(3))  # as bitsandbytes does
        self.register_buffer("whole", torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8))
        self.nested = {"a": [1, 2]}
        self.table = np.arange(3)


def wrapping(seed: int = 0) -> nn.Linear:
    """A module whose weight wraps two tensors, as torchao's quantised weights do."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 3, bias=False)
    module.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
    return module


def quantised(seed: int = 0) -> nn.Module:
    """Linear layers that keep int8 weights in packed parameters."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)


class RootNorm(nn.LayerNorm):
    """Another class with the same tensors."""


KEEPERS: dict[str, Callable[..., Any]] = {
    "holder": Holder,
    "subclass": wrapping,
    "packed": quantised,
    "norm": lambda seed=0: nn.LayerNorm(seed + 2),
    "llama": lambda seed=0: build(BARE["llama"], seed),
}
EDITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "in a module in a list": ("holder", lambda m: m.aside[0].weight.add_(1)),
    "on a parameter": ("holder", lambda m: m.weight.quant_state.code.add_(1)),
    "scale of a quantised tensor": (
        "holder",
        lambda m: setattr(m, "whole", torch.quantize_per_tensor(m.whole.dequantize() * 2, 0.2, 0, torch.quint8)),
    ),
    "an empty holder": ("holder", lambda m: m.aside[0].register_buffer("more", torch.ones(1))),
    "elements within elements": ("holder", lambda m: m.nested["a"].append(3)),
    "an array": ("holder", lambda m: setattr(m, "table", np.zeros(3))),
    "a tensor that wraps others": ("subclass", lambda m: m.weight.add_(1)),
    "a wrapped tensor": ("subclass", lambda m: m.weight.b.add_(1)),
    "packed weights": ("packed", lambda m: m[0].set_weight_bias(quantised(1)[0].weight(), m[0].bias())),
    "a packed bias": ("packed", lambda m: m[0].bias().add_(1.0)),
    "class": ("norm", lambda m: setattr(m, "__class__", RootNorm)),
    "a new attribute": ("norm", lambda m: setattr(m, "note", True)),
    "a buffer that is not saved": ("llama", lambda m: m.rotary_emb.inv_freq.view(-1)[3:4].fill_(9.0)),
    "an edit in inference mode": ("llama", torch.inference_mode()(lambda m: m.rotary_emb.inv_freq.mul_(2.0))),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_equal_modules_have_equal_digests(kind: str) -> None:
    make = KEEPERS[kind]
    assert Weights(make()).digest() == Weights(make()).digest() != Weights(make(1)).digest()
    assert Weights(make()).refusal is None


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_seen_by_an_old_and_a_new_watcher(name: str) -> None:
    kind, edit = EDITS[name]
    module = KEEPERS[kind]()
    weights = Weights(whole := nn.Sequential(module))
    before = weights.digest()
    with torch.no_grad():
        edit(module)
    assert before != weights.digest() == Weights(whole).digest()


UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
    "sparse": lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
    "lazy": lambda: nn.LazyLinear(2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), UNREADABLE[kind]())
    weights = Weights(module)
    digest = weights.digest()
    assert weights.refusal == weights.unreadable == "unseen_weights"
    assert weights.digest() == digest != Weights(module).digest()
    module[1] = nn.Linear(2, 2)
    weights.digest()
    assert weights.refusal is None


def test_settings_that_decide_no_state_do_not_count() -> None:
    model = build(BARE["bert"])
    weights = Weights(model)
    before = weights.digest()
    for name, value in (("use_cache", False), ("return_dict", False), ("problem_type", "regression")):
        setattr(model.config, name, value)
        assert weights.digest() == before


def test_an_edit_that_is_taken_back_is_seen_of_a_tensor_and_where_another_call_saw_it() -> None:
    norm = nn.BatchNorm1d(2).eval()
    weights = Weights(nn.Sequential(norm))
    digest, eps = weights.digest(), norm.eps

    def edit_and_restore() -> None:
        before = norm.running_mean.clone()
        norm.running_mean.mul_(3).add_(1)
        norm.running_mean.copy_(before)

    def edit_beside_another_call() -> None:
        norm.eps = 0.5
        weights.digest()
        norm.eps = eps

    for act in edit_and_restore, edit_beside_another_call:
        mark = weights.snapshot_of(digest)
        act()
        assert not weights.stayed(mark, digest)
        assert weights.digest() == digest


def test_what_is_replaced_is_seen_even_where_memory_is_used_again() -> None:
    for _ in range(50):
        model = nn.Module()
        model.query = nn.Linear(32, 32)
        weights = Weights(model)
        before = weights.digest()
        for _ in range(2):  # the second may reuse the first one's memory
            model.query.weight.data = model.query.weight.data * 1.1
        assert weights.digest() != before
        before = weights.digest()
        model.query = None
        model.query = nn.Linear(32, 32)  # may reuse the old one's id
        assert weights.digest() != before


def test_of_what_makes_answers_tensors_classes_and_functions_count_and_no_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = Weights(model, without=model[0])
    digests = [weights.digest()]
    model[1].n_calls = 1
    assert weights.digest() == digests[0]
    for name, value in (("act", nn.functional.relu), ("weight", nn.Parameter(torch.zeros(2, 2)))):
        setattr(model[1], name, value)
        digests.append(weights.digest())
    assert len(set(digests)) == 3
