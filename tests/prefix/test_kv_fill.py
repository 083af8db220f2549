"""Blocks fill K/V caches: joined with the model's new columns, or written into preallocated room."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from llmcache.calls.kv_fill import empty, fill, join
from tests.prefix.prompts import CACHES

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
GROWING = ("dynamic", "made ahead")


def numbers(n_columns: int, seed: int) -> Tensor:
    """Keys or values (1, 2, n_columns, 4)."""
    return torch.randn(1, 2, n_columns, 4, generator=torch.Generator().manual_seed(seed))


PIECES = [numbers(n, seed) for seed, n in enumerate((3, 3, 1))]
VALUES = [-piece for piece in PIECES]


def filled(kind: str) -> Any:
    """Return a cache with seven columns in both layers."""
    kv_cache = CACHES[kind](CONFIG)
    for number in range(2):
        fill(kv_cache, number, PIECES, VALUES)
    return kv_cache


@pytest.mark.parametrize("kind", GROWING)
def test_nothing_is_copied_before_the_model_brings_its_columns(kind: str) -> None:
    for layer in filled(kind).layers:
        assert layer.keys.shape == layer.values.shape == (1, 2, 7, 4)
        assert layer.keys.untyped_storage().nbytes() == layer.keys.itemsize
    assert join(PIECES[:1]) is PIECES[0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda kv_cache: pickle.loads(pickle.dumps(kv_cache))])
def test_a_copy_goes_its_own_way(duplicate: Callable[[Any], Any]) -> None:
    kv_cache = filled("made ahead")
    twin = duplicate(kv_cache)
    for each, seed in ((twin, 5), (kv_cache, 6)):
        new = numbers(1, seed)
        for number in range(2):
            assert torch.equal(each.update(new, -new, number)[0], join([*PIECES, new]))
        assert each.get_seq_length() == 8


def test_an_update_of_somebody_else_stays_and_sees_all_columns() -> None:
    kv_cache, seen = CACHES["made ahead"](CONFIG), []
    layer = kv_cache.layers[0]
    update = layer.update

    def spy(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(keys.shape[-2])
        return update(keys, values, *args, **kwargs)

    layer.update = spy
    fill(kv_cache, 0, PIECES, VALUES)
    kv_cache.update(numbers(2, seed=7), numbers(2, seed=8), 0)
    empty(kv_cache)
    assert (seen, layer.update) == ([7, 2], spy)
