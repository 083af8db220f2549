"""Blocks fill K/V caches: joined with the model's new columns, or written into preallocated room."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from llmcache.prefix.kv_fill import empty, fill, join
from tests.prefix.prompts import CACHES

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
GROWING = ("dynamic", "made ahead")

of_each_kind = pytest.mark.parametrize("kind", [*GROWING, "static"])


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


@of_each_kind
def test_the_model_goes_on_from_what_was_filled(kind: str) -> None:
    kv_cache, before = filled(kind), PIECES
    assert kv_cache.get_seq_length() == 7
    for seed in (7, 8):  # the second update is the layer's own
        new = numbers(1, seed)
        before = [*before, new]
        for number in range(2):
            keys, values = kv_cache.update(new, -new, number)
            assert torch.equal(keys[:, :, : seed + 1], join(before))
            assert torch.equal(values[:, :, : seed + 1], -join(before))
            assert "update" not in vars(kv_cache.layers[number])
    assert kv_cache.get_seq_length() == 9


@pytest.mark.parametrize("kind", GROWING)
def test_nothing_is_copied_before_the_model_brings_its_columns(kind: str) -> None:
    for layer in filled(kind).layers:
        assert layer.keys.shape == layer.values.shape == (1, 2, 7, 4)
        assert layer.keys.untyped_storage().nbytes() == layer.keys.itemsize
    assert join(PIECES[:1]) is PIECES[0]


@of_each_kind
def test_an_emptied_cache_begins_anew(kind: str) -> None:
    kv_cache = filled(kind)
    kv_cache.update(numbers(1, seed=7), numbers(1, seed=8), 0)  # a call that failed in the second layer
    empty(kv_cache)
    assert kv_cache.get_seq_length() == 0
    new = numbers(2, seed=9)
    for number in range(2):
        keys, values = kv_cache.update(new, -new, number)
        assert torch.equal(keys[:, :, :2], new)
        assert torch.equal(values[:, :, :2], -new)
    assert kv_cache.get_seq_length() == 2


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
