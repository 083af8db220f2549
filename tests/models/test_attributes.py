"""The digest covers weights outside parameters and buffers, and settings in plain attributes."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from llmcache.models.weights import Weights
from tests.models.checks import follows
from tests.tiny_models import BARE, STRANGE_GENERATORS, STRANGERS, build, llama, padded, tokens

FAMILIES = {**BARE, **STRANGERS, **STRANGE_GENERATORS}


def quantised(seed: int = 0) -> nn.Module:
    """A BERT whose linear layers keep int8 weights in packed parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(build(BARE["bert"], seed), {nn.Linear}, dtype=torch.qint8)


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_packed_weights_decide_the_digest() -> None:
    one, same, other = (Weights(quantised(seed)) for seed in (0, 0, 1))
    assert one.digest() == same.digest() != other.digest()
    assert one.refusal is None


def test_edits_of_packed_weights_are_seen() -> None:
    model, other = quantised(), quantised(1)
    dense, theirs = model.encoder.layer[1].output.dense, other.encoder.layer[1].output.dense
    assert follows(model, lambda: dense.set_weight_bias(theirs.weight(), dense.bias()))
    assert follows(model, lambda: dense.bias().add_(1.0))
    assert follows(model, lambda: setattr(dense, "scale", 2.0))


class Holder(nn.Module):
    """Keeps tensors wherever modules may keep them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.plain = torch.randn(3)
        self.listed = [torch.randn(3), torch.randn(3)]
        self.named = {"a": {"b": torch.randn(3)}}
        self.object = SimpleNamespace(state=SimpleNamespace(absmax=torch.randn(3)), size=4)
        self.aside = [nn.Linear(2, 2)]
        self.weight.quant_state = SimpleNamespace(code=torch.randn(3), blocksize=64)  # as bitsandbytes does
        self.weight.blocksize = 64
        self.buffer: torch.Tensor
        self.register_buffer(
            "buffer", torch.quantize_per_channel(torch.randn(2, 3), torch.ones(2), torch.ones(2), 0, torch.qint8)
        )
        self.register_buffer("whole", torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8))


TENSOR_EDITS: dict[str, Callable[[Any], object]] = {
    "plain": lambda m: m.plain.add_(1),
    "plain replaced": lambda m: setattr(m, "plain", torch.zeros(3)),
    "listed": lambda m: m.listed[1].add_(1),
    "listed replaced": lambda m: m.listed.__setitem__(0, torch.zeros(3)),
    "listed one more": lambda m: m.listed.append(torch.zeros(3)),
    "named": lambda m: m.named["a"]["b"].add_(1),
    "named replaced": lambda m: m.named["a"].__setitem__("b", torch.zeros(3)),
    "object": lambda m: m.object.state.absmax.add_(1),
    "object replaced": lambda m: setattr(m.object.state, "absmax", torch.zeros(3)),
    "aside": lambda m: m.aside[0].weight.add_(1),
    "aside replaced": lambda m: m.aside.__setitem__(0, nn.Linear(2, 2)),
    "on a parameter": lambda m: m.weight.quant_state.code.add_(1),
    "on a parameter replaced": lambda m: setattr(m.weight.quant_state, "code", torch.zeros(3)),
    "number on a parameter": lambda m: setattr(m.weight, "blocksize", 128),
    "scale of a quantised tensor": lambda m: setattr(
        m, "whole", torch.quantize_per_tensor(m.whole.dequantize() * 2, 0.2, 0, torch.quint8)
    ),
    "an empty holder": lambda m: m.aside[0].register_buffer("more", torch.ones(1)),
}


@pytest.mark.parametrize("edit", TENSOR_EDITS)
def test_tensors_are_seen_wherever_they_are_kept(edit: str) -> None:
    assert Weights(Holder()).digest() == Weights(Holder()).digest() != Weights(Holder(1)).digest()
    holder = Holder()
    assert follows(nn.Sequential(holder), lambda: TENSOR_EDITS[edit](holder))


def wrapped(seed: int = 0) -> nn.Module:
    """A module whose weight wraps two tensors, as torchao's quantised weights do."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 3, bias=False)
    module.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
    return module


def test_what_a_tensor_subclass_wraps_is_seen() -> None:
    assert Weights(wrapped()).digest() == Weights(wrapped()).digest() != Weights(wrapped(1)).digest()
    module = wrapped()
    assert follows(module, lambda: module.weight.add_(1))
    assert follows(module, lambda: module.weight.b.add_(1))
    assert follows(module, lambda: setattr(module, "weight", wrapped(1).weight))


@pytest.mark.parametrize(
    "part",
    [
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
        lambda: nn.LazyLinear(2),
    ],
    ids=["scripted", "sparse", "lazy"],
)
def test_what_cannot_be_read_is_refused(part: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.Linear(2, 2), part())
    weights = Weights(module)
    digest = weights.digest()
    assert weights.refusal == weights.unreadable == "unseen_weights"
    assert weights.digest() == digest != Weights(module).digest()
    module[1] = nn.Linear(2, 2)
    weights.digest()
    assert weights.refusal is None


# -- settings ----------------------------------------------------------------------------------------------------------


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda x: x * by


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.by


class RootNorm(nn.LayerNorm):
    """Another class with the same tensors."""


def gelu(model: Any) -> Any:
    return model.encoder.layer[2].intermediate


SETTINGS: dict[str, Callable[[Any], object]] = {
    "activation": lambda m: setattr(gelu(m), "intermediate_act_fn", nn.ReLU()),
    "activation's function": lambda m: setattr(gelu(m).intermediate_act_fn, "act", nn.functional.relu),
    "partial": lambda m: setattr(
        gelu(m).intermediate_act_fn, "act", functools.partial(nn.functional.gelu, approximate="tanh")
    ),
    "lambda": lambda m: setattr(gelu(m).intermediate_act_fn, "act", lambda x: x * 2),
    "class": lambda m: setattr(m.encoder.layer[1].output.LayerNorm, "__class__", RootNorm),
    "epsilon": lambda m: setattr(m.encoder.layer[1].output.LayerNorm, "eps", 0.5),
    "scaling": lambda m: setattr(m.encoder.layer[1].attention.self, "scaling", 1.0),
    "is_causal": lambda m: setattr(m.encoder.layer[1].attention.self, "is_causal", True),
    "new attribute": lambda m: setattr(m.encoder.layer[1], "note", True),
    "removed attribute": lambda m: delattr(m.encoder.layer[1].attention.self, "is_causal"),
    "parametrization": lambda m: parametrize.register_parametrization(m.pooler.dense, "weight", Scale(2.0)),
    "config": lambda m: setattr(m.config, "default_language", "de_DE"),
    "id of a special token": lambda m: setattr(m.config, "pad_token_id", 3),
    "forward": lambda m: setattr(m.pooler, "forward", lambda x: x[:, 0]),
    "container": lambda m: setattr(m.encoder.layer[1], "kinds", ["c2p"]),
    "array": lambda m: setattr(m.encoder.layer[1], "table", np.arange(3)),
}


@pytest.mark.parametrize("edit", SETTINGS)
def test_settings_decide_the_digest(edit: str) -> None:
    model = build(BARE["bert"])
    assert follows(model, lambda: SETTINGS[edit](model))


def test_a_parametrization_with_another_constant_is_seen() -> None:
    model = build(BARE["bert"])
    parametrize.register_parametrization(model.pooler.dense, "weight", Scale(2.0))
    assert follows(model, lambda: setattr(model.pooler.dense.parametrizations.weight[0], "by", 3.0))


def test_functions_of_one_name_differ_by_code_and_what_they_close_over() -> None:
    digests = []
    for act in (scaled(2.0), scaled(2.0), scaled(3.0), lambda x: x + 1, lambda x: x + 2, lambda x: x - 2):
        model = nn.Sequential(nn.Linear(2, 2))
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        model.act = act
        digests.append(Weights(model).digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_elements_of_a_container_are_compared() -> None:
    model = build(BARE["deberta"])
    attention = model.encoder.layer[0].attention.self
    attention.pos_att_type = ["c2p", "p2c"]
    attention.nested = {"a": [1, 2]}
    assert follows(model, lambda: attention.pos_att_type.remove("c2p"))
    assert follows(model, lambda: attention.nested["a"].append(3))


def test_the_default_language_of_xmod_and_the_window_of_mistral_are_seen() -> None:
    config = tf.XmodConfig(
        **{**BARE["bert"]().config.to_dict(), "languages": ["en_XX", "de_DE"], "default_language": "en_XX"}
    )
    xmod = build(lambda: tf.XmodModel(config))
    assert follows(xmod, lambda: xmod.set_default_language("de_DE"))
    mistral = build(STRANGE_GENERATORS["mistral"]).model
    assert follows(mistral, lambda: setattr(mistral.config, "sliding_window", 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_cache", False), ("return_dict", False), ("problem_type", "regression")],
)
def test_settings_that_decide_no_state_do_not_count(name: str, value: object) -> None:
    model = build(BARE["bert"])
    weights = Weights(model)
    before = weights.digest()
    setattr(model.config, name, value)
    assert weights.digest() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_changes_nothing_that_is_watched(family: str) -> None:
    model = build(FAMILIES[family])
    inputs = padded([6, 4])
    if family in ("marian", "mbart"):
        inputs["decoder_input_ids"] = tokens(2, 3)
    weights = Weights(model)
    digest = weights.digest()
    mark = weights.mark_of(digest)
    for _ in range(2):
        with torch.inference_mode():
            model(**inputs)
        assert weights.mark() == mark
    assert weights.digest() == digest and weights.stayed(mark, digest)


@pytest.mark.parametrize("family", sorted(set(BARE) - {"bart"}))  # bart's encoder is not saved alone
def test_a_model_that_was_saved_has_the_same_digest(family: str, tmp_path: Path) -> None:
    model = build(BARE[family])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert Weights(model).digest() == Weights(again).digest()


class Counting(nn.Linear):
    """Records its calls in plain attributes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.n_calls = 0
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls = self.n_calls + 1000  # a new object each time
        self.sizes.append(len(x))
        return super().forward(x)


def stays(weights: Weights, act: Callable[[], object]) -> bool:
    """Whether the watcher saw no change while `act` ran."""
    mark = weights.mark_of(digest := weights.digest())
    act()
    return weights.stayed(mark, digest)


def test_what_a_forward_writes_is_an_edit_in_every_call() -> None:
    weights = Weights(model := nn.Sequential(Counting()))
    assert not any(stays(weights, lambda: model(torch.ones(1, 2))) for _ in range(8))


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_edits_in_some_calls_are_never_taken_for_the_models_own(is_taken_back: bool) -> None:
    """However often an attribute is edited: if the watcher ignored it from then on, later edits would go unseen."""
    norm = nn.LayerNorm(2)
    weights = Weights(nn.Sequential(norm))
    for n in range(8):
        assert not stays(weights, functools.partial(setattr, norm, "eps", 0.1 + n))
        if is_taken_back:
            norm.eps = 1e-5
    before = weights.digest()
    norm.eps = 0.05
    assert weights.digest() != before


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
        assert not stays(weights, act)
        assert weights.digest() == digest


def test_frequencies_that_are_written_anew_are_none_unless_another_call_saw_other_ones() -> None:
    """Longrope writes its frequencies when a forward begins; its layers compute the digest after that."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = build(lambda: tf.LlamaModel(llama(rope_parameters=rope)))
    weights = Weights(model)
    with torch.inference_mode():
        model(tokens(1, 8))
        mark = weights.mark_of(digest := weights.digest())
        for _ in range(2):
            model(tokens(1, 8))
            assert weights.digest() == digest and weights.stayed(mark, digest)
        model(tokens(1, 20))
        assert weights.digest() != digest
        model(tokens(1, 8))
        assert weights.digest() == digest and not weights.stayed(mark, digest)


def test_a_pruned_layer_is_followed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    prune.random_unstructured(model[0], "weight", amount=1)
    weights = Weights(model)
    assert all(
        stays(weights, lambda: model(torch.ones(1, 2))) for _ in range(8)
    )  # its weight is computed anew in each call
    assert follows(model, lambda: model[0].weight_mask.mul_(0))
    assert follows(model, lambda: model[0].weight_orig.add_(1))


def test_of_what_makes_answers_tensors_classes_and_functions_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    weights = Weights(model, without=model[0])
    before = weights.digest()
    model(torch.ones(1, 2))
    assert weights.digest() == before
    model[1].act = nn.functional.relu
    functions = weights.digest()
    model[1].weight.data = torch.zeros(2, 2)
    assert len({before, functions, weights.digest()}) == 3
