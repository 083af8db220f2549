"""Wrapped models beside the same without a cache, and what both put out."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import CLASSIFIERS, build, padded, states

Make = Callable[[], nn.Module]
X = padded([6, 4])
# Rows without padding: some that tests store, and the same with some that are new.
SEEN = padded([6, 6, 6])
MIXED = {name: torch.cat([SEEN[name], fresh]) for name, fresh in padded([6, 6], seed=40).items()}
# With a fingerprint of states, hits go through the layers, too.
BY_STATES: dict[str, Any] = {"fingerprint": "mean", "tau": 0.9999, "allow_unsafe": True}
LAYERS = {"bert": "encoder.layer", "gpt2": "h", "t5": "encoder.block", "mpnet": "encoder.layer"}


def wrapped(make: Make, **settings: Any) -> LLMCache:
    """The cache of a new model."""
    return LLMCache.wrap(build(make), **settings)


def pair(make: Make, **settings: Any) -> tuple[LLMCache, nn.Module]:
    """The cache of a new model, and the same model without one."""
    return wrapped(make, **settings), build(make)


def shallow() -> nn.Module:
    """A classifier of two layers: sooner compiled."""
    config = CLASSIFIERS["bert"]().config
    config.num_hidden_layers = 2
    return tf.BertForSequenceClassification(config)


def cut(make: Make, n_layers: int = 1) -> Make:
    """Makes the same model with few layers: sooner compiled."""

    def make_and_cut() -> nn.Module:
        model = make()
        layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        del layers[n_layers:]
        return model

    return make_and_cut


one_layer = cut(CLASSIFIERS["bert"])


def quietly(model: nn.Module, **inputs: Any) -> Any:
    """What a model puts out in inference mode."""
    with torch.inference_mode():
        return model(**inputs)


def run(model: nn.Module, **inputs: Any) -> Tensor:
    """Its logits or last states."""
    return states(quietly(model, **inputs))


def plain(cache: LLMCache, **inputs: Any) -> Tensor:
    """What a wrapped model answers without its cache."""
    with cache.disabled():
        return states(cache(**inputs))


def assert_close(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """Logits as they are, states at valid tokens."""
    where = slice(None) if mask is None or found.ndim < 3 else mask.bool()
    torch.testing.assert_close(found[where], expected[where], atol=1e-5, rtol=1e-5)


def agree(cache: LLMCache, alone: nn.Module, **inputs: Any) -> Any:
    """Assert that a wrapped model answers as the one without a cache does; what it puts out."""
    output = cache(**inputs)
    assert_close(states(output), run(alone, **inputs), inputs.get("attention_mask"))
    return output


def check(cache: LLMCache, n_hits: int | None = None, **inputs: Any) -> None:
    """Assert that two calls answer as the model does by itself now, and how many rows of them are hits."""
    expected, before = plain(cache, **inputs), cache.stats().n_hits
    for _ in range(2):
        assert_close(states(cache(**inputs)), expected, inputs.get("attention_mask"))
    assert n_hits in (None, cache.stats().n_hits - before)


def rungs(cache: LLMCache) -> list[str | None]:
    """Of the rows of the last call, by which each was served."""
    return [outcome.rung for outcome in cache.last]


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Every module's `__dict__`, containers copied one level deep."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in module.__dict__.items()}
        for module in model.modules()
    ]


def once(do: Callable[[], Any]) -> Callable[..., None]:
    """A hook that does something the first time."""
    left = [do]

    def hook(*_: Any) -> None:
        if left:
            left.pop()()

    return hook


def two_adapters() -> PeftModel:
    """A classifier with two adapters, of which `north` is in force."""
    torch.manual_seed(3)
    model = get_peft_model(build(CLASSIFIERS["bert"]), lora(), adapter_name="north")
    model.add_adapter("south", lora())
    model.set_adapter("north")
    return model.eval()


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)


def request(number: int, length: int = 6) -> Tensor:
    """Tokens (1, length) of one of 7,200 requests that all differ."""
    return torch.tensor([[5 + number // 90, 5 + number % 90, *range(10, 8 + length)]])


def ask(cache: LLMCache, numbers: Iterable[int]) -> list[str | None]:
    """What became of `request`s, asked one by one: the rung, or why it was bypassed, or None."""
    told = []
    for number in numbers:
        cache(input_ids=request(number))
        told.append(cache.last[0].rung or cache.last[0].bypassed)
    return told


def fail_alike(cache: LLMCache, alone: nn.Module) -> None:
    """A token that a model of 96 does not know raises the same with the cache and without."""
    inputs = {"input_ids": torch.tensor([[5, 6, 96]])}
    with pytest.raises(IndexError) as plain:
        quietly(alone, **inputs)
    with pytest.raises(IndexError) as ours:
        cache(**inputs)
    assert str(ours.value) == str(plain.value)
