"""What blocks hold gets into K/V caches: joined with what the model brings, or written where room was made ahead."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, StaticCache

from llmcache.reuse.prefix.kv_fill import empty, fill, join

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
CACHES: dict[str, Callable[[], Any]] = {
    "layers made as they are used": DynamicCache,
    "layers made ahead": lambda: DynamicCache(config=CONFIG),
    "room made ahead": lambda: StaticCache(config=CONFIG, max_cache_len=9),
}
GROWING = list(CACHES)[:2]


def numbers(n_columns: int, seed: int) -> Tensor:
    """Keys or values (1, 2, n_columns, 4)."""
    return torch.randn(1, 2, n_columns, 4, generator=torch.Generator().manual_seed(seed))


PIECES = [numbers(n, seed) for seed, n in enumerate((3, 3, 1))]
VALUES = [-piece for piece in PIECES]


def filled(kind: str) -> Any:
    """A cache of which both layers were filled with seven columns."""
    kv_cache = CACHES[kind]()
    for number in range(2):
        fill(kv_cache, number, PIECES, VALUES)
    return kv_cache


@pytest.mark.parametrize("kind", CACHES)
def test_the_model_goes_on_from_what_was_filled(kind: str) -> None:
    kv_cache = filled(kind)
    assert kv_cache.get_seq_length() == 7
    for n_before in (7, 8):  # the second one goes the layer's own way
        new = numbers(1, seed=n_before)
        for number in range(2):
            before = join(PIECES) if n_before == 7 else join([*PIECES, numbers(1, seed=7)])
            keys, values = kv_cache.update(new, -new, number)
            assert torch.equal(keys[:, :, : n_before + 1], join([before, new]))
            assert torch.equal(values[:, :, : n_before + 1], join([-before, -new]))
            assert "update" not in vars(kv_cache.layers[number])
    assert kv_cache.get_seq_length() == 9


@pytest.mark.parametrize("kind", GROWING)
def test_nothing_is_copied_before_the_model_brings_its_columns(kind: str) -> None:
    for layer in filled(kind).layers:
        assert layer.keys.shape == layer.values.shape == (1, 2, 7, 4)
        assert layer.keys.untyped_storage().nbytes() == layer.keys.itemsize


@pytest.mark.parametrize("kind", CACHES)
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


def test_one_piece_is_not_copied() -> None:
    assert join(PIECES[:1]) is PIECES[0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda kv_cache: pickle.loads(pickle.dumps(kv_cache))])
def test_a_copy_goes_its_own_way(duplicate: Callable[[Any], Any]) -> None:
    kv_cache = filled("layers made ahead")
    twin = duplicate(kv_cache)
    for each, seed in ((twin, 5), (kv_cache, 6)):
        new = numbers(1, seed)
        for number in range(2):
            assert torch.equal(each.update(new, -new, number)[0], join([*PIECES, new]))
        assert each.get_seq_length() == 8


def test_an_update_of_somebody_else_stays_and_sees_all_columns() -> None:
    kv_cache, seen = CACHES["layers made ahead"](), []
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
