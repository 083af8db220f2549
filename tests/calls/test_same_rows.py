"""A batch that repeats a request: kernels round by row, and each row comes back with its own bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache
from tests.tiny_models import rounding, tokens


@pytest.fixture
def model() -> Any:
    return rounding("bert")


def states(cache: LLMCache, *numbers: int) -> Tensor:
    """Return the states of a batch of these requests."""
    found: Tensor = cache(input_ids=torch.cat([tokens(1, 6, seed) for seed in numbers])).last_hidden_state
    return found


def test_each_comes_back_as_it_was_also_from_disk(model: Any, tmp_path: Path) -> None:
    with LLMCache.wrap(model) as cache:
        first = states(cache, 1, 2, 1, 1)
        assert not torch.equal(first[0], first[2]) and not torch.equal(first[2], first[3])
        assert torch.equal(states(cache, 1, 2, 1, 1), first)
        assert (cache.stats().hits, cache.stats().errors) == ({"exact": 4}, 0)
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert torch.equal(states(cache, 1, 2, 1, 1), first)
        assert cache.stats().hits == {"exact": 4}


def test_more_of_them_than_before_are_served_as_well(model: Any) -> None:
    with LLMCache.wrap(model) as cache:
        states(cache, 1)
        first, again = states(cache, 1, 1), states(cache, 1, 1)
        assert torch.equal(first, again) and torch.equal(first[0], first[1])
        assert cache.stats().hits == {"exact": 4} and cache.stats().n_entries == {3: 1}
