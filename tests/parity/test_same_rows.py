"""Rows of one batch that are the same request: kernels round by the place in a batch, and each comes back as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests import inside
from tests.tiny_models import BARE, GENERATORS, build, padded, tokens


class ByPlace(nn.Module):
    """Stands for kernels whose last bits hang on the row's place in a batch."""

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = torch.arange(len(x), dtype=x.dtype)[:, None, None]
        return x + 1e-5 * places


class Alike(nn.Module):
    """Makes every row the first one, so that none differs whatever the kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:1].expand_as(x)


def rounding(family: str = "bert") -> Any:
    """A model of which no two rows of a batch come out alike."""
    model = build((BARE | {"causal": GENERATORS["gpt2"]})[family])
    if family == "bert":
        model.encoder.layer[1].output.dropout = ByPlace()
    else:
        model.transformer.h[0].mlp.dropout = ByPlace()
    return model.eval()


def rows(*numbers: int) -> dict[str, Tensor]:
    ids = torch.cat([tokens(1, 6, seed) for seed in numbers])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("layers", ["auto", [1], [0, 3]])
def test_each_comes_back_as_it_was(layers: Any) -> None:
    model, inputs = rounding(), rows(1, 2, 1, 1)
    with LLMCache.wrap(model, layers=layers, auto_bypass=False) as cache:
        first = cache(**inputs).last_hidden_state
        assert not torch.equal(first[0], first[2]) and not torch.equal(first[2], first[3])
        for _ in range(2):
            assert torch.equal(cache(**inputs).last_hidden_state, first)
        assert cache.stats().hits == {"exact": 8}
        assert cache.stats().errors == 0


def test_each_comes_back_as_it_was_where_a_layer_has_lost_one_of_them() -> None:
    model, inputs = rounding(), rows(1, 1)
    with LLMCache.wrap(model, layers=[1, 3], auto_bypass=False) as cache:
        first = cache(**inputs).last_hidden_state
        banks = inside.banks(cache)
        banks.layer_banks[3].remove([record.key for record in banks.records()][1])
        for _ in range(2):
            assert torch.equal(cache(**inputs).last_hidden_state, first)
        assert cache.stats().hits == {"exact": 4} and cache.stats().n_entries == {1: 2, 3: 2}


def test_keys_and_values_of_each_come_back_as_they_were() -> None:
    model = rounding("causal")
    inputs = {name: value.repeat_interleave(2, 0) for name, value in padded([7, 5], left=True).items()}
    with LLMCache.wrap(model, prefix=False) as cache:
        first, again = cache(**inputs, use_cache=True), cache(**inputs, use_cache=True)
        assert cache.stats().hits == {"exact": 4}
    assert not torch.equal(first.past_key_values.layers[-1].keys[0], first.past_key_values.layers[-1].keys[1])
    assert torch.equal(again.logits, first.logits)
    for ours, theirs in zip(again.past_key_values.layers, first.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_more_of_them_than_before_are_served_as_well() -> None:
    model = rounding()
    with LLMCache.wrap(model) as cache:
        cache(**rows(1))
        first, again = cache(**rows(1, 1)).last_hidden_state, cache(**rows(1, 1)).last_hidden_state
        assert cache.stats().hits == {"exact": 4}
        assert torch.equal(first, again) and torch.equal(first[0], first[1])
        assert cache.stats().n_entries == {3: 1}


def test_rows_that_come_out_alike_are_kept_once() -> None:
    model = build(BARE["bert"])
    model.encoder.layer[3].output.LayerNorm = Alike()
    with LLMCache.wrap(model.eval()) as cache:
        cache(**rows(1, 1, 1))
        assert cache.stats().n_entries == {3: 1}


def test_those_of_approximate_reuse_are_found_once() -> None:
    model, others = rounding(), rows(1)
    others["input_ids"][0, -1] += 1
    with LLMCache.wrap(model, tau=0.0, payload="sequence", auto_bypass=False) as cache:
        first = cache(**rows(1, 1)).last_hidden_state
        assert torch.equal(cache(**others).last_hidden_state[0], first[0])
        assert cache.stats().hits == {"semantic": 1}
        assert torch.equal(cache(**rows(1, 1)).last_hidden_state, first)


def test_where_no_repeat_is_served_they_are_kept_once() -> None:
    with LLMCache.wrap(rounding(), exact=False, tau=0.9) as cache:
        cache(**rows(1, 1))
        assert cache.stats().n_entries == {3: 1}


def test_they_are_kept_on_disk(tmp_path: Path) -> None:
    model, inputs = rounding(), rows(1, 1)
    with LLMCache.wrap(model) as cache:
        first = cache(**inputs).last_hidden_state
        cache.save(tmp_path / "saved")
    with LLMCache.load(model, tmp_path / "saved") as cache:
        assert torch.equal(cache(**inputs).last_hidden_state, first)
        assert cache.stats().hits == {"exact": 2}
