"""Checks of models: repeats answer alike, and the digest follows edits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.models.weights import Weights
from llmcache.stats import Stats


def repeated(
    model: nn.Module,
    inputs: dict[str, Tensor],
    read: Callable[[Any], Tensor] = lambda output: output.to_tuple()[0],
    **settings: Any,
) -> Stats:
    """Make two calls, compare them with the plain model, and return the cache's stats."""
    with torch.inference_mode():
        plain = read(model(**inputs))
    with LLMCache.wrap(model, **settings) as cache:
        for _ in range(2):
            torch.testing.assert_close(read(cache(**inputs)), plain, atol=1e-5, rtol=1e-5)
        return cache.stats()


def follows(module: nn.Module, edit: Callable[[], object]) -> bool:
    """Whether an edit changes the digest, and an old and a new watcher agree on it."""
    weights = Weights(module)
    before = weights.digest()
    with torch.no_grad():
        edit()
    return weights.digest() != before and weights.digest() == Weights(module).digest()
