"""Families that are not in the table, and those with windows: prefixes serve, and K/V is what the caller asked for."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from llmcache.models import causal_trial
from tests.prefix.prompts import branch, close, fail_once, run, wrapped
from tests.tiny_models import DECODER, STRANGE_GENERATORS, Make, batch, build, tokens

KINDS = ["sliding_attention", "full_attention"] * 2


def gemma() -> nn.Module:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8, layer_types=KINDS))


def gpt_oss() -> nn.Module:
    more = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.GptOssForCausalLM(tf.GptOssConfig(**DECODER, **more, sliding_window=8, layer_types=KINDS))


def gpt_neo() -> nn.Module:
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
    return tf.GPTNeoForCausalLM(tf.GPTNeoConfig(**DECODER, num_layers=4, num_heads=4, **kinds))


FAMILIES: dict[str, Make] = {
    "window": STRANGE_GENERATORS["mistral"],
    "windows": gemma,
    "windows and sinks": gpt_oss,
    "window of columns": gpt_neo,
    "distances": lambda: tf.BloomForCausalLM(tf.BloomConfig(**DECODER)),
    "positions from the mask": lambda: tf.OPTForCausalLM(tf.OPTConfig(**DECODER, ffn_dim=48, word_embed_proj_dim=32)),
    "layer_past": STRANGE_GENERATORS["neox"],
    "pairs": lambda: tf.CohereForCausalLM(tf.CohereConfig(**DECODER)),
    "layers without positions": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**DECODER, no_rope_layers=[1, 0, 1, 0])),
}
KNOWN = tokens(1, 24)
GOES_ON = [branch(KNOWN, 20, length, seed=length) for length in (26, 23, 30)]


def check_kv(found: Any, expected: Any) -> None:
    """Check that two K/V caches hold the same, by layers of the same kind."""
    assert [type(one) for one in found.layers] == [type(one) for one in expected.layers]
    assert found.get_seq_length() == expected.get_seq_length()
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        close(mine.keys, theirs.keys, atol=1e-4)
        close(mine.values, theirs.values, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_served_from_a_prefix_and_its_kv_is_the_models_own(name: str) -> None:
    model, plain = build(FAMILIES[name]), build(FAMILIES[name])
    cache = wrapped(model, KNOWN)
    for kv_cache in (None, tf.DynamicCache, lambda: tf.DynamicCache(config=model.config)):  # type: ignore[call-arg]
        for ids in (*GOES_ON, KNOWN):
            expected, found = (
                run(one, ids, past_key_values=None if kv_cache is None else kv_cache()) for one in (plain, cache)
            )
            assert cache.last[0].n_prefix >= 20 or cache.last[0].rung == "exact"
            close(found.logits, expected.logits, atol=1e-4)
            check_kv(found.past_key_values, expected.past_key_values)


def test_windows_that_were_not_all_filled_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = wrapped(build(gemma), KNOWN), build(gemma)
    kv_cache = tf.DynamicCache(config=model.config)  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        fail_once(patch, DynamicSlidingWindowLayer, "update", 2, KeyboardInterrupt)
        run(cache, GOES_ON[0], past_key_values=kv_cache)
    assert kv_cache.get_seq_length() == 0
    expected = run(model, GOES_ON[0], past_key_values=tf.DynamicCache(config=model.config))  # type: ignore[no-untyped-call]
    close(run(cache, GOES_ON[0], past_key_values=kv_cache).logits, expected.logits, atol=1e-4)
    check_kv(kv_cache, expected.past_key_values)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_goes_on_as_without_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_trial, "MOST_OF_FORWARD", 0)  # a forward of so small a model costs more than all tokens
    model, plain = build(FAMILIES[name]), build(FAMILIES[name])
    cache = wrapped(model)
    inputs = batch([*GOES_ON, KNOWN], left=True)
    for _ in range(2):
        made = [one.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None) for one in (plain, model)]
        assert torch.equal(*made)
    assert cache.stats().n_prefix_tokens > 0
    assert not cache.stats().bypassed and not cache.stats().errors


def test_segments_that_cost_a_forward_each_are_run_only_if_that_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}
    for of_forward in (2**16, 0):
        monkeypatch.setattr(causal_trial, "MOST_OF_FORWARD", of_forward)
        monkeypatch.setattr(causal_trial, "perf_counter", lambda: 0.0)  # no token takes any time: a forward costs most
        model = build(FAMILIES["distances"])
        cache = wrapped(model)
        model.generate(**batch(GOES_ON, left=True), max_new_tokens=1)
        made[of_forward] = cache.stats().n_prefix_tokens
    assert made[2**16] == 0 < made[0]
