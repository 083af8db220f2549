"""Prompts whose states depend on more than their tokens: no other prompt's prefix serves them."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests import tiny_models
from tests.prefix.prompts import branch, run, wrapped
from tests.tiny_models import GENERATORS, build, tokens

ORIGINAL = 24  # tokens beyond which frequencies change
BYPASSED = (None, "rope_by_length", "weights_changed", "inference_weights")
TEXT = tokens(1, 60)

of_each_rope = pytest.mark.parametrize("kind", ["dynamic", "longrope"])


def rotary(kind: str) -> nn.Module:
    """Return a Llama whose RoPE depends on the length."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        parameters |= {"original_max_position_embeddings": ORIGINAL, **factors}
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    return build(
        lambda: tf.LlamaForCausalLM(tiny_models.llama(max_position_embeddings=longest, rope_parameters=parameters))
    )


@of_each_rope
def test_a_prompt_beyond_the_original_length_is_computed(kind: str) -> None:
    model, reference = rotary(kind), rotary(kind)
    # longrope makes frequencies in its first call, which is not stored.
    cache = wrapped(model, tokens(1, 12, seed=9))
    served, long = [], None
    for length in (12, 20, 50, 22, 23, 21):
        expected = run(reference, TEXT[:, :length]).logits
        torch.testing.assert_close(cache(TEXT[:, :length]).logits, expected)
        served.append(cache.last[0].n_prefix)
        # A long call writes other frequencies; the next short call restores them.
        assert cache.last[0].bypassed in ((None,) if length < 22 else BYPASSED)
        if length == 50:
            long = expected
    # Frequencies count as weights: after a long call, short ones first find its frequencies, then their own again.
    assert (served[:3], served[-1]) == ([0, 12, 0], 20)
    assert not torch.allclose(expected, long[:, :21], atol=1e-3)  # else the test shows nothing


def test_positions_decide_where_they_are_given() -> None:
    cache = wrapped(rotary("dynamic"))
    for first in (0, ORIGINAL):
        cache(tokens(1, 8), position_ids=torch.arange(8)[None] + first)
        assert (cache.last[0].bypassed is not None) == (first > 0)


@pytest.mark.parametrize("where", ["layers.1", "embed_tokens", "layers.0.mlp"])
def test_hooks_see_all_tokens(llama: Any, where: str) -> None:
    cache, seen = wrapped(llama, TEXT[:, :16]), []
    handle = llama.model.get_submodule(where).register_forward_hook(lambda _, __, made: seen.append(made.shape[1]))
    cache(TEXT[:, :30])
    assert (seen, cache.last[0].n_prefix) == ([30], 0)
    handle.remove()
    cache(branch(TEXT, 16, 24))
    assert cache.last[0].n_prefix == 16


def test_an_id_below_the_vocabulary_is_left_to_the_model() -> None:
    """With 65,536 tokens, -1 would have the same two bytes as the last id."""
    config = GENERATORS["gpt2"]().config.to_dict() | {"vocab_size": 2**16}
    ids = torch.cat([tokens(1, 7), torch.tensor([[2**16 - 1]])], dim=1)
    cache = wrapped(build(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**config))), ids)
    ids[0, -1] = -1
    with pytest.raises(IndexError):
        cache(branch(ids, 8, 12))
    assert cache.stats().n_prefix_tokens == 0
