"""Prompts whose states hang on more than their tokens: no prefix of another one serves them."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import GENERATORS, PAD, build, llama, tokens

ORIGINAL = 24  # tokens from which frequencies change
LONG = ("dynamic", "longrope")


def rotary(kind: str) -> nn.Module:
    """A Llama whose RoPE hangs on the length."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        parameters |= {
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        }
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    return tf.LlamaForCausalLM(llama(max_position_embeddings=longest, rope_parameters=parameters))


def wrapped(model: nn.Module) -> LLMCache:
    return LLMCache.wrap(model, prefix_block=4, auto_bypass=False)


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(ids, **more).logits
    return found


@pytest.mark.parametrize("kind", LONG)
def test_a_prompt_beyond_the_original_length_is_computed(kind: str) -> None:
    model, reference = build(lambda: rotary(kind)), build(lambda: rotary(kind))
    cache = wrapped(model)
    text = tokens(1, 60)
    served = []
    logits(model, tokens(1, 12, seed=9))  # longrope makes frequencies in its first call, which is not stored
    for length in (12, 20, 50, 22, 23, 21):
        torch.testing.assert_close(logits(model, text[:, :length]), logits(reference, text[:, :length]))
        served.append(cache.last[0].n_prefix)
        # The first short call after the long one may put the frequencies back while it runs, and is not stored then.
        expected = ["rope_by_length"] if length >= ORIGINAL else [None, "weights_changed"] if length == 22 else [None]
        assert cache.last[0].bypassed in expected
    # Short calls after a long one find its frequencies, which are weights like others, and then their own anew.
    assert (served[:3], served[-1]) == ([0, 12, 0], 20)


@pytest.mark.parametrize("kind", LONG)
def test_frequencies_do_change_there(kind: str) -> None:
    """Else the test above would show nothing."""
    model, text = build(lambda: rotary(kind)), tokens(1, 60)
    short, long = logits(model, text[:, :12]), logits(model, text)
    assert not torch.allclose(short, long[:, :12], atol=1e-3)


@pytest.mark.parametrize("kind", LONG)
def test_a_short_row_beside_a_long_one_is_not_stored(kind: str) -> None:
    model = build(lambda: rotary(kind))
    cache = wrapped(model)
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    cache(ids, attention_mask=mask)
    assert {outcome.bypassed for outcome in cache.last} == {"rope_by_length"}
    assert cache.stats().n_stored == 0


def test_positions_decide_where_they_are_given() -> None:
    model, ids = build(lambda: rotary("dynamic")), tokens(1, 8)
    cache = wrapped(model)
    cache(ids, position_ids=torch.arange(8)[None] + ORIGINAL)
    assert cache.last[0].bypassed == "rope_by_length"
    cache(ids, position_ids=torch.arange(8)[None])
    assert cache.last[0].bypassed is None


def test_tokens_that_see_later_ones_share_no_prefix() -> None:
    model, reference = (build(GENERATORS["llama"]) for _ in range(2))
    cache, text = wrapped(model), tokens(1, 30)
    for one in (model, reference):
        one.config.is_causal = False
    for length in (16, 30):
        torch.testing.assert_close(logits(model, text[:, :length]), logits(reference, text[:, :length]))
        assert cache.last[0].n_prefix == 0
    assert cache.stats().n_blocks == 0


@pytest.mark.parametrize("where", ["layers.1", "embed_tokens", "layers.0.mlp"])
def test_hooks_see_all_tokens(where: str) -> None:
    model = build(GENERATORS["llama"])
    cache, text = wrapped(model), tokens(1, 30)
    cache(text[:, :16])
    seen = []
    handle = model.model.get_submodule(where).register_forward_hook(lambda _, __, made: seen.append(made.shape[1]))
    cache(text)
    assert (seen, cache.last[0].n_prefix) == ([30], 0)
    handle.remove()
    cache(torch.cat([text[:, :16], tokens(1, 8, seed=1)], dim=1))
    assert cache.last[0].n_prefix == 16


def test_an_id_below_the_vocabulary_is_left_to_the_model() -> None:
    """With 65,536 tokens, -1 would take as many bytes as the last one."""

    def wide() -> nn.Module:
        small: Any = GENERATORS["gpt2"]()
        return tf.GPT2LMHeadModel(tf.GPT2Config(**{**small.config.to_dict(), "vocab_size": 2**16}))

    model = build(wide)
    cache = wrapped(model)
    ids = torch.cat([tokens(1, 7), torch.tensor([[2**16 - 1]])], dim=1)
    cache(ids)
    ids[0, -1] = -1
    with pytest.raises(IndexError):
        cache(torch.cat([ids, tokens(1, 4, seed=1)], dim=1))
    assert cache.stats().n_prefix_tokens == 0


def test_a_prefill_in_chunks() -> None:
    model, reference = (build(GENERATORS["llama"]) for _ in range(2))
    cache, text = wrapped(model), tokens(1, 30)
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD, "prefill_chunk_size": 7}
    for length in (20, 28):
        ids = text[:, :length]
        assert torch.equal(model.generate(ids, **settings), reference.generate(ids, **settings))
    assert cache.stats().errors == 0
