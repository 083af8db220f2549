"""What an entry keeps is what the head reads, for other lengths and paddings too."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import LLMCache
from tests.models.checks import repeated
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, tokens


def mean(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def repadded(inputs: dict[str, torch.Tensor], more: int) -> dict[str, torch.Tensor]:
    return {name: nn.functional.pad(value, (0, more)) for name, value in inputs.items()}


@pytest.mark.parametrize("family", BARE)
def test_the_mean_of_valid_tokens_for_any_padding(family: str) -> None:
    model = build(BARE[family])
    inputs = padded([7, 4, 5])
    plain = mean(model, inputs)
    cache = LLMCache.wrap(model, payload="mean")
    torch.testing.assert_close(mean(model, inputs), plain)
    for more in (0, 1, 5):
        torch.testing.assert_close(mean(model, repadded(inputs, more)), plain, atol=1e-5, rtol=1e-5)
    fresh = {name: torch.cat([value, padded([7], seed=40)[name]]) for name, value in inputs.items()}
    torch.testing.assert_close(mean(model, fresh)[:3], plain, atol=1e-5, rtol=1e-5)
    stats = cache.stats()
    assert (stats.hits, stats.nbytes) == ({"exact": 12}, 4 * 32 * 4)


@pytest.mark.parametrize("family", ["t5", "llama", "gpt2"])
def test_the_mean_of_a_similar_request_of_another_length(family: str) -> None:
    model = build(BARE[family])
    cache = LLMCache.wrap(model, payload="mean", tau=-1.0)
    first = mean(model, padded([7], seed=1))
    torch.testing.assert_close(mean(model, padded([4], seed=2)), first, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"semantic": 1}


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_cls_for_any_padding(family: str) -> None:
    model = build(CLASSIFIERS[family])
    inputs = padded([7, 4])
    with torch.inference_mode():
        plain = model(**inputs).logits
    cache = LLMCache.wrap(model)
    for more in (0, 3):
        torch.testing.assert_close(cache(**repadded(inputs, more)).logits, plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize("payload", ["cls", "sequence"])
def test_cls_with_left_padding_is_never_wrong(payload: str) -> None:
    stats = repeated(build(CLASSIFIERS["bert"]), padded([7, 4], left=True), payload=payload, tau=0.9999)
    if payload == "cls":
        assert stats.bypassed == {"head_reads_padding": 2}


def test_the_pooler_of_a_bare_model_with_left_padding() -> None:
    repeated(build(BARE["bert"]), padded([7, 4], left=True), read=lambda output: output.pooler_output)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("left", [False, True])
def test_last_with_either_padding(family: str, left: bool) -> None:
    stats = repeated(build(CLASSIFIERS[family]), padded([7, 4], left=left))
    assert (stats.hits, stats.nbytes) == ({"exact": 2}, 2 * 32 * 4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("payload", ["last", "sequence"])
def test_a_padding_token_at_the_end_of_a_text_is_read_as_the_head_reads_it(family: str, payload: str) -> None:
    """pad == eos: the head takes the last token that is not eos, the mask says the eos is valid."""
    model = build(CLASSIFIERS[family])
    inputs = padded([7, 4])
    inputs["input_ids"][0, -1] = model.config.pad_token_id
    stats = repeated(model, inputs | {"use_cache": False}, payload=payload, tau=0.9999)
    if payload == "last":
        assert (stats.bypassed, stats.hits) == ({"head_reads_padding": 2}, {"exact": 1})


@pytest.mark.parametrize("payload", ["last", "sequence"])
def test_a_masked_token_that_the_head_reads(payload: str) -> None:
    """Padded with another id than the configured one: the head reads a place that the mask leaves out."""
    inputs = padded([7, 4])
    inputs["input_ids"][1, 4:] = 9
    repeated(build(CLASSIFIERS["gpt2"]), inputs | {"use_cache": False}, payload=payload)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("payload", ["last", "sequence"])
@pytest.mark.filterwarnings("ignore")
def test_without_a_padding_token_one_row_at_a_time(family: str, payload: str) -> None:
    model = build(CLASSIFIERS[family])
    model.config.pad_token_id = None
    for inputs in (padded([5]), repadded(padded([5], seed=3), 2)):
        repeated(model, inputs | {"use_cache": False}, payload=payload)


def test_multiple_choice_rows_are_requests_of_their_own() -> None:
    model = build(lambda: tf.BertForMultipleChoice(build(BARE["bert"]).config))
    assert repeated(model, {"input_ids": tokens(6, 5).reshape(2, 3, 5)}).hits == {"exact": 6}


def test_sequence_entries_of_decoders_come_with_and_without_kv() -> None:
    model = build(BARE["llama"])
    ids = tokens(1, 6)
    with torch.inference_mode():
        plain = model(ids, use_cache=True)
    cache = LLMCache.wrap(model)
    cache(ids, use_cache=False)
    for use_cache, hits in ((True, 0), (True, 1), (False, 2), (True, 3)):
        output = cache(ids, use_cache=use_cache)
        torch.testing.assert_close(output.last_hidden_state, plain.last_hidden_state)
        assert (output.past_key_values is None) == (not use_cache)
        assert cache.stats().n_hits == hits


@pytest.mark.parametrize("compression", ["fp16", "int8", "none"])
def test_compressed_answers_stay_close(compression: str) -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([7, 4])
    cache = LLMCache.wrap(model, tau=1.0 - 1e-6, compression=compression)
    plain = cache(**inputs).logits
    torch.testing.assert_close(cache(**inputs).logits, plain, atol=0.05, rtol=0.05)
    assert set(cache.stats().hits) == {"exact" if compression == "none" else "semantic"}
