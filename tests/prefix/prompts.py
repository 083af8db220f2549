"""Decoders, prompts that share a prefix, and K/V caches of every kind, for the tests of blocks."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from llmcache import LLMCache
from tests.tiny_models import GENERATORS, STRANGE_GENERATORS, tokens

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],  # 4 query heads, 2 K/V heads
    "qwen3": STRANGE_GENERATORS["qwen3"],
}
BLOCK = 4
#: K/V caches that a caller may pass, made from a model's config.
CACHES: dict[str, Callable[[Any], Any]] = {
    "none": lambda config: None,
    "dynamic": lambda config: DynamicCache(),
    "made ahead": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=32),
}

close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def branch(ids: Tensor, n_shared: int, length: int, seed: int = 1) -> Tensor:
    """Return a prompt (1, length) that shares its first `n_shared` tokens with `ids`."""
    return torch.cat([ids[:, :n_shared], tokens(1, length - n_shared, seed)], dim=1)


def wrapped(model: nn.Module, *known: Tensor, **settings: Any) -> LLMCache:
    """Wrap a model with small blocks, and ask the prompts `known`."""
    cache = LLMCache.wrap(model, **{"prefix": {"block": BLOCK}, "auto_bypass": False, **settings})
    for ids in known:
        cache(ids)
    return cache


def run(model: Any, *args: Any, **inputs: Any) -> Any:
    with torch.inference_mode():
        return model(*args, **inputs)


def plainly(cache: LLMCache, *args: Any, **inputs: Any) -> Any:
    """Return the model's output without the cache."""
    with cache.disabled():
        return cache(*args, **inputs)


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: type[BaseException]) -> None:
    """Make a function raise an error once, at its call number `at` from now on."""
    original, calls = getattr(owner, name), count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error("broken")
        return original(*args, **kwargs)

    patch.setattr(owner, name, failing)
