"""Every reason to bypass the cache: counted, logged once with its cure, and computed as the plain model does."""

import copy
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
from tests.execution.calls import Make, agree, assert_close, one_layer, pair, quietly, run, wrapped
from tests.tiny_models import (
    BARE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    STRANGERS,
    TOKEN_HEADS,
    build,
    padded,
    tokens,
)

Call = Callable[[nn.Module], Any]
X = padded([6, 4, 5])


def equal(a: Any, b: Any) -> bool:
    """Bit-equal, whatever models return."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "layers"):
        return equal([(kv.keys, kv.values) for kv in a.layers], [(kv.keys, kv.values) for kv in b.layers])
    return bool(a == b)


def asking(**more: Any) -> Call:
    """Makes a call with more arguments; those that are functions are given the model."""

    def call(model: nn.Module) -> Any:
        made = {name: value(model) if callable(value) else value for name, value in more.items()}
        return quietly(model, **{**X, **made})

    return call


def mask_4d(model: nn.Module) -> torch.Tensor:
    embeds = torch.zeros(3, 6, 32)
    return create_bidirectional_mask(config=model.config, inputs_embeds=embeds, attention_mask=X["attention_mask"])


def in_training(kind: type[nn.Module]) -> Call:
    """Makes a call while modules of a kind are in training mode."""

    def call(model: nn.Module) -> Any:
        for module in model.modules():
            module.training = isinstance(module, kind)
        torch.manual_seed(5)
        output = quietly(model, **X)
        model.eval()
        return output

    return call


def all_states_by_config(model: nn.Module) -> Any:
    model.config.output_hidden_states = True
    try:
        return quietly(model, **X)
    finally:
        model.config.output_hidden_states = False


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
    "unknown argument": ("unknown_argument", asking(something_new=torch.ones(1))),
}


@pytest.mark.parametrize("case", BYPASSES)
def test_bypassed_calls_are_the_plain_models(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, call = BYPASSES[case]
    model = build(BARE["bert"])
    model.set_attn_implementation("eager")  # the one that has attentions
    plain = dict(call(model))
    with LLMCache.wrap(model, layers="all") as cache:
        cache(**X)  # entries that could be served wrongly
        with caplog.at_level(logging.DEBUG, logger="llmcache"):
            assert equal(dict(call(model)), plain)
            assert equal(dict(call(model)), plain)
        stats = cache.stats()
    assert stats.bypassed == {reason: 6}
    assert (stats.n_hits, stats.n_misses, stats.n_requests, stats.errors) == (0, 3, 9, 0)
    told = [message for message in caplog.messages if reason in message]
    assert len(told) == 1
    assert CURES[reason] in told[0]


def test_gradients_flow_through_a_wrapped_model() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    cache(**X)
    for model in (cache.model, alone):
        model(**X).logits.sum().backward()
    for ours, theirs in zip(cache.model.parameters(), alone.parameters(), strict=True):
        assert equal(ours.grad, theirs.grad)


def test_calling_the_cache_needs_no_context() -> None:
    cache = wrapped(BARE["bert"])
    assert torch.is_grad_enabled()
    cache(**X)
    cache(X["input_ids"], X["attention_mask"])
    with torch.no_grad():
        output = cache.model(**X).last_hidden_state
    assert not output.is_inference()
    output.add_(1.0)  # a normal tensor, which may be written
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 6}, {})


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("what", ["output_attentions", "output_hidden_states"])
def test_heads_hand_on_what_was_asked_for(family: str, what: str) -> None:
    cache, alone = pair({**CLASSIFIERS, **GENERATORS}[family])
    for model in (cache.model, alone):
        model.set_attn_implementation("eager")
    inputs = {"input_ids": tokens(2, 5)}
    inputs["input_ids"][:, -1] = alone.config.eos_token_id or 3
    if alone.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": inputs["input_ids"], "use_cache": False}
    cache(**inputs)
    assert equal(dict(cache(**inputs, **{what: True})), dict(quietly(alone, **inputs, **{what: True})))
    assert cache.stats().bypassed == {what: 2}


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
    with caplog.at_level(logging.INFO, logger="llmcache"):
        with cache.disabled():
            assert equal(dict(cache(**X)), dict(quietly(alone, **X)))
        with pytest.raises(KeyError), cache.disabled():
            raise KeyError
    assert cache.stats().bypassed == {"disabled": 3}
    assert cache.stats().n_stored == 0
    assert caplog.records == []
    cache(**X)
    assert cache.stats().n_stored == 3


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_compiled_models_run_their_own_graph(when: str) -> None:
    torch._dynamo.reset()
    cache, alone = pair(one_layer)
    inputs = padded([6, 6])
    expected = run(alone, **inputs)
    compiled: Any = torch.compile(cache.model, backend="eager")
    if when == "before wrapping":
        model = cache.unwrap()
        assert_close(run(compiled, **inputs), expected)
        cache = LLMCache.wrap(model)
    cache(**inputs)
    for _ in range(2):
        assert_close(run(compiled, **inputs), expected)
    stats = cache.stats()
    assert stats.bypassed.get("compiled", 0) >= 1
    assert (stats.n_hits, stats.errors) == (0, 0)
    cache.unwrap()
    assert_close(run(compiled, **inputs), expected)
    torch._dynamo.reset()


@pytest.mark.slow
def test_counting_leaves_the_graph_so_fullgraph_says_no() -> None:
    torch._dynamo.reset()
    model = wrapped(one_layer).model
    with torch.inference_mode(), pytest.raises(torch._dynamo.exc.Unsupported, match="_count_compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(**padded([6, 6]))
    torch._dynamo.reset()


@pytest.mark.slow
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
        all_special_ids = (0, 7, 8, 5000)  # also some that the embedding does not have

    cache = wrapped(BARE["bert"], tokenizer=Tokenizer())
    for _ in range(2):
        cache(input_ids=torch.tensor([[7, 8, 7], [7, 9, 8]]))
    stats = cache.stats()
    assert (stats.bypassed, stats.n_misses, stats.hits, stats.errors) == ({"no_content": 2}, 1, {"exact": 1}, 0)


def test_a_mask_with_holes_is_a_request_like_any_other() -> None:
    cache, alone = pair(BARE["bert"])
    ids, mask = tokens(1, 6), torch.tensor([[1, 0, 1, 1, 0, 1]])
    for _ in range(2):
        agree(cache, alone, input_ids=ids, attention_mask=mask)
    agree(cache, alone, input_ids=ids)  # the same tokens, all valid: another request
    stats = cache.stats()
    assert (stats.errors, stats.hits, stats.n_misses) == (0, {"exact": 1}, 2)


class QuantizedCache(tf.DynamicCache):
    """Stands for those whose layers do not keep K/V as given."""


class OffloadedCache(tf.DynamicCache):
    """Likewise, on another device."""


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (STRANGE_GENERATORS["mistral"], tf.DynamicCache),
        (GENERATORS["llama"], QuantizedCache),
        (GENERATORS["llama"], OffloadedCache),
    ],
)
def test_kv_caches_that_cannot_be_filled(make: Make, kind: type[tf.DynamicCache]) -> None:
    cache, alone = pair(make)
    settings = {"config": alone.config} if kind is tf.DynamicCache else {}
    inputs = padded([7, 5])
    plain = quietly(alone, **inputs, past_key_values=kind(**settings))
    for _ in range(2):
        assert equal(dict(cache(**inputs, past_key_values=kind(**settings))), dict(plain))
    assert cache.stats().bypassed == {"kv_cache_kind": 4}


def test_a_sliding_window_model_without_kv_is_served() -> None:
    cache, alone = pair(STRANGE_GENERATORS["mistral"])
    for _ in range(2):
        agree(cache, alone, **padded([9, 7]), use_cache=False)
    assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_classifier_answers_without_the_kv_that_its_head_never_reads(family: str) -> None:
    cache, alone = pair(CLASSIFIERS[family])
    inputs = {"input_ids": tokens(2, 5)}
    plain = quietly(alone, **inputs)
    assert list(cache(**inputs)) == [name for name in plain if name != "past_key_values"]
    assert equal(dict(cache(**inputs, use_cache=True)), dict(plain))
    assert cache.stats().bypassed == {"kv_cache_with_pooled_payload": 2}


def test_cross_attention_goes_by() -> None:
    config = BARE["bert"]().config
    config.update({"is_decoder": True, "add_cross_attention": True})
    cache, alone = pair(lambda: tf.BertLMHeadModel(config))
    ids = tokens(2, 4)
    for encoded in (torch.randn(2, 5, 32), torch.randn(2, 5, 32)):
        agree(cache, alone, input_ids=ids, encoder_hidden_states=encoded)
    assert cache.stats().bypassed == {"cross_attention": 4}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart"])
def test_a_tuple_is_returned_to_who_asks_for_one(family: str) -> None:
    cache, alone = pair(BARE[family])
    inputs = {"input_ids": tokens(2, 5), "return_dict": False}
    cold, warm, expected = cache(**inputs), cache(**inputs), quietly(alone, **inputs)
    assert isinstance(warm, tuple)
    assert len(warm) == len(cold) == len(expected)
    torch.testing.assert_close(warm[0], expected[0])
    assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize("name", ["neox", "falcon", "gpt_bigcode", "qwen3", "mistral"])
def test_decoders_that_no_adapter_names_generate_the_same_tokens(name: str) -> None:
    """Their layers may call the K/V argument anything; a prefill that leaves K/V empty is silently wrong."""
    model = build(STRANGE_GENERATORS[name])
    asked = padded([7, 4], left=True) | {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
    }
    plain = model.generate(**asked)
    try:
        cache = LLMCache.wrap(model)
    except UnsupportedModelError:
        return  # a clear refusal will do
    for _ in range(2):
        assert torch.equal(model.generate(**asked), plain)
    assert cache.stats().bypassed.get("mask_4d", 0) == 0  # a decode step that sees no K/V looks like this
    assert cache.stats().bypassed.get("kv_cache_kind", 0) == (4 if name == "mistral" else 0)


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


@pytest.mark.parametrize("family", STRANGERS)
def test_encoders_that_no_adapter_names_are_right_or_refused(family: str) -> None:
    seen = padded([8, 5, 7], seed=3)
    both = {name: torch.cat([value, padded([6, 8], seed=9)[name]]) for name, value in seen.items()}
    try:
        cache, alone = pair(STRANGERS[family], layers=[0])
    except UnsupportedModelError:
        return  # a clear refusal will do
    cache(**seen)
    agree(cache, alone, **both)


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_the_mean_after_a_final_norm_is_right(family: str) -> None:
    cache, alone = pair(STRANGERS[family], payload="mean")
    inputs = padded([8, 5, 7])
    weights = inputs["attention_mask"].unsqueeze(-1) / inputs["attention_mask"].sum(1)[:, None, None]
    cache(**inputs)
    found, expected = cache(**inputs).last_hidden_state, run(alone, **inputs)
    assert_close((found * weights).sum(1), (expected * weights).sum(1))


@pytest.mark.parametrize("family", ["deberta", "mpnet", "llama", "bert", "t5", "gpt2"])
@pytest.mark.parametrize("n_rows", [6, 16])
def test_a_batch_as_large_as_some_other_size_is_right(family: str, n_rows: int) -> None:
    """A table shared by all rows may have as many rows as the batch: DeBERTa's relative positions have 16."""
    cache, alone = pair(BARE[family], layers=[0])
    ids = tokens(n_rows, 6)
    cache(input_ids=ids[:4])
    agree(cache, alone, input_ids=ids)
    assert cache.stats().hits == {"exact": 4}


def test_new_tokens_after_wrapping_are_served() -> None:
    cache = wrapped(TOKEN_HEADS["token"])
    cache(input_ids=tokens(1, 4))
    cache.model.resize_token_embeddings(100, mean_resizing=False)
    alone = copy.deepcopy(cache.model)
    for _ in range(2):
        agree(cache, alone, input_ids=torch.tensor([[6, 7, 98]]))
    assert (cache.stats().errors, cache.stats().hits) == (0, {"exact": 1})


def test_an_input_on_another_device_is_the_models_own_affair_and_nothing_is_stored() -> None:
    cache = wrapped(BARE["bert"])
    cache(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))  # the one other device that is everywhere
    assert (cache.stats().n_stored, cache.stats().bypassed) == (0, {"error": 1})
    for _ in range(2):
        cache(**padded([5]))
    assert cache.stats().hits == {"exact": 1}


class MeanForSequenceClassification(nn.Module):
    """A class of one's own with a familiar name, whose head reads all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BARE["bert"]()

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.bert(**inputs).last_hidden_state.mean(1)


def test_a_users_own_class_with_a_familiar_name_keeps_all_tokens() -> None:
    cache, alone = pair(MeanForSequenceClassification)
    for _ in range(2):
        assert_close(cache(input_ids=tokens(2, 6)), quietly(alone, input_ids=tokens(2, 6)))
    assert cache.stats().hits == {"exact": 2}


def test_what_a_classifiers_entry_does_not_keep_is_not_taken_for_states() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    cache(**padded([5]))
    hidden = run(cache.model.bert, **padded([5]))
    assert hidden[0, 0].isfinite().all()
    assert hidden[0, 1:].isnan().all()
