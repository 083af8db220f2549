"""The same call twice gives the same output at every place, bit for bit: padding, its K/V and losses included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache
from tests.reuse.prompts import close, run
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, STRANGERS, TOKEN_HEADS, VOCABULARY, build, padded, tokens

LENGTHS = [9, 4, 7]
EVERY_BARE = BARE | {family: STRANGERS[family] for family in ("qwen3", "modernbert")}
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 5,
}
# Classifiers that read the first row whatever the mask says, and whose entries keep every row.
FIRST_ROW: dict[str, Callable[[], nn.Module]] = {
    "mpnet": lambda: tf.MPNetForSequenceClassification(tf.MPNetConfig(**SMALL)),
    "deberta": lambda: tf.DebertaForSequenceClassification(tf.DebertaConfig(**SMALL, type_vocab_size=0)),
    "deberta_v2": lambda: tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**SMALL)),
    "modernbert": lambda: tf.ModernBertForSequenceClassification(
        tf.ModernBertConfig(**SMALL, cls_token_id=3, sep_token_id=4, classifier_pooling="cls")
    ),
}

on_both_sides = pytest.mark.parametrize("left", [False, True])
of_each_first_row = pytest.mark.parametrize("family", FIRST_ROW)


def twice(model: nn.Module, layers: object = "auto", **inputs: Any) -> tuple[Any, Any]:
    """The plain output, and that of a second wrapped call, whose rows are all hits; the first one, cold, is plain."""
    plain = run(model, **inputs)
    with LLMCache.wrap(model, layers=layers) as cache:
        assert torch.equal(run(model, **inputs)[0], plain[0])
        second = run(model, **inputs)
        n_rows = len(inputs["input_ids"])
        assert (cache.stats().hits, cache.stats().n_misses) == ({"exact": n_rows}, n_rows)
    assert torch.equal(run(model, **inputs)[0], plain[0])
    return plain, second


@pytest.mark.slow
@on_both_sides
@pytest.mark.parametrize("family", EVERY_BARE)
def test_states_of_padding_come_back(family: str, left: bool) -> None:
    plain, second = twice(build(EVERY_BARE[family]), **padded(LENGTHS, left=left))
    assert torch.equal(second.last_hidden_state, plain.last_hidden_state)


@pytest.mark.parametrize("family", ["bert", "gpt2", "mpnet"])
def test_states_of_padding_come_back_from_a_lower_layer(family: str) -> None:
    plain, second = twice(build(BARE[family]), layers=[1], **padded(LENGTHS))
    close(second.last_hidden_state, plain.last_hidden_state)


@on_both_sides
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_keys_and_values_of_padding_come_back(family: str, left: bool) -> None:
    plain, second = twice(build(GENERATORS[family]), use_cache=True, **padded(LENGTHS, left=left))
    assert torch.equal(second.logits, plain.logits)
    for ours, theirs in zip(second.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@on_both_sides
@pytest.mark.parametrize("head", ["span", "token", "masked", "causal"])
def test_losses_and_logits_of_token_heads_come_back(head: str, left: bool) -> None:
    inputs = padded(LENGTHS, left=left)
    if head == "span":
        inputs |= {"start_positions": torch.tensor([1, 0, 8]), "end_positions": torch.tensor([3, 8, 8])}
    else:
        inputs["labels"] = inputs["input_ids"] % 2 if head == "token" else inputs["input_ids"]
    plain, second = twice(build(TOKEN_HEADS[head]), **inputs)
    compared = {"loss", "logits", "start_logits", "end_logits"} & {*plain}
    assert len(compared) == (3 if head == "span" else 2)
    assert all(torch.equal(second[name], plain[name]) for name in compared)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_right_padded_prompts_give_the_same_tokens_again(family: str) -> None:
    model = build(GENERATORS[family])
    inputs = {**padded([8, 5, 3]), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs), plain)
        assert cache.stats().hits["exact"] == 3


@of_each_first_row
def test_heads_that_read_the_first_row_of_left_padded_requests(family: str) -> None:
    model, inputs = build(FIRST_ROW[family]), padded(LENGTHS, left=True)
    plain = run(model, **inputs).logits
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            close(cache(**inputs).logits, plain)
        assert cache.stats().hits == {"exact": 1}  # an entry keeps one row, which is padding in the others


@of_each_first_row
def test_another_layout_is_computed_where_the_head_may_read_padding(family: str) -> None:
    model, wide = build(FIRST_ROW[family]), padded([12, 6], left=True)
    plain = run(model, **wide).logits
    with LLMCache.wrap(model) as cache:
        cache(**padded([9, 6], left=True))
        close(cache(**wide).logits, plain)
        assert cache.stats().n_hits == 0


@of_each_first_row
def test_a_left_padded_request_is_not_served_from_another_one(family: str) -> None:
    model, inputs = build(FIRST_ROW[family]), padded([9, 6], left=True)
    others = inputs | {"input_ids": inputs["input_ids"].clone()}
    others["input_ids"][:, -1] += 1
    plain = run(model, **others).logits
    with LLMCache.wrap(model, tau=0.0) as cache:
        cache(**inputs)
        close(cache(**others).logits[1], plain[1])
        assert cache.stats().hits == {"semantic": 1}  # the one without padding


def test_without_padding_a_request_is_the_same_in_every_batch() -> None:
    inputs = padded([6, 4])
    with LLMCache.wrap(build(TOKEN_HEADS["span"])) as cache:
        cache(**inputs)
        cache(input_ids=inputs["input_ids"][:1], attention_mask=inputs["attention_mask"][:1])
        cache(input_ids=inputs["input_ids"][:1])
        assert cache.stats().hits == {"exact": 2}


def test_each_layout_is_remembered() -> None:
    layouts = [padded([9, 5]), padded([12, 5]), padded([9, 5], left=True)]
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        first, second = ([cache(**inputs).last_hidden_state for inputs in layouts] for _ in range(2))
        assert all(map(torch.equal, first, second))
        assert [outcome.rung for outcome in cache.last] == ["exact", "exact"]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_padding_is_made_of_is_part_of_the_layout(family: str) -> None:
    model, inputs = build(BARE[family]), padded([9, 5])
    other = inputs | {"input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 7)}
    plain = run(model, **other).last_hidden_state
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        close(cache(**other).last_hidden_state, plain)


def test_where_equal_tokens_stand_is_part_of_the_key() -> None:
    """Both rows have the tokens 9 and 7, and are the same up to the last of them, padding included."""
    model = build(CLASSIFIERS["gpt2"])  # reads the last token, and is given no positions
    layouts = [
        {"input_ids": torch.tensor([[9, 9, 7]]), "attention_mask": torch.tensor([mask])}
        for mask in ([0, 1, 1], [1, 0, 1])
    ]
    plain = [run(model, **inputs).logits for inputs in layouts]
    with LLMCache.wrap(model) as cache:
        for inputs, expected in zip(layouts, plain, strict=True):
            assert torch.equal(cache(**inputs).logits, expected)
        assert (cache.stats().n_misses, cache.stats().n_hits) == (2, 0)


def test_holes_in_the_mask_come_back() -> None:
    inputs = padded([9, 9])
    inputs["attention_mask"][0, [0, 3, 8]] = 0
    plain, second = twice(build(BARE["bert"]), **inputs)
    assert torch.equal(second.last_hidden_state, plain.last_hidden_state)
    assert torch.equal(second.pooler_output, plain.pooler_output)


def test_padding_is_kept_on_disk(tmp_path: Path) -> None:
    model, inputs = build(TOKEN_HEADS["masked"]), padded(LENGTHS, left=True)
    with LLMCache.wrap(model) as cache:
        first = cache(**inputs)
        cache.save(tmp_path)
    with LLMCache.load(model, tmp_path) as cache:
        second = cache(**inputs)
        assert cache.stats().hits == {"exact": 3}
    assert torch.equal(first.logits, second.logits)


@pytest.mark.parametrize(
    ("settings", "n_kept"), [({}, 9), ({"exact": False, "tau": 0.9}, 5), ({"compression": "int8", "tau": 0.9}, None)]
)
def test_padding_is_not_kept_where_no_repeat_is_served(settings: dict[str, Any], n_kept: int | None) -> None:
    with LLMCache.wrap(build(BARE["bert"]), **settings) as cache:
        cache(input_ids=tokens(1, 9), attention_mask=torch.tensor([[1] * 5 + [0] * 4]))
        if n_kept is None:
            assert cache.stats().nbytes < 5 * 32 * 4
        else:
            assert cache.stats().nbytes == n_kept * 32 * 4
