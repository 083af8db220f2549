"""Rows of one batch that are the same request: kernels round by the place in a batch, and each comes back as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests import inside
from tests.tiny_models import BARE, build, rounding, tokens


class Alike(nn.Module):
    """Rounds to whole numbers, so that equal rows stay equal whatever the kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.round()


@pytest.fixture
def model() -> Any:
    return rounding("bert")


def states(cache: LLMCache, *numbers: int) -> Tensor:
    """Of a batch of requests of these numbers."""
    found: Tensor = cache(input_ids=torch.cat([tokens(1, 6, seed) for seed in numbers])).last_hidden_state
    return found


@pytest.mark.parametrize("layers", ["auto", [1], [0, 3]])
def test_each_comes_back_as_it_was(model: Any, layers: Any) -> None:
    with LLMCache.wrap(model, layers=layers, auto_bypass=False) as cache:
        first = states(cache, 1, 2, 1, 1)
        assert not torch.equal(first[0], first[2]) and not torch.equal(first[2], first[3])
        for _ in range(2):
            assert torch.equal(states(cache, 1, 2, 1, 1), first)
        assert (cache.stats().hits, cache.stats().errors) == ({"exact": 8}, 0)


def test_each_comes_back_as_it_was_where_a_layer_has_lost_one_of_them(model: Any) -> None:
    with LLMCache.wrap(model, layers=[1, 3], auto_bypass=False) as cache:
        first = states(cache, 1, 1)
        inside.banks(cache).layer_banks[3].remove(inside.records(cache)[1].key)
        for _ in range(2):
            assert torch.equal(states(cache, 1, 1), first)
        assert cache.stats().hits == {"exact": 4} and cache.stats().n_entries == {1: 2, 3: 2}


def test_more_of_them_than_before_are_served_as_well(model: Any) -> None:
    with LLMCache.wrap(model) as cache:
        states(cache, 1)
        first, again = states(cache, 1, 1), states(cache, 1, 1)
        assert torch.equal(first, again) and torch.equal(first[0], first[1])
        assert cache.stats().hits == {"exact": 4} and cache.stats().n_entries == {3: 1}


def test_rows_that_come_out_alike_are_kept_once() -> None:
    model = build(BARE["bert"])
    model.encoder.layer[3].output.LayerNorm = Alike()
    with LLMCache.wrap(model.eval()) as cache:
        states(cache, 1, 1, 1)
        assert cache.stats().n_entries == {3: 1}


def test_where_no_repeat_is_served_they_are_kept_once(model: Any) -> None:
    with LLMCache.wrap(model, exact=False, tau=0.9) as cache:
        states(cache, 1, 1)
        assert cache.stats().n_entries == {3: 1}


def test_those_of_approximate_reuse_are_found_once(model: Any) -> None:
    other = tokens(1, 6, 1)
    other[0, -1] += 1
    with LLMCache.wrap(model, tau=0.0, payload="sequence", auto_bypass=False) as cache:
        first = states(cache, 1, 1)
        assert torch.equal(cache(input_ids=other).last_hidden_state[0], first[0])
        assert cache.stats().hits == {"semantic": 1}
        assert torch.equal(states(cache, 1, 1), first)


def test_they_are_kept_on_disk(model: Any, tmp_path: Path) -> None:
    with LLMCache.wrap(model) as cache:
        first = states(cache, 1, 1)
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        assert torch.equal(states(cache, 1, 1), first)
        assert cache.stats().hits == {"exact": 2}
