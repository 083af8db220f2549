"""The same call twice gives the same output at every place, bit for bit: padding, its K/V and losses included."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import BARE, GENERATORS, STRANGERS, TOKEN_HEADS, VOCABULARY, build, padded, states, tokens

LENGTHS = [9, 4, 7]
EVERY_BARE = BARE | {family: STRANGERS[family] for family in ("qwen3", "modernbert")}

# Classifiers that read the first row whatever the mask says, and whose entries keep every row.
FIRST_ROW: dict[str, Callable[[], nn.Module]] = {
    "mpnet": lambda: tf.MPNetForSequenceClassification(_small(tf.MPNetConfig, num_labels=5)),
    "deberta": lambda: tf.DebertaForSequenceClassification(_small(tf.DebertaConfig, num_labels=5, type_vocab_size=0)),
    "deberta_v2": lambda: tf.DebertaV2ForSequenceClassification(_small(tf.DebertaV2Config, num_labels=5)),
    "modernbert": lambda: tf.ModernBertForSequenceClassification(
        _small(tf.ModernBertConfig, num_labels=5, cls_token_id=3, sep_token_id=4, classifier_pooling="cls")
    ),
}


def _small(config: Callable[..., Any], **more: object) -> Any:
    return config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=0,
        **more,
    )


def twice(model: nn.Module, layers: object = "auto", **inputs: Any) -> tuple[Any, Any, Any]:
    """The plain output, and those of a first and a second wrapped call; all rows of the second are hits."""
    with torch.inference_mode():
        plain = model(**inputs)
    with LLMCache.wrap(model, layers=layers) as cache:
        first, second = cache(**inputs), cache(**inputs)
        assert cache.stats().hits == {"exact": len(inputs["input_ids"])}
    return plain, first, second


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", EVERY_BARE)
def test_states_of_padding_come_back(family: str, left: bool) -> None:
    plain, first, second = twice(build(EVERY_BARE[family]), **padded(LENGTHS, left=left))
    assert torch.equal(first.last_hidden_state, plain.last_hidden_state)
    assert torch.equal(second.last_hidden_state, plain.last_hidden_state)


@pytest.mark.parametrize("family", ["bert", "gpt2", "mpnet"])
def test_states_of_padding_come_back_from_a_lower_layer(family: str) -> None:
    plain, _, second = twice(build(BARE[family]), layers=[1], **padded(LENGTHS))
    torch.testing.assert_close(second.last_hidden_state, plain.last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_keys_and_values_of_padding_come_back(family: str, left: bool) -> None:
    model = build(GENERATORS[family])
    plain, _, second = twice(model, use_cache=True, **padded(LENGTHS, left=left))
    assert torch.equal(second.logits, plain.logits)
    for ours, theirs in zip(second.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("head", ["span", "token", "masked", "causal"])
def test_losses_and_logits_of_token_heads_come_back(head: str, left: bool) -> None:
    inputs = padded(LENGTHS, left=left)
    if head == "span":
        inputs |= {"start_positions": torch.tensor([1, 0, 8]), "end_positions": torch.tensor([3, 8, 8])}
    else:
        inputs["labels"] = inputs["input_ids"] % 2 if head == "token" else inputs["input_ids"]
    plain, _, second = twice(build(TOKEN_HEADS[head]), **inputs)
    assert torch.equal(second.loss, plain.loss)
    for name in ("logits", "start_logits", "end_logits"):
        if name in plain:
            assert torch.equal(second[name], plain[name])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_right_padded_prompts_give_the_same_tokens_again(family: str) -> None:
    model = build(GENERATORS[family])
    inputs = padded([8, 5, 3])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **settings)
    with LLMCache.wrap(model) as cache:
        assert torch.equal(model.generate(**inputs, **settings), plain)
        assert torch.equal(model.generate(**inputs, **settings), plain)
        assert cache.stats().hits["exact"] == 3


@pytest.mark.parametrize("family", FIRST_ROW)
def test_heads_that_read_the_first_row_of_left_padded_requests(family: str) -> None:
    inputs = padded(LENGTHS, left=True)
    plain, _, second = twice(build(FIRST_ROW[family]), **inputs)
    assert torch.equal(second.logits, plain.logits)


@pytest.mark.parametrize("family", FIRST_ROW)
def test_another_layout_is_computed_where_the_head_may_read_padding(family: str) -> None:
    model = build(FIRST_ROW[family])
    narrow, wide = padded([9, 6], left=True), padded([12, 6], left=True)
    with torch.inference_mode():
        plain = model(**wide).logits
    with LLMCache.wrap(model) as cache:
        cache(**narrow)
        torch.testing.assert_close(cache(**wide).logits, plain, atol=1e-5, rtol=1e-5)
        assert cache.stats().n_hits == 0


@pytest.mark.parametrize("family", FIRST_ROW)
def test_a_left_padded_request_is_not_served_from_another_one(family: str) -> None:
    model = build(FIRST_ROW[family])
    inputs = padded([9, 6], left=True)
    others = {name: value.clone() for name, value in inputs.items()}
    others["input_ids"][:, -1] += 1
    with torch.inference_mode():
        plain = model(**others).logits
    with LLMCache.wrap(model, tau=0.0) as cache:
        cache(**inputs)
        answer = cache(**others).logits
        assert cache.stats().hits == {"semantic": 1}  # the one without padding
    torch.testing.assert_close(answer[1], plain[1], atol=1e-5, rtol=1e-5)


def test_without_padding_a_request_is_the_same_in_every_batch() -> None:
    model = build(TOKEN_HEADS["span"])
    inputs = padded([6, 4])
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        cache(input_ids=inputs["input_ids"][:1], attention_mask=inputs["attention_mask"][:1])
        cache(input_ids=inputs["input_ids"][:1])
        assert cache.stats().hits == {"exact": 2}


def test_each_layout_is_remembered() -> None:
    model = build(BARE["bert"])
    layouts = [padded([9, 5]), padded([12, 5]), padded([9, 5], left=True)]
    with LLMCache.wrap(model) as cache:
        firsts = [cache(**inputs).last_hidden_state for inputs in layouts]
        seconds = [cache(**inputs).last_hidden_state for inputs in layouts]
        assert [outcome.rung for outcome in cache.last] == ["exact", "exact"]
    assert all(torch.equal(first, second) for first, second in zip(firsts, seconds, strict=True))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_padding_is_made_of_is_part_of_the_layout(family: str) -> None:
    model = build(BARE[family])
    inputs = padded([9, 5])
    other = inputs | {"input_ids": torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], 7)}
    with torch.inference_mode():
        plain = model(**other).last_hidden_state
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        served = cache(**other).last_hidden_state
    torch.testing.assert_close(served, plain, atol=1e-5, rtol=1e-5)


def test_holes_in_the_mask_come_back() -> None:
    inputs = padded([9, 9])
    inputs["attention_mask"][0, [0, 3, 8]] = 0
    plain, _, second = twice(build(BARE["bert"]), **inputs)
    assert torch.equal(second.last_hidden_state, plain.last_hidden_state)
    assert torch.equal(second.pooler_output, plain.pooler_output)


def test_padding_is_kept_on_disk(tmp_path: Any) -> None:
    model = build(TOKEN_HEADS["causal"])
    inputs: dict[str, Tensor] = padded(LENGTHS, left=True)
    with LLMCache.wrap(model) as cache:
        first = cache(**inputs)
        cache.save(tmp_path / "saved")
    with LLMCache.load(model, tmp_path / "saved") as cache:
        second = cache(**inputs)
        assert cache.stats().hits == {"exact": 3}
    assert torch.equal(states(first), states(second))
    assert torch.equal(first.past_key_values.layers[0].keys, second.past_key_values.layers[0].keys)


def test_padding_is_not_kept_where_no_repeat_is_served() -> None:
    model = build(BARE["bert"])
    inputs = {"input_ids": tokens(1, 9), "attention_mask": torch.tensor([[1] * 5 + [0] * 4])}
    sizes = []
    for settings in ({}, {"exact": False, "tau": 0.9}, {"compression": "int8", "tau": 0.9}):
        with LLMCache.wrap(model, **settings) as cache:
            cache(**inputs)
            sizes.append(cache.stats().nbytes)
    assert sizes[0] == 9 * 32 * 4
    assert sizes[1] == 5 * 32 * 4
    assert sizes[2] < 5 * 32 * 4
