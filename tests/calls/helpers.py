"""Wrapped models beside the same without a cache, and what both put out."""

from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask
from tests.tiny_models import CLASSIFIERS, Make, build, padded, states

X = padded([6, 4])


def wrapped(make: Make, **settings: Any) -> LLMCache:
    """The cache of a new model."""
    return LLMCache.wrap(build(make), **settings)


def pair(make: Make, **settings: Any) -> tuple[LLMCache, nn.Module]:
    """The cache of a new model, and the same model without one."""
    return wrapped(make, **settings), build(make)


def one_layer() -> nn.Module:
    """A classifier of one layer: compiled soonest."""
    model: Any = CLASSIFIERS["bert"]()
    del model.bert.encoder.layer[1:]
    return model


def run(model: nn.Module, **inputs: Any) -> Tensor:
    """Its logits or last states."""
    return states(ask(model, **inputs))


def assert_close(found: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """Logits as they are, states at valid tokens."""
    where = slice(None) if mask is None or found.ndim < 3 else mask.bool()
    torch.testing.assert_close(found[where], expected[where], atol=1e-5, rtol=1e-5)


def agree(cache: LLMCache, alone: nn.Module, **inputs: Any) -> Any:
    """Assert that a wrapped model answers as the one without a cache does; what it puts out."""
    output = cache(**inputs)
    assert_close(states(output), run(alone, **inputs), inputs.get("attention_mask"))
    return output


def rungs(cache: LLMCache) -> list[str | None]:
    """Of the rows of the last call, by which each was served."""
    return [outcome.rung for outcome in cache.last]
