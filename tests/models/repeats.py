"""A model that is called again and again with the same inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.stats import Stats


def repeated(
    model: nn.Module,
    inputs: dict[str, Tensor],
    read: Callable[[Any], Tensor] = lambda output: output.to_tuple()[0],
    **settings: Any,
) -> Stats:
    """What a cache counted of two calls, both of which must answer as the model does without it."""
    with torch.inference_mode():
        plain = read(model(**inputs))
    with LLMCache.wrap(model, **settings) as cache:
        for _ in range(2):
            torch.testing.assert_close(read(cache(**inputs)), plain, atol=1e-5, rtol=1e-5)
        return cache.stats()
