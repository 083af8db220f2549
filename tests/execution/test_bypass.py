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


def mask_4d(model: nn.Module) -> torch.Tensor:
    embeds = torch.zeros(3, 6, 32)
    mask = create_bidirectional_mask(config=model.config, inputs_embeds=embeds, attention_mask=X["attention_mask"])
    return torch.ones(3, 1, 6, 6, dtype=torch.bool) if mask is None else mask


def with_gradients(model: nn.Module) -> Any:
    return model(**X)


def in_training(model: nn.Module) -> Any:
    model.train()
    torch.manual_seed(5)
    with torch.no_grad():
        output = model(**X)
    model.eval()
    return output


def quietly(**more: Any) -> Call:
    def call(model: nn.Module) -> Any:
        with torch.inference_mode():
            return model(**{**X, **{name: value(model) if callable(value) else value for name, value in more.items()}})

    return call


def by_config(name: str) -> Call:
    def call(model: nn.Module) -> Any:
        setattr(model.config, name, True)
        try:
            return quietly()(model)
        finally:
            setattr(model.config, name, False)

    return call


def embeds(model: nn.Module) -> torch.Tensor:
    return model.get_input_embeddings()(X["input_ids"])


BYPASSES: dict[str, tuple[str, Call]] = {
    "gradients": ("gradients", with_gradients),
    "training": ("training", in_training),
    "attentions": ("output_attentions", quietly(output_attentions=True)),
    "hidden states": ("output_hidden_states", quietly(output_hidden_states=True)),
    "hidden states by config": ("output_hidden_states", by_config("output_hidden_states")),
    "4-D mask": ("mask_4d", quietly(attention_mask=mask_4d)),
    "embeds": ("inputs_embeds", quietly(inputs_embeds=embeds, input_ids=None)),
    "unknown argument": ("unknown_argument", quietly(something_new=torch.ones(1))),
}


@pytest.mark.parametrize("case", BYPASSES)
def test_bypassed_calls_are_the_plain_models(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, call = BYPASSES[case]
    model = build(BARE["bert"])
    model.set_attn_implementation("eager")  # the one that has attentions
    plain = call(model)
    with LLMCache.wrap(model, layers="all") as cache:
        cache(**X)  # entries that could be served wrongly
        with caplog.at_level(logging.DEBUG, logger="llmcache"):
            first, second = call(model), call(model)
        stats = cache.stats()
    assert stats.bypassed == {reason: 6}
    assert (stats.n_hits, stats.n_misses, stats.n_requests, stats.errors) == (0, 3, 9, 0)
    assert equal(dict(first), dict(plain))
    assert equal(dict(second), dict(plain))
    told = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert len(told) == 1
    assert CURES[reason] in told[0]


def test_gradients_flow_through_a_wrapped_model() -> None:
    model = build(CLASSIFIERS["bert"])
    model(**X).logits.sum().backward()
    plain = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with LLMCache.wrap(model) as cache:
        cache(**X)
        model(**X).logits.sum().backward()
    for ours, theirs in zip(model.parameters(), plain, strict=True):
        assert equal(ours.grad, theirs) if theirs is not None else ours.grad is None


def test_calling_the_cache_needs_no_context() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    assert torch.is_grad_enabled()
    cache(**X)
    cache(X["input_ids"], X["attention_mask"])
    assert cache.stats().bypassed == {}
    assert cache.stats().hits == {"exact": 3}


def test_hits_are_served_under_no_grad_as_in_inference_mode() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    cache(**X)
    with torch.no_grad():
        output = model(**X).last_hidden_state
    assert cache.stats().hits == {"exact": 3}
    assert not output.is_inference()
    output.add_(1.0)  # a normal tensor, which may be written


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("what", ["output_attentions", "output_hidden_states"])
def test_heads_hand_on_what_was_asked_for(family: str, what: str) -> None:
    model = build({**CLASSIFIERS, **GENERATORS}[family])
    model.set_attn_implementation("eager")
    inputs = {"input_ids": tokens(2, 5)}
    inputs["input_ids"][:, -1] = model.config.eos_token_id or 3
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": inputs["input_ids"], "use_cache": False}
    with torch.inference_mode():
        plain = model(**inputs, **{what: True})
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        asked = cache(**inputs, **{what: True})
        assert cache.stats().bypassed == {what: 2}
    assert equal(dict(asked), dict(plain))


def test_decode_steps_are_counted_apart() -> None:
    model = build(GENERATORS["gpt2"])
    with LLMCache.wrap(model) as cache:
        model.generate(tokens(2, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        stats = cache.stats()
    assert stats.bypassed == {"decode": 2 * 3}
    assert (stats.n_requests, stats.n_misses) == (2, 2)


def test_decode_steps_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build(GENERATORS["gpt2"])
    with LLMCache.wrap(model), caplog.at_level(logging.INFO, logger="llmcache"):
        model.generate(tokens(1, 5), max_new_tokens=3, do_sample=False)
    assert caplog.records == []


def test_disabled_is_plain_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build(BARE["bert"])
    plain = quietly()(model)
    cache = LLMCache.wrap(model)
    with caplog.at_level(logging.INFO, logger="llmcache"):
        with cache.disabled():
            assert equal(dict(cache(**X)), dict(plain))
        with pytest.raises(KeyError), cache.disabled():
            raise KeyError
    assert cache.stats().bypassed == {"disabled": 3}
    assert cache.stats().n_stored == 0
    assert caplog.records == []
    cache(**X)
    assert cache.stats().n_stored == 3


@pytest.mark.parametrize("compile_it", ["torch.compile", "model.compile"])
def test_compiled_models_run_their_own_graph(compile_it: str) -> None:
    torch._dynamo.reset()
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 6])
    plain = model.eval()(**inputs).logits.detach()
    cache = LLMCache.wrap(model)
    cache(**inputs)
    if compile_it == "torch.compile":
        compiled: Any = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        compiled = model
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(**inputs).logits, plain)
    stats = cache.stats()
    assert stats.bypassed.get("compiled", 0) >= 1
    assert (stats.n_hits, stats.errors) == (0, 0)
    torch._dynamo.reset()


def test_a_model_compiled_before_wrapping_is_right() -> None:
    torch._dynamo.reset()
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 6])
    compiled = torch.compile(model, backend="eager")
    with torch.inference_mode():
        plain = compiled(**inputs).logits
        with LLMCache.wrap(model) as cache:
            cache(**inputs)
            torch.testing.assert_close(compiled(**inputs).logits, plain)
            torch.testing.assert_close(compiled(**inputs).logits, plain)
        torch.testing.assert_close(compiled(**inputs).logits, plain)
    torch._dynamo.reset()


def test_counting_leaves_the_graph_so_fullgraph_says_no() -> None:
    torch._dynamo.reset()
    model = build(CLASSIFIERS["bert"])
    LLMCache.wrap(model)
    with torch.inference_mode(), pytest.raises(torch._dynamo.exc.Unsupported, match="_count_compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(**padded([6, 6]))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_records_the_model_and_no_stored_state() -> None:
    model = build(CLASSIFIERS["bert"])
    model.config.return_dict = False
    seen, other = tokens(1, 6), tokens(1, 6, seed=9)
    with torch.no_grad():
        plain = model(other)[0]
        LLMCache.wrap(model)
        model(seen)
        traced = torch.jit.trace(model, (seen,), check_trace=False)
        torch.testing.assert_close(traced(other)[0], plain)


def test_rows_without_content_go_by_alone() -> None:
    model = build(BARE["bert"])
    inputs = padded([6, 3, 5])
    inputs["input_ids"][1] = 0
    plain = quietly(**inputs)(model)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        output = cache(**inputs).last_hidden_state
        torch.testing.assert_close(
            output[inputs["attention_mask"].bool()], plain.last_hidden_state[inputs["attention_mask"].bool()]
        )
    stats = cache.stats()
    assert stats.bypassed == {"no_content": 2}
    assert (stats.n_misses, stats.hits, stats.n_stored, stats.n_requests) == (2, {"exact": 2}, 2, 6)


def test_a_row_masked_out_entirely_goes_by_alone() -> None:
    model = build(CLASSIFIERS["distilbert"])
    inputs = padded([6, 4, 5])
    inputs["attention_mask"][1] = 0
    plain = quietly(**inputs)(model).logits
    cache = LLMCache.wrap(model)
    cache(**inputs)
    torch.testing.assert_close(cache(**inputs).logits, plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().bypassed == {"no_content": 2}


def test_the_tokenizers_special_tokens_are_no_content() -> None:
    class Tokenizer:
        all_special_ids = (0, 7, 8)

    cache = LLMCache.wrap(build(BARE["bert"]), tokenizer=Tokenizer())
    cache(input_ids=torch.tensor([[7, 8, 7], [7, 9, 8]]))
    assert cache.stats().bypassed == {"no_content": 1}
    assert cache.stats().n_misses == 1


def test_a_tokenizer_with_ids_beyond_the_embedding_is_harmless() -> None:
    class Tokenizer:
        all_special_ids = (0, 5000)

    cache = LLMCache.wrap(build(BARE["bert"]), tokenizer=Tokenizer())
    cache(**X)
    cache(**X)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 3}, 0)


def test_a_mask_with_holes_is_a_request_like_any_other() -> None:
    model = build(BARE["bert"])
    inputs = {"input_ids": tokens(1, 6), "attention_mask": torch.tensor([[1, 0, 1, 1, 0, 1]])}
    where = inputs["attention_mask"].bool()
    plain = quietly(**inputs)(model).last_hidden_state[where]
    cache = LLMCache.wrap(model)
    cache(**inputs)
    torch.testing.assert_close(cache(**inputs).last_hidden_state[where], plain)
    full = cache(input_ids=inputs["input_ids"]).last_hidden_state  # the same tokens, all valid: another request
    torch.testing.assert_close(full, quietly(input_ids=inputs["input_ids"], attention_mask=None)(model)[0])
    stats = cache.stats()
    assert (stats.errors, stats.hits, stats.n_misses) == (0, {"exact": 2}, 2)


@pytest.mark.parametrize("kind", ["mistral", "quantized", "foreign"])
def test_kv_caches_that_cannot_be_filled(kind: str) -> None:
    model = build(STRANGE_GENERATORS["mistral"] if kind == "mistral" else GENERATORS["llama"])

    class QuantizedCache(tf.DynamicCache):
        """Stands for those whose layers do not keep K/V as given."""

    class OffloadedLayers(tf.DynamicCache):
        offloading = True

    caches: dict[str, Callable[[], Any]] = {
        "mistral": lambda: tf.DynamicCache(config=model.config),
        "quantized": QuantizedCache,
        "foreign": OffloadedLayers,
    }
    inputs = padded([7, 5])
    plain = quietly(**inputs, past_key_values=lambda _: caches[kind]())(model)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        output = cache(**inputs, past_key_values=caches[kind]())
        assert torch.equal(output.logits, plain.logits)
        assert equal(output.past_key_values, plain.past_key_values)
    assert cache.stats().bypassed == {"kv_cache_kind": 4}


def test_a_sliding_window_model_without_kv_is_served() -> None:
    model = build(STRANGE_GENERATORS["mistral"])
    inputs = padded([9, 7])
    where = inputs["attention_mask"].bool()
    plain = quietly(**inputs, use_cache=False)(model).logits[where]
    cache = LLMCache.wrap(model)
    cache(**inputs, use_cache=False)
    torch.testing.assert_close(cache(**inputs, use_cache=False).logits[where], plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 2}


def test_classifiers_that_are_asked_for_kv() -> None:
    model = build(CLASSIFIERS["llama"])
    inputs = padded([6, 4])
    plain = quietly(**inputs, use_cache=True)(model)
    cache = LLMCache.wrap(model)
    cache(**inputs)
    output = cache(**inputs, use_cache=True)
    assert cache.stats().bypassed == {"kv_cache_with_pooled_payload": 2}
    assert equal(output.logits, plain.logits)
    assert equal(output.past_key_values, plain.past_key_values)


def test_cross_attention_goes_by() -> None:
    config = tf.BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
        add_cross_attention=True,
    )
    model = build(lambda: tf.BertLMHeadModel(config))
    one, two = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    inputs = {"input_ids": tokens(2, 4)}
    plain = quietly(**inputs, attention_mask=None, encoder_hidden_states=two)(model).logits
    cache = LLMCache.wrap(model)
    cache(**inputs, encoder_hidden_states=one)
    assert torch.equal(cache(**inputs, encoder_hidden_states=two).logits, plain)
    assert cache.stats().bypassed == {"cross_attention": 4}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart"])
def test_a_tuple_is_returned_to_who_asks_for_one(family: str) -> None:
    model = build(BARE[family])
    inputs = {"input_ids": tokens(2, 5), "return_dict": False}
    with torch.inference_mode():
        plain = model(**inputs)
    cache = LLMCache.wrap(model)
    cold, warm = cache(**inputs), cache(**inputs)
    assert isinstance(warm, tuple)
    assert len(warm) == len(cold) == len(plain)
    torch.testing.assert_close(warm[0], plain[0])
    assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_classifier_answers_without_the_kv_that_its_head_never_reads(family: str) -> None:
    model = build(CLASSIFIERS[family])
    inputs = {"input_ids": tokens(2, 5)}
    plain = quietly(**inputs, attention_mask=None)(model)
    with LLMCache.wrap(model) as cache:
        assert list(cache(**inputs)) == [name for name in plain if name != "past_key_values"]
        assert list(cache(**inputs, use_cache=True)) == list(plain)
        assert cache.stats().bypassed == {"kv_cache_with_pooled_payload": 2}


@pytest.mark.parametrize("name", ["neox", "falcon", "gpt_bigcode", "qwen3"])
def test_decoders_that_no_adapter_names_generate_the_same_tokens(name: str) -> None:
    """Their layers may call the K/V argument anything; a prefill that leaves K/V empty is silently wrong."""
    model = build(STRANGE_GENERATORS[name])
    inputs = padded([7, 4], left=True)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **settings)
    try:
        cache = LLMCache.wrap(model)
    except UnsupportedModelError:
        return  # a clear refusal will do
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **settings), plain)
    assert cache.stats().bypassed.get("mask_4d", 0) == 0  # a decode step that sees no K/V looks like this


def test_recurrent_models_are_refused() -> None:
    config = tf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=3, state_size=4)
    model = build(lambda: tf.MambaForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="keeps no other state"):
        LLMCache.wrap(model)


def test_the_mean_of_a_stranger_is_refused() -> None:
    with pytest.raises(ConfigError, match="adapter"):
        LLMCache.wrap(build(STRANGERS["megatron"]), payload="mean")


def test_weights_made_under_inference_mode_go_by() -> None:
    with torch.inference_mode():
        model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    for _ in range(2):
        cache(**padded([5]))
    assert cache.stats().bypassed == {"inference_weights": 2}


@pytest.mark.parametrize("family", STRANGERS)
def test_encoders_that_no_adapter_names_are_right_or_refused(family: str) -> None:
    model = build(STRANGERS[family])
    seen = padded([8, 5, 7], seed=3)
    both = {name: torch.cat([value, padded([6, 8], seed=9)[name]]) for name, value in seen.items()}
    where = both["attention_mask"].bool()
    plain = quietly(**both)(model).last_hidden_state[where]
    try:
        cache = LLMCache.wrap(model, layers=[0])
    except UnsupportedModelError:
        return  # a clear refusal will do
    with cache:
        cache(**seen)
        torch.testing.assert_close(cache(**both).last_hidden_state[where], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "modernbert"])
def test_the_mean_after_a_final_norm_is_right(family: str) -> None:
    model = build(STRANGERS[family])
    inputs = padded([8, 5, 7])
    weights = inputs["attention_mask"].unsqueeze(-1) / inputs["attention_mask"].sum(1)[:, None, None]
    plain = (quietly(**inputs)(model).last_hidden_state * weights).sum(1)
    with LLMCache.wrap(model, payload="mean") as cache:
        cache(**inputs)
        torch.testing.assert_close((cache(**inputs).last_hidden_state * weights).sum(1), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["deberta", "mpnet", "llama", "bert", "t5", "gpt2"])
@pytest.mark.parametrize("n_rows", [6, 16])
def test_a_batch_as_large_as_some_other_size_is_right(family: str, n_rows: int) -> None:
    """A table shared by all rows may have as many rows as the batch: DeBERTa's relative positions have 16."""
    model = build(BARE[family])
    ids = tokens(n_rows, 6)
    plain = quietly(input_ids=ids, attention_mask=None)(model).last_hidden_state
    cache = LLMCache.wrap(model, layers=[0])
    cache(input_ids=ids[:4])
    torch.testing.assert_close(cache(input_ids=ids).last_hidden_state, plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 4}


def test_new_tokens_after_wrapping_are_served() -> None:
    model = build(TOKEN_HEADS["token"])
    cache = LLMCache.wrap(model)
    cache(input_ids=tokens(1, 4))
    model.resize_token_embeddings(100, mean_resizing=False)
    inputs = {"input_ids": torch.tensor([[6, 7, 98]])}
    plain = quietly(**inputs, attention_mask=None)(model).logits
    for _ in range(2):
        torch.testing.assert_close(cache(**inputs).logits, plain)
    assert (cache.stats().errors, cache.stats().hits) == (0, {"exact": 2})


def test_an_input_on_another_device_is_the_models_own_affair_and_nothing_is_stored() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    cache(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))  # the one other device that is everywhere
    assert (cache.stats().n_stored, cache.stats().bypassed) == (0, {"error": 1})
    inputs = padded([5])
    for _ in range(2):
        cache(**inputs)
    assert cache.stats().hits == {"exact": 1}


def test_a_dropout_layer_that_samples_goes_by() -> None:
    """Monte Carlo dropout: the model is in eval mode, its dropout layers are not."""
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    for _ in range(2):
        cache(**padded([5]))
    assert cache.stats().bypassed == {"training": 2}


def test_a_users_own_class_with_a_familiar_name_keeps_all_tokens() -> None:
    class MeanForSequenceClassification(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = build(BARE["bert"])

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return self.bert(**inputs).last_hidden_state.mean(1)

    model = MeanForSequenceClassification().eval()
    inputs = {"input_ids": tokens(2, 6)}
    with torch.inference_mode():
        plain = model(**inputs)
    cache = LLMCache.wrap(model)
    cache(**inputs)
    torch.testing.assert_close(cache(**inputs), plain)
    assert cache.stats().hits == {"exact": 2}


def test_what_a_classifiers_entry_does_not_keep_is_not_taken_for_states() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    cache(**padded([5]))
    with torch.inference_mode():
        hidden = model.bert(**padded([5])).last_hidden_state
    assert hidden[0, 0].isfinite().all()
    assert hidden[0, 1:].isnan().all()
