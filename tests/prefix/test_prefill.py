"""`cache.prefill`: what prompts begin with is computed and held before they come."""

from typing import Any

import pytest
import torch

from llmcache import ConfigError, LLMCache
from tests.prefix.prompts import BLOCK, wrapped
from tests.serving.served import byte_tokenizer, decoder
from tests.tiny_models import CLASSIFIERS, build, tokens

PER_TOKEN = (2 * 4 * 2 * 8 + 32) * 4  # bytes in the Llama: keys and values of 4 layers and 2 heads, and a state
SYSTEM = [{"role": "system", "content": "where is my card"}]


@pytest.mark.parametrize("length", [3, 2 * BLOCK, 2 * BLOCK + 2])
def test_a_prompt_that_was_prefilled_serves_those_that_begin_with_it(llama: Any, length: int) -> None:
    cache, stem = wrapped(llama), tokens(1, length)
    assert cache.prefill(stem[0]) == length
    ids = torch.cat([stem, tokens(1, 5, seed=1)], dim=1)
    with cache.disabled():
        expected = cache(ids).logits
    assert torch.allclose(cache(ids).logits, expected, atol=1e-5)
    assert cache.last[0].n_prefix == (length if length >= BLOCK else 0)
    assert cache.prefill([stem[0].tolist(), ids[0].tolist()]) == length + length + 5
    cache(stem)
    assert cache.last[0].rung == "exact"


def test_texts_and_chats_are_tokenised_as_prompts_are() -> None:
    known = byte_tokenizer()
    with LLMCache.wrap(decoder(), tokenizer=known, prefix={"block": BLOCK}) as cache:
        text, chat = (
            list(known(one)["input_ids"]) for one in ("the cash", known.apply_chat_template(SYSTEM, tokenize=False))
        )
        assert cache.prefill("the cash") == len(text) and cache.prefill(SYSTEM) == len(chat)
        assert cache.prefill(["the cash", SYSTEM]) == len(text) + len(chat)
        asked = known.apply_chat_template([*SYSTEM, {"role": "user", "content": "why"}], return_dict=False)
        cache(input_ids=torch.tensor([asked]))
        assert cache.last[0].n_prefix == len(chat)


def test_what_does_not_fit_is_not_counted_and_a_namespace_has_its_own(llama: Any) -> None:
    cache = wrapped(llama, max_bytes=9 * PER_TOKEN)
    assert cache.prefill(tokens(1, 10)[0]) == 2 * BLOCK
    with cache.namespace("other"):
        cache(tokens(1, 10))
    assert cache.last[0].n_prefix == 0


def test_what_cannot_be_prefilled_is_refused(llama: Any) -> None:
    cache = wrapped(llama)
    for prompts, told in (("a text", "tokenizer"), ([], None), ([[]], "at least one token")):
        if told is None:
            assert cache.prefill(prompts) == 0
            continue
        with pytest.raises(ConfigError, match=told):
            cache.prefill(prompts)
    with cache.disabled(), pytest.raises(ConfigError, match="disabled"):
        cache.prefill([1, 2])
    cache.unwrap()
    for model, settings in ((llama, {"prefix": False}), (build(CLASSIFIERS["bert"]), {})):
        with LLMCache.wrap(model, **settings) as other, pytest.raises(ConfigError, match="holds no prefixes"):
            other.prefill([1, 2])
