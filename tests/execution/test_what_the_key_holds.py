"""What decides an output and is not part of the key makes a call bypass the cache, whatever its value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.request.bypass import CURES
from tests.tiny_models import (
    BARE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    VOCABULARY,
    build,
    padded,
    states,
    tokens,
)


def run(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.inference_mode():
        return states(model(**inputs))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_an_argument_that_is_false_is_not_one_that_is_absent(family: str) -> None:
    model = build((GENERATORS | STRANGE_GENERATORS)[family])
    inputs = {"input_ids": tokens(2, 20)}
    longer = {"input_ids": torch.cat([inputs["input_ids"], tokens(2, 3, seed=4)], dim=1)}
    plain, other, after = run(model, **inputs), run(model, **inputs, is_causal=False), run(model, **longer)
    assert (plain - other).abs().max() > 0.1
    with LLMCache.wrap(model) as cache:
        assert torch.equal(run(model, **inputs, is_causal=False), other)
        torch.testing.assert_close(run(model, **inputs), plain, atol=1e-5, rtol=1e-5)
        assert torch.equal(run(model, **inputs, is_causal=False), other)
        torch.testing.assert_close(run(model, **longer), after, atol=1e-5, rtol=1e-5)
        assert cache.stats().bypassed == {"unknown_argument": 4}


@pytest.mark.parametrize("value", [False, None, 0, "", (), 0.0])
def test_an_unknown_argument_is_bypassed_whatever_its_value(value: object) -> None:
    model = build(GENERATORS["llama"])
    with LLMCache.wrap(model) as cache:
        run(model, input_ids=tokens(1, 6), something_new=value)
        assert cache.stats().bypassed == {"unknown_argument": 1}


def test_an_argument_that_equals_its_default_is_absent() -> None:
    class Scaled(tf.BertModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, scale: float = 1.0, **more: Any) -> Any:
            output = super().forward(input_ids, attention_mask, **more)
            output.last_hidden_state = output.last_hidden_state * scale
            return output

    Scaled.__name__ = "BertModel"
    torch.manual_seed(0)
    model = Scaled(BARE["bert"]().config).eval()
    ids = tokens(1, 6)
    with LLMCache.wrap(model) as cache:
        run(model, input_ids=ids)
        run(model, input_ids=ids, scale=1.0)
        assert cache.stats().hits == {"exact": 1}
        for other in (2.0, 1, True):
            run(model, input_ids=ids, scale=other)
        assert cache.stats().bypassed == {"unknown_argument": 3}


def test_tokens_put_elsewhere_in_the_kv_cache_are_bypassed() -> None:
    model = build(GENERATORS["llama"])
    with LLMCache.wrap(model) as cache:
        for order in (torch.arange(6), torch.arange(6), torch.arange(6) + 2, torch.zeros(1, dtype=torch.long)):
            run(model, input_ids=tokens(1, 6), cache_position=order)
        stats = cache.stats()
    assert stats.hits == {"exact": 1}
    assert stats.bypassed == {"unknown_argument": 2}


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("first", ["none", "ones", "kv"])
def test_packed_sequences_are_no_single_text(family: str, first: str) -> None:
    model = build((GENERATORS | STRANGE_GENERATORS)[family])
    ids = tokens(1, 8)
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    calls: dict[str, dict[str, Any]] = {
        "none": {**packed, "use_cache": False},
        "ones": {**packed, "use_cache": False, "attention_mask": torch.ones_like(ids)},
        "kv": {**packed, "use_cache": True},
    }
    plain = {kind: run(model, **call) for kind, call in calls.items()}
    assert (plain["none"] - plain["ones"]).abs().max() > 0.1
    with LLMCache.wrap(model) as cache:
        for kind in (first, *calls, *calls):
            torch.testing.assert_close(run(model, **calls[kind]), plain[kind], atol=1e-5, rtol=1e-5)
        stats = cache.stats()
    assert stats.bypassed["packed"] >= 2
    assert stats.errors == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_classifier_is_not_run_without_kv_where_positions_would_then_tell_texts_apart(family: str) -> None:
    model = build(CLASSIFIERS[family])
    inputs = {"input_ids": tokens(1, 8), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    calls: list[dict[str, Any]] = [
        inputs,
        {**inputs, "use_cache": False},
        {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])},
        {**inputs, "position_ids": torch.arange(8)[None]},
    ]
    plain = [run(model, **call) for call in calls]
    assert (plain[0] - plain[1]).abs().max() > 1e-3
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            for call, expected in zip(calls, plain, strict=True):
                torch.testing.assert_close(run(model, **call), expected, atol=1e-5, rtol=1e-5)
        stats = cache.stats()
    assert (stats.hits, stats.bypassed) == ({"exact": 1}, {"packed": 6})


def test_one_packed_row_goes_by_alone() -> None:
    model = build(GENERATORS["llama"])
    inputs = {"input_ids": tokens(2, 6), "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])}
    plain = run(model, **inputs, use_cache=False)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            torch.testing.assert_close(run(model, **inputs, use_cache=False), plain, atol=1e-5, rtol=1e-5)
        assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 2})


@pytest.mark.parametrize("family", ["deberta", "bert", "gpt2"])
@pytest.mark.parametrize("values", [(0.5, 1.0), (0, 2), (-1, 1), (float("nan"), 1.0)])
def test_masks_hold_0_and_1(family: str, values: tuple[float, float]) -> None:
    model = build(BARE[family])
    inputs = padded([6, 6, 4])
    mask = inputs["attention_mask"].to(torch.tensor(values).dtype)
    odd = mask.clone()
    odd[0, 2:4] = torch.tensor(values, dtype=mask.dtype)
    with LLMCache.wrap(model) as cache:
        run(model, **inputs)
        run(model, **{**inputs, "attention_mask": mask})
        assert cache.stats().hits == {"exact": 3}
        run(model, **{**inputs, "attention_mask": odd})
        stats = cache.stats()
    assert stats.hits == {"exact": 5}
    assert stats.bypassed == {"mask_values": 1}


def test_deberta_multiplies_by_its_mask() -> None:
    model = build(BARE["deberta"])
    ids = tokens(1, 6)
    masks = [torch.ones(1, 6), torch.full((1, 6), 2.0), torch.tensor([[1.0, 1.0, 3.0, 1.0, 1.0, 1.0]])]
    plain = [run(model, input_ids=ids, attention_mask=mask) for mask in masks]
    assert not torch.equal(plain[0], plain[2])
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            for mask, output in zip(masks, plain, strict=True):
                assert torch.equal(run(model, input_ids=ids, attention_mask=mask), output)
        assert cache.stats().bypassed == {"mask_values": 4}


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: tf.MixtralModel(tf.MixtralConfig(**_moe(), num_local_experts=2)),
    "qwen3": lambda: tf.Qwen3MoeModel(tf.Qwen3MoeConfig(**_moe(), num_experts=2, moe_intermediate_size=16, head_dim=8)),
}


def _moe() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }


@pytest.mark.parametrize("family", MIXTURES)
def test_router_logits_that_are_asked_for_by_config_after_warming(family: str) -> None:
    model = build(MIXTURES[family])
    inputs = {"input_ids": tokens(1, 6)}
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        cache(**inputs)
        assert cache.stats().hits == {"exact": 1}
        model.config.output_router_logits = True
        asked = cache(**inputs)
        by_argument = cache(**inputs, output_router_logits=True)
        silent = cache(**inputs, output_router_logits=False)
        stats = cache.stats()
    assert len(asked.router_logits) == len(by_argument.router_logits) == 2
    assert silent.get("router_logits") is None
    assert stats.bypassed == {"more_output": 2}
    assert "more_output" in CURES


def test_heads_pass_nothing_that_is_unknown() -> None:
    for family, make in (CLASSIFIERS | GENERATORS).items():
        if family in ("t5", "bart"):
            continue
        model = build(make)
        with LLMCache.wrap(model) as cache:
            run(model, **padded([6, 6]))
            run(model, **padded([6, 6]))
            assert cache.stats().hits == {"exact": 2}, family


def test_positions_that_are_no_integers_are_computed() -> None:
    model = build(GENERATORS["llama"])
    ids, mask = tokens(1, 9), torch.ones(1, 9, dtype=torch.long)
    whole, half = torch.arange(9.0)[None], torch.arange(9.0)[None] + 0.5
    plain = [model(ids, attention_mask=mask, position_ids=p).past_key_values.layers[0].keys for p in (whole, half)]
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            for positions, keys in zip((whole, half), plain, strict=True):
                served = cache(ids, attention_mask=mask, position_ids=positions).past_key_values.layers[0].keys
                torch.testing.assert_close(served, keys)
        assert cache.stats().bypassed == {"input_shape": 4}


def test_positions_of_several_axes_are_computed() -> None:
    model = build(GENERATORS["llama"])
    with LLMCache.wrap(model) as cache, pytest.raises((RuntimeError, IndexError, ValueError)):
        cache(tokens(1, 8), position_ids=torch.arange(8).expand(3, 1, 8))
    assert cache.stats().bypassed == {"input_shape": 1}
