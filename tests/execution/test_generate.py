"""`generate()` on a wrapped model gives the tokens of the plain one, whatever way it decodes."""

from typing import Any

import pytest
import torch

from llmcache import LLMCache
from tests.tiny_models import GENERATORS, STRANGE_GENERATORS, build, padded, tokens

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "beams": {"num_beams": 3},
    "beams, several answers": {"num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "repetition penalty": {"repetition_penalty": 1.3},
}


def generate(model: Any, **more: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(**{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **more})


@pytest.mark.slow
@pytest.mark.parametrize("family", GENERATORS)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_cold_and_warm(family: str, way: str) -> None:
    model = build(GENERATORS[family])
    inputs = padded([7, 4], left=True)
    plain = generate(model, **inputs, **WAYS[way])
    cache = LLMCache.wrap(model)
    assert torch.equal(generate(model, **inputs, **WAYS[way]), plain)
    before = cache.stats().n_hits
    assert torch.equal(generate(model, **inputs, **WAYS[way]), plain)
    assert cache.stats().errors == 0
    assert cache.stats().n_hits > before
    assert "mask_4d" not in cache.stats().bypassed  # generate() makes one itself for a static cache


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("layers", ["last", [1, 3]])
def test_one_known_and_one_new_prompt(family: str, way: str, layers: Any) -> None:
    model = build(GENERATORS[family])
    inputs = padded([7, 4], left=True)
    plain = generate(model, **inputs, **WAYS[way])
    for known in range(2):
        with LLMCache.wrap(model, layers=layers) as cache:
            generate(model, **{name: value[known : known + 1] for name, value in inputs.items()}, **WAYS[way])
            before = cache.stats().n_hits
            assert torch.equal(generate(model, **inputs, **WAYS[way]), plain)
            # The shorter prompt alone has no padding, which GPT-2's first forward cannot tell from other positions.
            assert known or cache.stats().n_hits > before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompt_lookup(family: str) -> None:
    model = build(GENERATORS[family])
    ids = torch.cat([tokens(1, 5)] * 3, dim=1)
    plain = generate(model, input_ids=ids)
    assert torch.equal(generate(model, input_ids=ids, prompt_lookup_num_tokens=3), plain)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        assert torch.equal(generate(model, input_ids=ids, prompt_lookup_num_tokens=3), plain)
    assert cache.stats().n_hits == 1


@pytest.mark.parametrize("wrapped", ["model", "assistant", "both"])
def test_assisted_generation(wrapped: str) -> None:
    model, assistant = build(GENERATORS["llama"]), build(GENERATORS["llama"], seed=1)
    ids = tokens(1, 6)
    plain = generate(model, input_ids=ids)
    caches = [
        LLMCache.wrap(which)
        for name, which in (("model", model), ("assistant", assistant))
        if wrapped in (name, "both")
    ]
    for _ in range(2):
        assert torch.equal(generate(model, input_ids=ids, assistant_model=assistant), plain)
    assert all(cache.stats().n_hits >= 1 for cache in caches)


@pytest.mark.parametrize("wrapped", ["model", "assistant", "both"])
def test_assisted_generation_from_a_known_prefix(wrapped: str) -> None:
    model, assistant = build(GENERATORS["llama"]), build(GENERATORS["llama"], seed=1)
    known = tokens(1, 24)
    ids = torch.cat([known[:, :20], tokens(1, 4, seed=9)], dim=1)
    plain = generate(model, input_ids=ids)
    caches = [
        LLMCache.wrap(which, prefix_block=4)
        for name, which in (("model", model), ("assistant", assistant))
        if wrapped in (name, "both")
    ]
    for prompt in (known, ids):
        made = generate(model, input_ids=prompt, assistant_model=assistant)
    assert torch.equal(made, plain)
    assert all(cache.stats().hits["prefix"] >= 1 for cache in caches)


def test_drafts_of_an_early_exit() -> None:
    """transformers lowers `config.num_hidden_layers` for the time of a draft: other layers, so nothing is served."""
    model = build(GENERATORS["llama"])
    known = tokens(1, 24)
    prompts = [known, torch.cat([known[:, :20], tokens(1, 4, seed=9)], dim=1), known]
    plain = [generate(model, input_ids=prompt) for prompt in prompts]
    cache = LLMCache.wrap(model, prefix_block=4)
    for prompt, expected in zip(prompts, plain, strict=True):
        assert torch.equal(generate(model, input_ids=prompt, assistant_early_exit=2), expected)
    assert cache.stats().bypassed["other_depth"] >= len(prompts)
    assert set(cache.stats().hits) == {"exact", "prefix"}
    assert cache.stats().errors == 0


def test_a_conversation_that_goes_on() -> None:
    """The second turn extends K/V that came from a hit."""
    model = build(GENERATORS["gpt2"])
    prompt, more = tokens(2, 6), tokens(2, 3, seed=9)

    def turns() -> torch.Tensor:
        with torch.inference_mode():
            first = model(prompt, use_cache=True)
            return model(more, past_key_values=first.past_key_values, use_cache=True).logits

    plain = turns()
    cache = LLMCache.wrap(model)
    for _ in range(2):
        torch.testing.assert_close(turns(), plain, atol=1e-5, rtol=1e-5)
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 2}, {"decode": 4})


def test_a_static_cache_is_used_again() -> None:
    from transformers import StaticCache

    model = build(GENERATORS["llama"])
    prompt, step = tokens(2, 6), tokens(2, 1, seed=9)
    kv = StaticCache(config=model.config, max_cache_len=12)

    def turn() -> torch.Tensor:
        with torch.inference_mode():
            kv.reset()
            model(prompt, past_key_values=kv, use_cache=True)
            return model(step, past_key_values=kv, use_cache=True).logits.clone()

    plain = turn()
    cache = LLMCache.wrap(model)
    for _ in range(3):
        torch.testing.assert_close(turn(), plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 4}


def test_sliding_windows_generate_plainly() -> None:
    model = build(STRANGE_GENERATORS["mistral"])
    inputs = padded([9, 6], left=True)
    plain = generate(model, **inputs)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        assert torch.equal(generate(model, **inputs), plain)
    assert cache.stats().bypassed["kv_cache_kind"] == 4
    assert cache.stats().n_hits == 0


@pytest.mark.parametrize("family", GENERATORS)
def test_generate_in_bfloat16(family: str) -> None:
    model = build(GENERATORS[family]).to(torch.bfloat16)
    inputs = padded([7, 4], left=True)
    plain = generate(model, **inputs)
    cache = LLMCache.wrap(model)
    for _ in range(2):
        assert torch.equal(generate(model, **inputs), plain)
    assert cache.stats().n_hits >= 2
