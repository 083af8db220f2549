"""What decides an output and is not part of the key makes a call bypass the cache, whatever its value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache.request.bypass import CURES
from tests.execution.calls import agree, assert_close, pair, run, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, STRANGE_GENERATORS, llama, padded, tokens

DECODERS = GENERATORS | STRANGE_GENERATORS
PACKED = {"input_ids": tokens(1, 8), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_an_argument_that_is_false_is_not_one_that_is_absent(family: str) -> None:
    cache, alone = pair(DECODERS[family])
    inputs = {"input_ids": tokens(2, 20)}
    longer = {"input_ids": torch.cat([inputs["input_ids"], tokens(2, 3, seed=4)], dim=1)}
    assert (run(alone, **inputs) - run(alone, **inputs, is_causal=False)).abs().max() > 0.1
    agree(cache, alone, **inputs, is_causal=False)
    agree(cache, alone, **inputs)
    agree(cache, alone, **inputs, is_causal=False)
    agree(cache, alone, **longer)
    assert cache.stats().bypassed == {"unknown_argument": 4}


@pytest.mark.parametrize("value", [False, None, 0, "", (), 0.0])
def test_an_unknown_argument_is_bypassed_whatever_its_value(value: object) -> None:
    cache = wrapped(GENERATORS["llama"])
    cache(input_ids=tokens(1, 6), something_new=value)
    assert cache.stats().bypassed == {"unknown_argument": 1}


def test_an_argument_that_equals_its_default_is_absent() -> None:
    class Scaled(tf.BertModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, scale: float = 1.0, **more: Any) -> Any:
            output = super().forward(input_ids, attention_mask, **more)
            output.last_hidden_state = output.last_hidden_state * scale
            return output

    Scaled.__name__ = "BertModel"
    cache = wrapped(lambda: Scaled(BARE["bert"]().config))
    ids = tokens(1, 6)
    cache(input_ids=ids)
    cache(input_ids=ids, scale=1.0)
    assert cache.stats().hits == {"exact": 1}
    for other in (2.0, 1, True):
        cache(input_ids=ids, scale=other)
    assert cache.stats().bypassed == {"unknown_argument": 3}


def test_tokens_put_elsewhere_in_the_kv_cache_are_bypassed() -> None:
    cache = wrapped(GENERATORS["llama"])
    for order in (torch.arange(6), torch.arange(6), torch.arange(6) + 2, torch.zeros(1, dtype=torch.long)):
        cache(input_ids=tokens(1, 6), cache_position=order)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"unknown_argument": 2})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("first", ["none", "ones", "kv"])
def test_packed_sequences_are_no_single_text(family: str, first: str) -> None:
    cache, alone = pair(DECODERS[family])
    calls: dict[str, dict[str, Any]] = {
        "none": {**PACKED, "use_cache": False},
        "ones": {**PACKED, "use_cache": False, "attention_mask": torch.ones_like(PACKED["input_ids"])},
        "kv": {**PACKED, "use_cache": True},
    }
    assert (run(alone, **calls["none"]) - run(alone, **calls["ones"])).abs().max() > 0.1
    for kind in (first, *calls, *calls):
        agree(cache, alone, **calls[kind])
    assert cache.stats().bypassed["packed"] >= 2
    assert cache.stats().errors == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_classifier_is_not_run_without_kv_where_positions_would_then_tell_texts_apart(family: str) -> None:
    cache, alone = pair(CLASSIFIERS[family])
    assert (run(alone, **PACKED) - run(alone, **PACKED, use_cache=False)).abs().max() > 1e-3
    for _ in range(2):
        agree(cache, alone, **PACKED)
        agree(cache, alone, **PACKED, use_cache=False)
        agree(cache, alone, **PACKED, attention_mask=torch.ones_like(PACKED["input_ids"]))
        agree(cache, alone, **PACKED | {"position_ids": torch.arange(8)[None]})
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 6})


def test_one_packed_row_goes_by_alone() -> None:
    cache, alone = pair(GENERATORS["llama"])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
    for _ in range(2):
        agree(cache, alone, input_ids=tokens(2, 6), position_ids=positions, use_cache=False)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 2})


@pytest.mark.parametrize("family", ["deberta", "bert", "gpt2"])
@pytest.mark.parametrize("values", [(0.5, 1.0), (0, 2), (-1, 1), (float("nan"), 1.0)])
def test_masks_hold_0_and_1(family: str, values: tuple[float, float]) -> None:
    cache = wrapped(BARE[family])
    inputs = padded([6, 6, 4])
    cache(**inputs)
    mask = inputs["attention_mask"].to(torch.tensor(values).dtype)
    cache(**inputs | {"attention_mask": mask})
    assert cache.stats().hits == {"exact": 3}
    mask[0, 2:4] = torch.tensor(values, dtype=mask.dtype)
    cache(**inputs | {"attention_mask": mask})
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 5}, {"mask_values": 1})


def test_deberta_multiplies_by_its_mask() -> None:
    cache, alone = pair(BARE["deberta"])
    ids = tokens(1, 6)
    masks = [torch.ones(1, 6), torch.full((1, 6), 2.0), torch.tensor([[1.0, 1.0, 3.0, 1.0, 1.0, 1.0]])]
    plain = [run(alone, input_ids=ids, attention_mask=mask) for mask in masks]
    assert not torch.equal(plain[0], plain[2])
    for _ in range(2):
        for mask, expected in zip(masks, plain, strict=True):
            assert torch.equal(cache(input_ids=ids, attention_mask=mask).last_hidden_state, expected)
    assert cache.stats().bypassed == {"mask_values": 4}


_MOE = llama(num_hidden_layers=2).to_dict() | {"num_experts_per_tok": 1}
MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: tf.MixtralModel(tf.MixtralConfig(**_MOE, num_local_experts=2)),
    "qwen3": lambda: tf.Qwen3MoeModel(tf.Qwen3MoeConfig(**_MOE, num_experts=2, moe_intermediate_size=16)),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_router_logits_that_are_asked_for_by_config_after_warming(family: str) -> None:
    cache = wrapped(MIXTURES[family])
    inputs = {"input_ids": tokens(1, 6)}
    for _ in range(2):
        cache(**inputs)
    assert cache.stats().hits == {"exact": 1}
    cache.model.config.output_router_logits = True
    assert len(cache(**inputs).router_logits) == 2
    assert len(cache(**inputs, output_router_logits=True).router_logits) == 2
    assert cache(**inputs, output_router_logits=False).get("router_logits") is None
    assert cache.stats().bypassed == {"more_output": 2}
    assert "more_output" in CURES


@pytest.mark.parametrize(
    "make", [make for family, make in (CLASSIFIERS | GENERATORS).items() if family not in ("t5", "bart")]
)
def test_heads_pass_nothing_that_is_unknown(make: Callable[[], nn.Module]) -> None:
    cache = wrapped(make)
    for _ in range(2):
        cache(**padded([6, 6]))
    assert cache.stats().hits == {"exact": 2}


def test_positions_that_are_no_integers_are_computed() -> None:
    cache, alone = pair(GENERATORS["llama"])
    inputs = {"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    for _ in range(2):
        for positions in (torch.arange(9.0)[None], torch.arange(9.0)[None] + 0.5):
            served, expected = (model(**inputs, position_ids=positions).past_key_values for model in (cache, alone))
            assert_close(served.layers[0].keys, expected.layers[0].keys)
    assert cache.stats().bypassed == {"input_shape": 4}


def test_positions_of_several_axes_are_computed() -> None:
    cache = wrapped(GENERATORS["llama"])
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        cache(tokens(1, 8), position_ids=torch.arange(8).expand(3, 1, 8))
    assert cache.stats().bypassed == {"input_shape": 1}
