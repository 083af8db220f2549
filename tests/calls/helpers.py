"""Wrapped models beside equal plain ones, and comparisons of their outputs."""

from typing import Any

from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_same, uncomputed
from tests.tiny_models import CLASSIFIERS, Make, build, padded, states

X = padded([6, 4])


def wrapped(make: Make, **settings: Any) -> LLMCache:
    """Return the cache of a new model."""
    return LLMCache.wrap(build(make), **settings)


def pair(make: Make, **settings: Any) -> tuple[LLMCache, nn.Module]:
    """Return the cache of a new model, and an equal plain model."""
    return wrapped(make, **settings), build(make)


def one_layer() -> nn.Module:
    """A classifier of one layer, quick to compile."""
    model: Any = CLASSIFIERS["bert"]()
    del model.bert.encoder.layer[1:]
    return model


def run(model: nn.Module, **inputs: Any) -> Tensor:
    """Return the model's logits or last states."""
    return states(ask(model, **inputs))


def agree(cache: LLMCache, alone: nn.Module, **inputs: Any) -> None:
    """Assert that a wrapped model answers as the plain one does."""
    check_same(cache(**inputs), ask(alone, **inputs), padding=uncomputed(alone, inputs))


def rungs(cache: LLMCache) -> list[str | None]:
    """Return the rung of each row of the last call."""
    return [outcome.rung for outcome in cache.last]
