"""PEFT's adapters, put on, switched, merged and swapped under a wrapped model: never an answer of other weights."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.helpers import rescale_adapter_scale
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_same
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT's, about what the tests are to do
X = padded([6, 4])
LINEAR = ["query", "value"]


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": LINEAR, "init_lora_weights": False, **more})


# One of each kind that PEFT has for linear layers, by the name of its config.
METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4},
    "LoraConfig dora": {"r": 4, "use_dora": True},
    "LoraConfig rslora": {"r": 4, "use_rslora": True},
    "LoraConfig bias": {"r": 4, "lora_bias": True},
    "LoraConfig embedding": {"r": 4, "target_modules": ["word_embeddings"]},
    "LoraConfig one layer": {"r": 4, "layers_to_transform": [2]},
    "LoraConfig olora": {"r": 4, "init_lora_weights": "olora"},
    "LoraConfig pissa": {"r": 4, "init_lora_weights": "pissa"},
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {"oft_block_size": 8, "use_cayley_neumann": False},
    "BOFTConfig": {"boft_block_size": 8},
    "VeraConfig": {"r": 4},
    "PveraConfig": {"r": 4},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10},
    "FourierFTConfig": {"n_frequency": 50},
    "WaveFTConfig": {"n_frequency": 50},
    "VBLoRAConfig": {"r": 4, "num_vectors": 8, "vector_length": 4},
    "RandLoraConfig": {"r": 4},
    "ShiraConfig": {"r": 4},
    "HRAConfig": {"r": 4},
    "HiraConfig": {"r": 4},
    "C3AConfig": {"block_size": 8},
    "MissConfig": {"r": 4},
    "DeloraConfig": {"r": 4},
    "GraloraConfig": {"r": 4},
    "RoadConfig": {"group_size": 16},
    "PsoftConfig": {"r": 4},
    "TinyLoraConfig": {},
    "UniLoraConfig": {},
    "AdamssConfig": {},
    "BeftConfig": {"target_modules": LINEAR},
    "DeftConfig": {},
    "GloraConfig": {},
    "FrodConfig": {},
    "PeanutConfig": {},
    "LilyConfig": {},
    "OSFConfig": {},
    "LNTuningConfig": {"target_modules": ["LayerNorm"]},
    "TrainableTokensConfig": {"token_indices": [6, 7, 8], "target_modules": ["word_embeddings"]},
}


def config(method: str) -> PeftConfig:
    made: PeftConfig = getattr(peft, method.split()[0])(**{"target_modules": LINEAR, **METHODS[method]})
    return made


def train(model: nn.Module) -> None:
    """As if the adapters had been trained: all that would have been is another."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def plain(cache: LLMCache, model: nn.Module, inputs: dict[str, Any]) -> Any:
    with cache.disabled():
        return ask(model, **inputs)


def check(cache: LLMCache, model: nn.Module, hits: int | None = None, **inputs: Any) -> None:
    """Assert that two calls answer as the model does now, and how many rows of them are hits."""
    inputs = inputs or X
    expected, before = plain(cache, model, inputs), cache.stats().n_hits
    for _ in range(2):
        check_same(ask(model, **inputs), expected)
    assert hits in (None, cache.stats().n_hits - before)


def tuned(*names: str, make: Callable[[], nn.Module] = CLASSIFIERS["bert"], **more: Any) -> Any:
    """A model with adapters of these names, of which the first is in force."""
    torch.manual_seed(3)
    model = get_peft_model(build(make), lora(**more), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora(**more))
    return model.eval()


# -- merged, for every kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_from_its_coming_to_its_merging(method: str) -> None:
    """Adapters of any kind may be put on, merged, disabled and merged for good under a cache."""
    cache = LLMCache.wrap(build(BARE["bert"]))
    base = cache.model
    check(cache, base, hits=2)
    model: Any = get_peft_model(base, config(method)).eval()
    train(model)
    check(cache, model)
    for change in (model.merge_adapter, model.unmerge_adapter, model.merge_adapter):
        try:
            change()
        except (AttributeError, NotImplementedError, ValueError):
            break
        check(cache, model)
    with model.disable_adapter():
        check(cache, model)
    check(cache, model)
    merged = model.merge_and_unload()
    check(cache, merged)


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_that_no_call_saw(method: str) -> None:
    """Adapters that come and are merged between two calls leave other weights behind, which is seen."""
    cache = LLMCache.wrap(build(BARE["bert"]).requires_grad_(False))
    ask(cache.model, **X)
    model: Any = get_peft_model(cache.model, config(method)).eval()
    train(model)
    merged = model.merge_and_unload()
    check(cache, merged, hits=2)


@pytest.mark.parametrize("init", ["olora", "pissa", "pissa_niter_2", "corda", "eva", "loftq", "orthogonal"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_what_adapters_leave_in_the_base(init: str, is_seen: bool) -> None:
    """Inits that write to the base weights are seen, also once the adapter is taken off."""
    cache = LLMCache.wrap(build(BARE["bert"]).requires_grad_(False))
    ask(cache.model, **X)
    try:
        model: Any = get_peft_model(cache.model, lora(init_lora_weights=init)).eval()
    except (ImportError, ValueError):
        pytest.skip(f"{init} needs data or a package")
    if is_seen:
        check(cache, model)
    check(cache, model.unload())
