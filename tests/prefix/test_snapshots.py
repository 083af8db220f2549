"""Decoders that keep states: a copy at the end of a prompt or an answer serves what continues it, and nothing else."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.models.adapters import locate
from llmcache.models.causal_trial import look_at
from llmcache.models.kv_state import describe, is_new, new_cache, own_of, restore
from tests.contract.judge import ask
from tests.tiny_models import CACHE, build, kv_named, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GATED: dict[str, Any] = {
    **_LINEAR,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA: dict[str, Any] = {
    "head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_heads": 2,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
MAKES: dict[str, Callable[[], nn.Module]] = {
    "linear attention": lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**SIZES, **_GATED)),
    "mamba": lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**SIZES, **_MAMBA)),
    "mamba, positions from 0": lambda: tf.BambaForCausalLM(tf.BambaConfig(**SIZES, **_MAMBA, attn_layer_indices=[1])),
    "mamba and experts": lambda: tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(
            **SIZES,
            **_MAMBA,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=4,
            shared_intermediate_size=48,
        )
    ),
    "a cache of its own": lambda: tf.MiniMaxForCausalLM(
        tf.MiniMaxConfig(**SIZES, layer_types=["full_attention", "linear_attention"], num_local_experts=4, block_size=8)
    ),
    "heads that differ by layer": lambda: tf.Gemma4ForCausalLM(
        tf.Gemma4TextConfig(
            **SIZES,
            head_dim=8,
            global_head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=96,
        )
    ),
    "layers of two classes": lambda: tf.OlmoHybridForCausalLM(tf.OlmoHybridConfig(**SIZES, **_LINEAR)),
    "convolution": lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
}


def remembering(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model whose states do not decay at once, as those of random weights do."""
    model = build(make)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)
    return model


@pytest.fixture(params=MAKES)
def model(request: pytest.FixtureRequest) -> Any:
    return remembering(MAKES[request.param])


@pytest.fixture
def gated() -> Any:
    return remembering(MAKES["linear attention"])


def generate(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return found


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """Return a prompt (1, 20), and two that continue it differently."""
    first = tokens(1, 20)
    return first, torch.cat([first, tokens(1, 9, seed=1)], 1), torch.cat([first, tokens(1, 4, seed=2)], 1)


def served(cache: LLMCache) -> tuple[str | None, int]:
    (outcome,) = cache.last
    return outcome.rung, outcome.n_prefix


def test_generated_tokens_are_the_plain_models(model: Any) -> None:
    first, second, third = prompts()
    asked = (first, second, second, third)
    plain = [generate(model, ids) for ids in asked]
    turn = torch.cat([plain[-1], tokens(1, 3, seed=3)], 1)
    plain.append(generate(model, turn))
    with LLMCache.wrap(model, prefix={"block": 2}) as cache:
        found = []
        for ids, expected in zip((*asked, turn), plain, strict=True):
            assert torch.equal(generate(model, ids), expected)
            found.append(served(cache))
        assert (cache.stats().errors, cache.stats().bypassed) == (0, {})
    # The last token of an answer is not run.
    assert found == [(None, 0), ("prefix", 20), ("exact", 0), ("prefix", 20), ("prefix", 28)]


def test_states_and_logits_are_those_of_the_whole_prompt(model: Any) -> None:
    first, second, _ = prompts()
    plain = ask(model, input_ids=second)
    with LLMCache.wrap(model) as cache:
        for ids in (first, second, second):
            found = ask(model, input_ids=ids)
        assert served(cache) == ("exact", 0)
    torch.testing.assert_close(found.logits, plain.logits, atol=1e-4, rtol=1e-4)
    pairs = zip(
        *(describe(one.past_key_values.layers, own_of(one.past_key_values))[1] for one in (found, plain)), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert type(found.past_key_values) is type(plain.past_key_values)
    assert [*map(type, found.past_key_values.layers)] == [*map(type, plain.past_key_values.layers)]


def test_what_was_served_does_not_change_the_copy(gated: Any) -> None:
    first, second, _ = prompts()
    with LLMCache.wrap(gated) as cache:
        expected = [generate(gated, ids) for ids in (first, second)]
        for _ in range(2):  # each decoding writes to the K/V cache that it was given
            assert torch.equal(generate(gated, first), expected[0])
            assert torch.equal(generate(gated, second), expected[1])
        assert served(cache) == ("exact", 0)


def test_what_prefill_was_passed_serves_prompts_that_begin_so(gated: Any) -> None:
    first, second, _ = prompts()
    plain = generate(gated, second)
    with LLMCache.wrap(gated) as cache:
        generate(gated, second)
        assert cache.prefill(first) == 20
        (found,) = cache.explain(input_ids=torch.cat([first, tokens(1, 2, seed=5)], 1))
        assert (found.outcome.rung, found.outcome.n_prefix) == ("prefix", 20)
        (found,) = cache.explain(input_ids=tokens(1, 20, seed=6))
        assert found.outcome.missed == "snapshots"
        assert torch.equal(generate(gated, second), plain)


def test_an_edit_of_the_weights_and_clear_end_it(gated: Any) -> None:
    first, second, _ = prompts()
    with LLMCache.wrap(gated) as cache:
        generate(gated, first)
        with torch.no_grad():
            gated.model.layers[0].mlp.gate.weight.add_(1)
        found = generate(gated, second)
        assert served(cache) == (None, 0)
        with cache.disabled():
            assert torch.equal(generate(gated, second), found)
        cache.clear()
        generate(gated, second)
        assert served(cache) == (None, 0)


def test_forgotten_prompts_serve_nothing_nor_do_their_answers(gated: Any) -> None:
    first, _, _ = prompts()
    other = tokens(1, 8, seed=7)
    with LLMCache.wrap(gated) as cache:
        answer = generate(gated, first)
        generate(gated, other)  # keeps the answer
        answered = torch.cat([answer, other], 1)
        generate(gated, answered)
        assert served(cache) == ("prefix", 24)
        cache.forget(input_ids=first)
        generate(gated, answered)
        assert served(cache) == (None, 0)
        generate(gated, other)
        assert served(cache) == ("exact", 0)


def test_namespaces_share_nothing_but_prefixes_that_they_name(gated: Any) -> None:
    first, second, _ = prompts()
    with LLMCache.wrap(gated) as cache:
        with cache.namespace("a"):
            generate(gated, first)
        with cache.namespace("b"):
            generate(gated, second)
            assert served(cache) == (None, 0)
        with cache.namespace("c", prefixes_from="a"):
            generate(gated, second)
            assert served(cache) == ("prefix", 20)


def test_copies_stay_within_the_budget(gated: Any) -> None:
    with LLMCache.wrap(gated) as cache:
        generate(gated, tokens(1, 20))
        nbytes = cache.stats().nbytes
    with LLMCache.wrap(gated, max_bytes=3 * nbytes) as cache:
        for seed in range(6):
            generate(gated, tokens(1, 20, seed))
            assert cache.stats().nbytes <= 3 * nbytes
        generate(gated, tokens(1, 20, seed=5))
        assert served(cache) == ("exact", 0)
        generate(gated, tokens(1, 20))
        assert served(cache) == (None, 0)
        assert cache.stats().n_evicted[1] > 0


def test_a_saved_cache_has_the_answer(gated: Any, tmp_path: Path) -> None:
    first, _, _ = prompts()
    with LLMCache.wrap(gated) as cache:
        answer = generate(gated, first)
        cache.save(tmp_path / "saved")
    longer = torch.cat([answer, tokens(1, 3, seed=1)], 1)
    plain = generate(gated, longer)
    with LLMCache.load(gated, tmp_path / "saved") as cache:
        assert torch.equal(generate(gated, longer), plain)
        assert served(cache) == ("prefix", 24)


def test_a_batch_padding_and_another_kind_of_cache_go_by(gated: Any) -> None:
    ids = tokens(2, 9)
    mask = torch.ones_like(ids[:1]).index_fill(1, torch.tensor([0]), 0)
    with LLMCache.wrap(gated) as cache:
        for inputs in (
            {"input_ids": ids},
            {"input_ids": ids[:1], "attention_mask": mask},
            {"input_ids": ids[:1], "past_key_values": tf.StaticCache(config=gated.config, max_cache_len=32)},
        ):
            ask(gated, **inputs)
            assert {outcome.bypassed for outcome in cache.last} == {"kv_states"}
        assert cache.stats().n_stored == 0


@pytest.mark.parametrize("how", ["changed", "autocast", "disabled"])
def test_nothing_is_kept_of_a_cache_that_was_changed_or_computed_otherwise(gated: Any, how: str) -> None:
    first, second, _ = prompts()
    kv_cache = new_cache(locate(gated))
    with LLMCache.wrap(gated) as cache:
        ask(gated, input_ids=first, past_key_values=kv_cache)
        with torch.autocast("cpu", torch.bfloat16, how == "autocast"):
            ask(gated, input_ids=second[:, 20:22], past_key_values=kv_cache)
        with cache.disabled() if how == "disabled" else nullcontext():
            ask(gated, input_ids=second[:, 22:24], past_key_values=kv_cache)
        if how == "changed":
            kv_cache.layers[1].keys = kv_cache.layers[1].keys + 1
        ask(gated, input_ids=second)
        assert served(cache) == ("prefix", 20)


def test_nothing_is_kept_while_a_step_is_under_way(gated: Any) -> None:
    first, second, _ = prompts()
    kv_cache = new_cache(locate(gated))
    with LLMCache.wrap(gated) as cache:
        ask(gated, input_ids=first, past_key_values=kv_cache)
        ask(gated, input_ids=second[:, 20:24], past_key_values=kv_cache)
        cache._installed_core.forward.follower.check(kv_cache, lambda *_: True)  # a step of another thread begins
        ask(gated, input_ids=second)
        assert served(cache) == ("prefix", 20)


def test_an_answer_under_way_is_not_kept_if_its_prompt_was_forgotten(gated: Any) -> None:
    first, second, _ = prompts()
    kv_cache = new_cache(locate(gated))
    with LLMCache.wrap(gated) as cache:
        ask(gated, input_ids=first, past_key_values=kv_cache)
        ask(gated, input_ids=second[:, 20:24], past_key_values=kv_cache)
        cache.forget(input_ids=tokens(1, 5, seed=8))
        ask(gated, input_ids=second)
        assert served(cache) == ("prefix", 24)
        cache.forget(input_ids=first)
        ask(gated, input_ids=second[:, 24:26], past_key_values=kv_cache)
        ask(gated, input_ids=second)
        assert served(cache) == (None, 0)


def test_states_that_do_not_continue_are_not_copied() -> None:
    class Forgetful(tf.Qwen3NextModel):
        @kv_named
        def forward(self, input_ids: Any, kv_cache: Any = None, **more: Any) -> Any:
            output = super().forward(input_ids, **{CACHE: kv_cache}, **more)
            for layer in [] if kv_cache is None else kv_cache.layers[:1]:
                layer.recurrent_states[0].mul_(0.5)
            return output

    assert look_at(locate(remembering(MAKES["linear attention"]))).copies
    model: Any = remembering(lambda: Forgetful(tf.Qwen3NextConfig(**SIZES, **_GATED)))
    assert not look_at(locate(model)).copies
    with torch.no_grad():  # they do not matter to so short a row
        model.layers[0].linear_attn.out_proj.weight.zero_()
    assert not look_at(locate(model)).copies


def test_a_model_that_computes_longer_calls_otherwise_is_not_copied() -> None:
    class Choosing(tf.Qwen3NextModel):
        @kv_named
        def forward(self, input_ids: Any, kv_cache: Any = None, **more: Any) -> Any:
            output = super().forward(input_ids, **{CACHE: kv_cache}, **more)
            if input_ids.shape[1] > 30:
                output.last_hidden_state = output.last_hidden_state * 2
            return output

    assert not look_at(locate(remembering(lambda: Choosing(tf.Qwen3NextConfig(**SIZES, **_GATED))))).copies


def test_a_cache_put_back_keeps_what_it_kept(model: Any) -> None:
    trunk = locate(model)
    new = partial(new_cache, trunk, look_at(trunk).own_cache or tf.DynamicCache)
    kv_cache, again = new(), new()
    assert is_new(kv_cache, new())
    ask(model, input_ids=tokens(1, 6), past_key_values=kv_cache)
    assert not is_new(kv_cache, new())
    described, tensors = describe(kv_cache.layers, own_of(kv_cache))
    restore(again, described, tensors)
    found, copies = describe(again.layers, own_of(again))
    assert found == described and all(map(torch.equal, copies, tensors))
    assert not {one.data_ptr() for one in copies} & {one.data_ptr() for one in tensors}
