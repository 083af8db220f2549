"""Every reason to bypass the cache: counted, logged once with its cure, and computed as the plain model does."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from llmcache import ConfigError, LLMCache, UnsupportedModelError
from llmcache.request.bypass import CURES
from tests.calls.helpers import agree, assert_close, one_layer, pair, run, wrapped
from tests.contract.judge import ask, check_same
from tests.contract.models import SIZES
from tests.tiny_models import (
    BARE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    STRANGERS,
    Make,
    build,
    llama,
    padded,
    tokens,
)

Call = Callable[[nn.Module], Any]
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


def in_training(kind: type[nn.Module]) -> Call:
    """Return a call made while modules of a kind are in training mode."""

    def call(model: nn.Module) -> Any:
        for module in model.modules():
            module.training = isinstance(module, kind)
        torch.manual_seed(5)
        output = ask(model, **X)
        model.eval()
        return output

    return call


def all_states_by_config(model: nn.Module) -> Any:
    model.config.output_hidden_states = True
    output = ask(model, **X)
    model.config.output_hidden_states = False
    return output


def hooked(model: nn.Module) -> Any:
    handle = model.encoder.layer[1].register_forward_hook(lambda *_: None)
    output = ask(model, **X)
    handle.remove()
    return output


BYPASSES: dict[str, tuple[str, Call]] = {
    "gradients": ("gradients", lambda model: model(**X)),
    "training": ("training", in_training(nn.Module)),
    "Monte Carlo dropout": ("training", in_training(nn.Dropout)),
    "attentions": ("output_attentions", asking(output_attentions=True)),
    "hidden states": ("output_hidden_states", asking(output_hidden_states=True)),
    "hidden states by config": ("output_hidden_states", all_states_by_config),
    "4-D mask": ("mask_4d", asking(attention_mask=mask_4d)),
    "embeds": (
        "inputs_embeds",
        asking(inputs_embeds=lambda m: m.embeddings.word_embeddings(X["input_ids"]), input_ids=None),
    ),
    "hooks of others": ("hooked", hooked),
    "unknown argument": ("unknown_argument", asking(something_new=torch.ones(1))),
}


@pytest.mark.parametrize("case", BYPASSES)
def test_bypassed_calls_are_the_plain_models(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, call = BYPASSES[case]
    model = build(BARE["bert"])
    model.set_attn_implementation("eager")  # only eager returns attentions
    plain = call(model)
    with LLMCache.wrap(model) as cache:
        cache(**X)  # entries that could be served wrongly
        with caplog.at_level(logging.DEBUG, logger="llmcache"):
            for _ in range(2):
                check_same(call(model), plain, exact=True)
        stats = cache.stats()
    assert stats.bypassed == {reason: 6}
    assert (stats.n_hits, stats.n_misses, stats.n_requests, stats.errors) == (0, 3, 9, 0)
    told = [message for message in caplog.messages if reason in message]
    assert len(told) == 1
    assert CURES[reason] in told[0]


def test_decode_steps_are_counted_apart_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache = wrapped(GENERATORS["gpt2"])
    with caplog.at_level(logging.INFO, logger="llmcache"):
        cache.model.generate(tokens(2, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    stats = cache.stats()
    assert stats.bypassed == {"decode": 2 * 3}
    assert (stats.n_requests, stats.n_misses) == (2, 2)
    assert caplog.records == []


def test_disabled_is_plain_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone = pair(BARE["bert"])
    with caplog.at_level(logging.INFO, logger="llmcache"), cache.disabled():
        check_same(cache(**X), ask(alone, **X), exact=True)
    assert cache.stats().bypassed == {"disabled": 3}
    assert cache.stats().n_stored == 0
    assert caplog.records == []
    cache(**X)
    assert cache.stats().n_stored == 3


@pytest.mark.slow
def test_compiled_models_run_their_own_graph() -> None:
    torch._dynamo.reset()
    cache, alone = pair(one_layer)
    inputs = padded([6, 6])
    expected = run(alone, **inputs)
    compiled: Any = torch.compile(cache.model, backend="eager")
    cache(**inputs)
    for _ in range(2):
        assert_close(run(compiled, **inputs), expected)
    stats = cache.stats()
    assert stats.bypassed.get("compiled", 0) >= 1
    assert (stats.n_hits, stats.errors) == (0, 0)
    cache.unwrap()
    assert_close(run(compiled, **inputs), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("make", "emptied"), [(BARE["bert"], "input_ids"), (CLASSIFIERS["distilbert"], "attention_mask")]
)
def test_rows_without_content_go_by_alone(make: Make, emptied: str) -> None:
    inputs = padded([6, 3, 5])
    inputs[emptied][1] = 0
    cache, alone = pair(make)
    for _ in range(2):
        agree(cache, alone, **inputs)
    stats = cache.stats()
    assert stats.bypassed == {"no_content": 2}
    assert (stats.n_misses, stats.hits, stats.n_stored, stats.n_requests) == (2, {"exact": 2}, 2, 6)


def test_the_tokenizers_special_tokens_are_no_content() -> None:
    class Tokenizer:
        all_special_ids = (0, 7, 8, 5000)  # 5000 is beyond the vocabulary

    cache = wrapped(BARE["bert"], tokenizer=Tokenizer())
    for _ in range(2):
        cache(input_ids=torch.tensor([[7, 8, 7], [7, 9, 8]]))
    stats = cache.stats()
    assert (stats.bypassed, stats.n_misses, stats.hits, stats.errors) == ({"no_content": 2}, 1, {"exact": 1}, 0)


class QuantizedCache(tf.DynamicCache):
    """Stands for caches whose layers do not keep K/V as given."""


_HYBRID: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
HYBRIDS: dict[str, Make] = {
    "lfm2": lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**_HYBRID | {"layer_types": ["conv", "full_attention"]})),
    "minimax": lambda: tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(**_HYBRID, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    ),
}


def advice(reason: str) -> dict[str, Any]:
    """Return what the cure of a reason says to pass."""
    return {"past_key_values": tf.DynamicCache()} if reason == "kv_cache_kind" else {"use_cache": False}


@pytest.mark.parametrize(
    ("make", "kind", "reason"),
    [
        (STRANGE_GENERATORS["mistral"], None, "kv_cache_kind"),
        (STRANGE_GENERATORS["mistral"], tf.DynamicCache, "kv_cache_kind"),
        (GENERATORS["llama"], QuantizedCache, "kv_cache_kind"),
        *((make, None, "kv_layout") for make in HYBRIDS.values()),
    ],
)
def test_kv_caches_that_cannot_be_filled(make: Make, kind: type[tf.DynamicCache] | None, reason: str) -> None:
    cache, alone = pair(make)
    settings, inputs = {"config": alone.config} if kind is tf.DynamicCache else {}, padded([7, 5])
    for _ in range(2):
        more = [{} if kind is None else {"past_key_values": kind(**settings)} for _ in range(2)]
        found, plain = cache(**inputs, **more[0]), ask(alone, **inputs, **more[1])
        check_same(found.logits, plain.logits, exact=True)
        assert type(found.past_key_values) is type(plain.past_key_values)
    assert cache.stats().bypassed == {reason: 4}
    # What the cure advises works, on the plain model as well.
    for _ in range(2):
        check_same(cache(**inputs, **advice(reason)), ask(alone, **inputs, **advice(reason)), exact=True)
    assert [one.rung for one in cache.last] == ["exact"] * 2


def test_a_causal_classifier_answers_without_the_kv_that_its_head_never_reads() -> None:
    cache, alone = pair(CLASSIFIERS["gpt2"])
    inputs = {"input_ids": tokens(2, 5)}
    plain = ask(alone, **inputs)
    assert list(cache(**inputs)) == [name for name in plain if name != "past_key_values"]
    check_same(cache(**inputs, use_cache=True), plain, exact=True)
    assert cache.stats().bypassed == {"kv_cache_with_pooled_payload": 2}


def test_cross_attention_goes_by() -> None:
    config = BARE["bert"]().config
    config.update({"is_decoder": True, "add_cross_attention": True})
    cache, alone = pair(lambda: tf.BertLMHeadModel(config))
    ids = tokens(2, 4)
    for encoded in (torch.randn(2, 5, 32), torch.randn(2, 5, 32)):
        agree(cache, alone, input_ids=ids, encoder_hidden_states=encoded)
    assert cache.stats().bypassed == {"cross_attention": 4}


def test_recurrent_models_are_refused() -> None:
    config = tf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=3, state_size=4)
    with pytest.raises(UnsupportedModelError, match="keeps no other state"):
        wrapped(lambda: tf.MambaForCausalLM(config))


def test_the_mean_of_a_stranger_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter"):
        wrapped(STRANGERS["megatron"], payload="mean")


def test_weights_made_under_inference_mode_go_by() -> None:
    with torch.inference_mode():
        model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    for _ in range(2):
        cache(**padded([5]))
    assert cache.stats().bypassed == {"inference_weights": 2}


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_the_mean_after_a_final_norm_is_right(family: str) -> None:
    cache, alone = pair(STRANGERS[family], payload="mean")
    inputs = padded([8, 5, 7])
    weights = inputs["attention_mask"].unsqueeze(-1) / inputs["attention_mask"].sum(1)[:, None, None]
    cache(**inputs)
    found, expected = cache(**inputs).last_hidden_state, run(alone, **inputs)
    assert_close((found * weights).sum(1), (expected * weights).sum(1))


def test_an_input_on_another_device_is_the_models_own_affair_and_nothing_is_stored() -> None:
    cache = wrapped(BARE["bert"])
    cache(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))  # the only other device on every machine
    assert (cache.stats().n_stored, cache.stats().bypassed) == (0, {"error": 1})
    for _ in range(2):
        cache(**padded([5]))
    assert cache.stats().hits == {"exact": 1}


def test_what_a_classifiers_entry_does_not_keep_is_not_taken_for_states() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    for _ in range(2):
        hidden = run(cache.model.bert, **padded([5]))
    assert hidden[0, 0].isfinite().all()
    assert hidden[0, 1:].isnan().all()


# -- arguments and settings outside the key ----------------------------------------------------------------------------

PACKED = {"input_ids": tokens(1, 8), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_argument_that_is_false_is_not_one_that_is_absent(family: str) -> None:
    cache, alone = pair(GENERATORS[family])
    inputs = {"input_ids": tokens(2, 20)}
    longer = {"input_ids": torch.cat([inputs["input_ids"], tokens(2, 3, seed=4)], dim=1)}
    assert (run(alone, **inputs) - run(alone, **inputs, is_causal=False)).abs().max() > 0.1
    agree(cache, alone, **inputs, is_causal=False)
    agree(cache, alone, **inputs)
    agree(cache, alone, **inputs, is_causal=False)
    agree(cache, alone, **longer)
    assert cache.stats().bypassed == {"unknown_argument": 4}


def test_an_argument_that_equals_its_default_is_absent() -> None:
    class Scaled(tf.BertModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, scale: float = 1.0, **more: Any) -> Any:
            output = super().forward(input_ids, attention_mask, **more)
            output.last_hidden_state = output.last_hidden_state * scale
            return output

    Scaled.__name__ = "BertModel"
    cache = wrapped(lambda: Scaled(BARE["bert"]().config))
    ids = tokens(1, 6)
    cache(input_ids=ids)
    cache(input_ids=ids, scale=1.0)
    assert cache.stats().hits == {"exact": 1}
    for other in (2.0, 1, True):
        cache(input_ids=ids, scale=other)
    assert cache.stats().bypassed == {"unknown_argument": 3}


def test_tokens_put_elsewhere_in_the_kv_cache_are_bypassed() -> None:
    cache = wrapped(GENERATORS["llama"])
    for order in (torch.arange(6), torch.arange(6), torch.arange(6) + 2, torch.zeros(1, dtype=torch.long)):
        cache(input_ids=tokens(1, 6), cache_position=order)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"unknown_argument": 2})


def test_a_causal_classifier_is_not_run_without_kv_where_positions_would_then_tell_texts_apart() -> None:
    cache, alone = pair(CLASSIFIERS["llama"])
    assert (run(alone, **PACKED) - run(alone, **PACKED, use_cache=False)).abs().max() > 1e-3
    for _ in range(2):
        agree(cache, alone, **PACKED)
        agree(cache, alone, **PACKED, use_cache=False)
        agree(cache, alone, **PACKED, attention_mask=torch.ones_like(PACKED["input_ids"]))
        agree(cache, alone, **PACKED | {"position_ids": torch.arange(8)[None]})
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 6})


def test_one_packed_row_goes_by_alone() -> None:
    cache, alone = pair(GENERATORS["llama"])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
    for _ in range(2):
        agree(cache, alone, input_ids=tokens(2, 6), position_ids=positions, use_cache=False)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 1}, {"packed": 2})


def test_router_logits_that_are_asked_for_by_config_after_warming() -> None:
    sizes = llama(num_hidden_layers=2).to_dict() | {"num_experts_per_tok": 1, "num_local_experts": 2}
    cache = wrapped(lambda: tf.MixtralModel(tf.MixtralConfig(**sizes)))
    inputs = {"input_ids": tokens(1, 6)}
    for _ in range(2):
        cache(**inputs)
    assert cache.stats().hits == {"exact": 1}
    cache.model.config.output_router_logits = True
    assert len(cache(**inputs).router_logits) == 2
    assert len(cache(**inputs, output_router_logits=True).router_logits) == 2
    assert cache(**inputs, output_router_logits=False).get("router_logits") is None
    assert cache.stats().bypassed == {"more_output": 2}


def test_positions_that_are_no_integers_are_computed() -> None:
    cache, alone = pair(GENERATORS["llama"])
    inputs = {"input_ids": tokens(1, 9), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    for _ in range(2):
        for positions in (torch.arange(9.0)[None], torch.arange(9.0)[None] + 0.5):
            served, expected = (model(**inputs, position_ids=positions).past_key_values for model in (cache, alone))
            assert_close(served.layers[0].keys, expected.layers[0].keys)
    assert cache.stats().bypassed == {"input_shape": 4}
