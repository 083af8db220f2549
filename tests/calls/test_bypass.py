"""Every reason to bypass the cache: counted, logged once with its cure, and computed as the plain model does."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from llmcache import LLMCache
from llmcache.request.bypass import CURES
from tests.calls.helpers import agree, pair, rungs, wrapped
from tests.contract.judge import ask, check_same
from tests.contract.models import SIZES
from tests.tiny_models import (
    BARE,
    CACHE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    Make,
    build,
    llama,
    padded,
    tokens,
)

Call = Callable[[Any], Any]
X = padded([6, 4, 5])


def asking(**more: Any) -> Call:
    """Return a call with more arguments; functions among them get the model."""

    def call(model: nn.Module) -> Any:
        made = {name: value(model) if callable(value) else value for name, value in more.items()}
        return ask(model, **{**X, **made})

    return call


def mask_4d(model: nn.Module) -> torch.Tensor:
    embeds = torch.zeros(3, 6, 32)
    return create_bidirectional_mask(config=model.config, inputs_embeds=embeds, attention_mask=X["attention_mask"])


def embeddings(model: Any) -> torch.Tensor:
    return model.embeddings.word_embeddings(X["input_ids"])  # type: ignore[no-any-return]


def during(begin: Call, end: Call) -> Call:
    """Return a call made between two edits of the model."""

    def call(model: nn.Module) -> Any:
        begin(model)
        torch.manual_seed(5)
        output = ask(model, **X)
        end(model)
        return output

    return call


def in_training(kind: type[nn.Module]) -> Call:
    """Return a call made while modules of a kind are in training mode."""
    return during(lambda model: [part.train() for part in model.modules() if type(part) is kind], nn.Module.eval)


def by_config(name: str) -> Call:
    """Return a call made while the config asks for more output."""
    return during(*(lambda model, is_on=is_on: setattr(model.config, name, is_on) for is_on in (True, False)))


class QuantizedCache(tf.DynamicCache):
    """Stands for caches whose layers do not keep K/V as given."""


def eager() -> nn.Module:
    return tf.BertModel(tf.BertConfig(**SIZES, attn_implementation="eager"))  # only eager returns attentions


def attending() -> nn.Module:
    return tf.BertLMHeadModel(tf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True))


def experts() -> nn.Module:
    sizes = llama(num_hidden_layers=2).to_dict() | {"num_experts_per_tok": 1, "num_local_experts": 2}
    return tf.MixtralModel(tf.MixtralConfig(**sizes))


def hybrid() -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**sizes))


def recurrent() -> nn.Module:
    return tf.MambaForCausalLM(tf.MambaConfig(**SIZES, state_size=8))


LLAMA = GENERATORS["llama"]
RESTARTING = {"attention_mask": None, "position_ids": torch.arange(3).repeat(3, 2)}
BYPASSES: dict[str, tuple[str, Make, Call]] = {
    "gradients": ("gradients", eager, lambda model: model(**X)),
    "training": ("training", eager, in_training(tf.BertModel)),
    "Monte Carlo dropout": ("training", eager, in_training(nn.Dropout)),
    "attentions": ("output_attentions", eager, asking(output_attentions=True)),
    "hidden states": ("output_hidden_states", eager, asking(output_hidden_states=True)),
    "hidden states by config": ("output_hidden_states", eager, by_config("output_hidden_states")),
    "router logits by config": ("more_output", experts, by_config("output_router_logits")),
    "4-D mask": ("mask_4d", eager, asking(attention_mask=mask_4d)),
    "embeds": ("inputs_embeds", eager, asking(inputs_embeds=embeddings, input_ids=None)),
    "hooks of others": (
        "hooked",
        eager,
        during(
            lambda model: model.encoder.layer[1].register_forward_hook(lambda *_: None),
            lambda model: model.encoder.layer[1]._forward_hooks.clear(),
        ),
    ),
    "unknown argument": ("unknown_argument", eager, asking(something_new=torch.ones(1))),
    "False, where None means True": ("unknown_argument", LLAMA, asking(is_causal=False)),
    "positions between integers": ("input_shape", LLAMA, asking(position_ids=torch.arange(6.0)[None] + 0.5)),
    "several texts a row": ("packed", LLAMA, asking(**RESTARTING, use_cache=False)),
    # Its head reads no K/V, but it must not be run without: positions would then tell no texts apart.
    "several texts a row, classified": ("packed", CLASSIFIERS["llama"], asking(**RESTARTING)),
    "K/V for a classifier": ("kv_cache_with_pooled_payload", CLASSIFIERS["gpt2"], asking(use_cache=True)),
    "token types": ("token_types", GENERATORS["gpt2"], asking(token_type_ids=torch.ones(3, 6, dtype=torch.long))),
    "padding that the head reads": (
        "head_reads_padding",
        CLASSIFIERS["bert"],
        asking(attention_mask=X["attention_mask"].index_fill(1, torch.tensor([0]), 0)),
    ),
    "cross attention": ("cross_attention", attending, asking(encoder_hidden_states=torch.ones(3, 5, 32))),
    "another kind of K/V cache": ("kv_cache_kind", LLAMA, asking(past_key_values=lambda _: QuantizedCache())),
    "K/V of a window and fixed length": (
        "kv_cache_kind",
        STRANGE_GENERATORS["mistral"],
        asking(past_key_values=lambda model: tf.StaticCache(config=model.config, max_cache_len=32)),
    ),
    "states, of several rows": ("kv_states", hybrid, lambda model: ask(model, **X).logits),
}
if CACHE == "cache":  # before transformers 5.24, Mamba's layers call their states otherwise: it is not wrapped
    BYPASSES["states alone"] = (
        "kv_layout",
        recurrent,
        lambda model: ask(model, **X, cache=tf.DynamicCache(config=model.config)).logits,
    )


@pytest.mark.parametrize("case", BYPASSES)
def test_bypassed_calls_are_the_plain_models(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, make, call = BYPASSES[case]
    model = build(make)
    plain = call(model)
    with LLMCache.wrap(model) as cache, caplog.at_level(logging.DEBUG, logger="llmcache"):
        ask(model, **X)  # entries that could be served wrongly
        n_first = cache.stats().n_misses
        for _ in range(2):
            check_same(call(model), plain, exact=True)
        stats = cache.stats()
    assert stats.bypassed == {reason: 9 - n_first}
    assert (stats.n_hits, stats.n_misses, stats.n_requests, stats.errors) == (0, n_first, 9, 0)
    (told,) = [message for message in caplog.messages if reason in message]
    assert CURES[reason] in told


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        cache = wrapped(eager)
    for _ in range(2):
        cache(**X)
    assert cache.stats().bypassed == {"inference_weights": 6}


def test_steps_and_disabled_calls_are_counted_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone = pair(GENERATORS["gpt2"])
    with caplog.at_level(logging.INFO, logger="llmcache"):
        with cache.disabled():
            check_same(cache(**X), ask(alone, **X), exact=True)
        assert (cache.stats().bypassed, cache.stats().n_stored) == ({"disabled": 3}, 0)
        cache.model.generate(tokens(2, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    stats = cache.stats()
    assert (stats.bypassed, stats.n_decode_steps, stats.n_misses) == ({"disabled": 3}, 2 * 3, 2)
    assert caplog.records == []


def test_a_causal_classifier_answers_without_the_kv_that_its_head_never_reads() -> None:
    cache, alone = pair(CLASSIFIERS["gpt2"])
    assert list(cache(**X)) == [name for name in ask(alone, **X) if name != CACHE]


# -- rows that go by alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "emptied"), [(BARE["bert"], "input_ids"), (CLASSIFIERS["distilbert"], "attention_mask")]
)
def test_rows_without_content(make: Make, emptied: str) -> None:
    inputs = padded([6, 3, 5])
    inputs[emptied][1] = 0
    cache, alone = pair(make)
    for _ in range(2):
        agree(cache, alone, **inputs)
        assert [outcome.bypassed for outcome in cache.last] == [None, "no_content", None]
        assert all(outcome.key for outcome in cache.last)
    assert (rungs(cache), cache.stats().n_stored) == (["exact", None, "exact"], 2)


def test_the_tokenizers_special_tokens_are_no_content() -> None:
    class Tokenizer:
        all_special_ids = (0, 7, 8, 5000)  # 5000 is beyond the vocabulary

    cache = wrapped(BARE["bert"], tokenizer=Tokenizer())
    cache(input_ids=torch.tensor([[7, 8, 7], [7, 9, 8]]))
    assert [outcome.bypassed for outcome in cache.last] == ["no_content", None]


def test_one_packed_row() -> None:
    cache, alone = pair(LLAMA)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
    for _ in range(2):
        agree(cache, alone, input_ids=tokens(2, 6), position_ids=positions, use_cache=False)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 2})


# -- arguments and settings outside the key ----------------------------------------------------------------------------


class Scaled(tf.BertModel):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, scale: float = 1.0, **more: Any) -> Any:
        output = super().forward(input_ids, attention_mask, **more)
        output.last_hidden_state = output.last_hidden_state * scale
        return output


ORDER = torch.arange(6)


@pytest.mark.parametrize(
    ("make", "name", "default", "others"),
    [
        (lambda: Scaled(tf.BertConfig(**SIZES)), "scale", 1.0, (2.0, 1, True)),
        (LLAMA, "cache_position", ORDER, (ORDER + 2, torch.zeros(1, dtype=torch.long))),
    ],
    ids=["a number", "the order of tokens"],
)
def test_an_argument_that_equals_its_default_is_absent(make: Make, name: str, default: Any, others: Any) -> None:
    cache = wrapped(make)
    cache(input_ids=tokens(1, 6))
    for value in (default, *others):
        cache(input_ids=tokens(1, 6), **{name: value})
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"unknown_argument": len(others)})


def test_an_input_on_another_device_is_the_models_own_affair_and_nothing_is_stored() -> None:
    cache = wrapped(BARE["bert"])
    cache(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))  # the only other device on every machine
    assert (cache.stats().n_stored, cache.stats().bypassed) == (0, {"error": 1})
    for _ in range(2):
        cache(**padded([5]))
    assert rungs(cache) == ["exact"]
