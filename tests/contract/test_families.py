"""Every family and head: the same call gives the plain model's output at every position."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache as once
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, StaticCache

from llmcache import LLMCache, UnsupportedModelError
from tests.contract import judge
from tests.contract.judge import ask, check_same, uncomputed
from tests.contract.models import FAMILIES, SIZES, fresh, inputs_of, plain, rows, wrapped
from tests.tiny_models import VOCABULARY, batch, padded, tokens

LAYOUTS = ("right", "left", "none", "holes")
#: Families tested in every layout; others with padding on either side only.
MAIN = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert", "gpt2", "llama", "t5", "bart")
#: Families whose layers share weights.
REFUSED = ("albert",)
WRAPPED = [family for family in FAMILIES if family not in REFUSED]
#: By kind: families whose heads differ in what they read, or in how they are made.
HEADS = {
    "classifier": ("bert", "distilbert", "electra", "mpnet", "deberta-v2", "modernbert", "gpt2", "llama", "t5", "bart"),
    "token": ("electra", "gpt2"),
    "span": ("distilbert", "llama"),
    "masked": ("bert", "modernbert"),
    "choice": ("electra", "convbert"),
    "sentence": ("bert",),
    "causal": ("opt", "mixtral", "gemma3"),
    "seq2seq": ("t5", "marian"),
}
#: Causal models whose K/V caches or attention masks differ.
CAUSAL = ("gpt2", "opt", "llama", "mistral", "mixtral", "gemma3")

the_first_kind = once(lambda family: FAMILIES[family][1][0])


def arguments(family: str, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Turn K/V off for classifiers on causal models (inside/reuse.md), and for windows, which are not cached."""
    config = plain(family, kind).config
    makes_none = kind == "classifier" and "causal" in FAMILIES[family][1]
    return inputs | {"use_cache": False} if makes_none or getattr(config, "sliding_window", None) else inputs


def check_repeats(family: str, kind: str, *calls: dict[str, Any], at_least: int = 1, exact: bool = True) -> None:
    """Make each call twice: bitwise equal if its rows were run together, as alone; the second time has hits."""
    with wrapped(family, kind) as cache:
        for call in calls:
            inputs = arguments(family, kind, call)
            expected, is_regrouped = ask(plain(family, kind), **inputs), not exact
            for turn in ("cold", "warm"):
                before = cache.stats().n_hits
                output = ask(cache.model, **inputs)
                n_hits = cache.stats().n_hits - before
                is_regrouped |= n_hits not in (0, inputs["input_ids"].shape[:-1].numel())
                check_same(output, expected, exact=not is_regrouped, where=turn)
            assert n_hits >= at_least


@pytest.mark.parametrize("family", WRAPPED)
def test_repeats_are_hits_and_the_same_at_every_position(family: str) -> None:
    """inside/reuse.md: cold is bitwise the plain model, and an exact hit the stored run, padding included.

    An entry is a row of the trunk's output, whatever its layers return (Megatron-BERT, SqueezeBERT).
    """
    kind, layouts = the_first_kind(family), LAYOUTS if family in MAIN else LAYOUTS[:2]
    check_repeats(family, kind, *(inputs_of(family, kind, layout) for layout in layouts), at_least=3)
    inputs = inputs_of(family, kind)
    batches = [rows(inputs, *numbers) for numbers in ([1], [0, 1], [2, 1, 0], [1, 1, 0, 2, 2])]
    check_repeats(family, kind, *batches, exact=False)  # rows are regrouped


@pytest.mark.parametrize(("family", "kind"), [(family, kind) for kind in HEADS for family in HEADS[kind]])
def test_heads_and_their_losses(family: str, kind: str) -> None:
    """inside/reuse.md: an entry holds what the head reads, whatever the padding; a loss is of the call's labels."""
    first, labelled = inputs_of(family, kind), inputs_of(family, kind, labels=True)
    others = {name: value if name in first else value.flip(0) for name, value in labelled.items()}
    check_repeats(family, kind, first, labelled, others, first, labelled)
    check_repeats(family, kind, *(inputs_of(family, kind, layout) for layout in ("left", "none")))
    check_repeats(family, kind, inputs_of(family, kind, "holes"), at_least=0)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_wrapped_is_left_as_it_was(family: str) -> None:
    """docs/index.md: a model is recognised by its layers and served right, or refused and left alone."""
    for kind in FAMILIES[family][1][:2]:
        inputs, model = arguments(family, kind, inputs_of(family, kind)), fresh(family, kind)
        with pytest.raises(UnsupportedModelError):
            LLMCache.wrap(model)
        check_same(ask(model, **inputs), ask(plain(family, kind), **inputs), exact=True)


# -- K/V ---------------------------------------------------------------------------------------------------------------

PROMPTS = padded([7, 4], left=True)


def kv_caches(family: str) -> list[Any]:
    config = plain(family, "causal").config
    return [DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=12)]


@pytest.mark.parametrize(
    ("family", "number"),
    [(family, 0) for family in CAUSAL]
    + [(family, number) for family in ("gpt2", "llama", "gemma3") for number in (1, 2)],
)
def test_a_kv_cache_of_the_callers(family: str, number: int) -> None:
    """docs/prefix.md: K/V goes into the caller's cache, dynamic or static, and the next token goes on from there."""
    model = plain(family, "causal")
    window = getattr(model.config, "sliding_window", None)
    step = {"input_ids": tokens(2, 1, seed=5), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    step["attention_mask"][1, :3] = 0
    expected, kv = [], kv_caches(family)[number]
    for inputs in (PROMPTS, step):
        expected.append(deepcopy(ask(model, **inputs, past_key_values=kv, use_cache=True)))
    with wrapped(family) as cache:
        for _ in range(2):
            kv = kv_caches(family)[number]
            for inputs, output in zip((PROMPTS, step), expected, strict=True):
                found = ask(cache.model, **inputs, past_key_values=kv, use_cache=True)
                assert found.past_key_values is kv
                check_same(found, output, exact=True)
        assert cache.stats().n_hits == 2 or (window is not None and number > 0)  # a window is not cached


STEM = tokens(1, 40)
BRANCHES = [torch.cat([STEM[:, :n], tokens(1, 46 - n, seed=n)], dim=1) for n in (40, 36, 33)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_prompts_that_begin_alike(family: str) -> None:
    """docs/prefix.md: known tokens are not computed again, and every position is the plain model's within 1e-5."""
    model = plain(family, "causal")
    with wrapped(family) as cache:
        for ids in (STEM, *BRANCHES, torch.cat(BRANCHES)):
            check_same(ask(cache.model, input_ids=ids), ask(model, input_ids=ids))
        told = [outcome.n_prefix for outcome in cache.last]
        assert told == [0, 0, 0] or all(told)
        assert cache.stats().hits["prefix"] >= 3 and cache.stats().n_prefix_tokens >= 3 * 32
        inputs = batch([STEM, BRANCHES[0][:, :44]], left=True)
        expected, padding = ask(model, **inputs, logits_to_keep=1), uncomputed(model, inputs)
        check_same(ask(cache.model, **inputs, logits_to_keep=1), expected, padding=padding)


# -- K/V of other kinds ------------------------------------------------------------------------------------------------

_GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
_PROMPTS = {"dim_head": 8, "dim_ff": 48, "prompt_types": 4, "prompt_length": 4, "segment_types": 4}
_CODES = {"codebook_size": 16, "num_codebooks": 2, "audio_token_id": 91, "audio_delay_token_id": 92}
_SHARING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8}
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}

#: By model: class, settings of its config, and the bypass reason of calls that keep K/V, and of those that keep none.
OTHER_KV: dict[str, tuple[Any, Any, tuple[str, str]]] = {
    # Adds prompt tokens of its own: more columns of K/V than states.
    "cpmant": (tf.CpmAntForCausalLM, tf.CpmAntConfig(**SIZES, **_PROMPTS), ("kv_layout", "")),
    # Makes an `EncoderDecoderCache`, and one row of states of two rows of ids.
    "musicgen": (
        tf.MusicgenForCausalLM,
        tf.MusicgenDecoderConfig(**SIZES | {"vocab_size": 95, "pad_token_id": 95}, ffn_dim=48, num_codebooks=2),
        ("kv_layout", "more_output"),
    ),
    # Returns K/V only if `use_cache` is passed, whatever the config says.
    "higgs": (
        tf.HiggsAudioV2ForConditionalGeneration,
        tf.HiggsAudioV2Config(**_GROUPED, **_CODES, audio_stream_bos_id=14, rope_parameters={"rope_theta": 1e4}),
        ("", ""),
    ),
    # Puts the K/V cache that it is passed into an `EncoderDecoderCache`.
    "cross-attention": (tf.GPT2LMHeadModel, tf.GPT2Config(**SIZES, add_cross_attention=True), ("kv_layout", "")),
    # Layers 2 and 3 use the K/V of layers 0 and 1.
    "shared K/V": (
        tf.Gemma4ForCausalLM,
        tf.Gemma4TextConfig(**_GROUPED | _SHARING | _PER_LAYER, global_head_dim=8),
        ("kv_states", ""),
    ),
}


@pytest.mark.parametrize("name", OTHER_KV)
def test_kv_that_is_not_one_column_per_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """docs/prefix.md: K/V is the plain model's, in a cache of its kind; what blocks cannot hold is computed, told once.

    Calls that keep no K/V are served all the same.
    """
    kind, config, reasons = OTHER_KV[name]
    ids = tokens(2, 8)
    calls: list[Callable[[], dict[str, Any]]] = [dict, lambda: {"use_cache": True}, dict, lambda: {"use_cache": False}]
    calls += [lambda: {"past_key_values": DynamicCache()}] * (name != "higgs")
    with judge.wrapped(lambda: kind(config)) as (cache, model):
        for more in calls:
            for turn in ("cold", "warm"):
                expected = ask(model, input_ids=ids, **more())
                check_same(ask(cache.model, input_ids=ids, **more()), expected, exact=True, where=turn)
            reason = reasons["past_key_values" not in expected]
            assert {(one.rung, one.bypassed) for one in cache.last} == {(None, reason) if reason else ("exact", None)}
        told = [one for one in caplog.messages if "is bypassed" in one]
        assert len(told) == len(cache.stats().bypassed) == len({*reasons} - {""})
