"""`generate()` on a wrapped model gives the tokens of the plain one, whatever way it decodes."""

from typing import Any

import pytest
import torch
from transformers import StaticCache

from llmcache import LLMCache
from tests.execution.calls import assert_close, pair, run
from tests.tiny_models import GENERATORS, build, padded, tokens

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
PADDED = padded([7, 4], left=True)
KNOWN = tokens(1, 24)
GOES_ON = torch.cat([KNOWN[:, :20], tokens(1, 4, seed=9)], dim=1)


def generate(model: Any, **more: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(**{"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **more})


@pytest.mark.slow
@pytest.mark.parametrize("family", GENERATORS)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same_cold_and_warm(family: str, way: str) -> None:
    cache, alone = pair(GENERATORS[family])
    plain = generate(alone, **PADDED, **WAYS[way])
    assert torch.equal(generate(cache.model, **PADDED, **WAYS[way]), plain)
    before = cache.stats().n_hits
    assert torch.equal(generate(cache.model, **PADDED, **WAYS[way]), plain)
    assert cache.stats().errors == 0
    assert cache.stats().n_hits > before
    assert "mask_4d" not in cache.stats().bypassed  # generate() makes one itself for a static cache


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("layers", ["last", [1, 3]])
@pytest.mark.parametrize("known", range(2))
def test_one_known_and_one_new_prompt(family: str, way: str, layers: Any, known: int) -> None:
    cache, alone = pair(GENERATORS[family], layers=layers)
    generate(cache.model, **{name: value[known : known + 1] for name, value in PADDED.items()}, **WAYS[way])
    before = cache.stats().n_hits
    assert torch.equal(generate(cache.model, **PADDED, **WAYS[way]), generate(alone, **PADDED, **WAYS[way]))
    # The shorter prompt alone has no padding, which GPT-2's first forward cannot tell from other positions.
    assert known or cache.stats().n_hits > before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompt_lookup(family: str) -> None:
    cache, alone = pair(GENERATORS[family])
    ids = torch.cat([tokens(1, 5)] * 3, dim=1)
    plain = generate(alone, input_ids=ids)
    for model in (alone, cache.model, cache.model):
        assert torch.equal(generate(model, input_ids=ids, prompt_lookup_num_tokens=3), plain)
    assert cache.stats().n_hits == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["model", "assistant", "both"])
@pytest.mark.parametrize("prompt", [KNOWN, GOES_ON], ids=["known", "with a known prefix"])
def test_assisted_generation(wrapped: str, prompt: torch.Tensor) -> None:
    models = {"model": build(GENERATORS["llama"]), "assistant": build(GENERATORS["llama"], seed=1)}
    plain = generate(models["model"], input_ids=prompt)
    caches = [LLMCache.wrap(one, prefix_block=4) for name, one in models.items() if wrapped in (name, "both")]
    for ids in (KNOWN, prompt):
        made = generate(models["model"], input_ids=ids, assistant_model=models["assistant"])
    assert torch.equal(made, plain)
    assert all(cache.stats().hits["exact" if prompt is KNOWN else "prefix"] >= 1 for cache in caches)


@pytest.mark.slow
def test_drafts_of_an_early_exit() -> None:
    """transformers lowers `config.num_hidden_layers` for the time of a draft: other layers, so nothing is served."""
    cache, alone = pair(GENERATORS["llama"], prefix_block=4)
    for prompt in (KNOWN, GOES_ON, KNOWN):
        made = generate(cache.model, input_ids=prompt, assistant_early_exit=2)
        assert torch.equal(made, generate(alone, input_ids=prompt))
    assert cache.stats().bypassed["other_depth"] >= 3
    assert set(cache.stats().hits) == {"exact", "prefix"}
    assert cache.stats().errors == 0


def test_a_conversation_that_goes_on() -> None:
    """The second turn extends K/V that came from a hit."""
    cache, alone = pair(GENERATORS["gpt2"])
    prompt, more = tokens(2, 6), tokens(2, 3, seed=9)
    whole = run(alone, input_ids=torch.cat([prompt, more], dim=1))
    for _ in range(2):
        kv = cache(prompt, use_cache=True).past_key_values
        assert_close(run(cache.model, input_ids=more, past_key_values=kv), whole[:, 6:])
    assert (cache.stats().hits, cache.stats().bypassed) == ({"exact": 2}, {"decode": 4})


def test_a_static_cache_is_used_again() -> None:
    cache, alone = pair(GENERATORS["llama"])
    prompt, step = tokens(2, 6), tokens(2, 1, seed=9)
    whole = run(alone, input_ids=torch.cat([prompt, step], dim=1))
    kv = StaticCache(config=alone.config, max_cache_len=12)
    for _ in range(3):
        with torch.inference_mode():
            kv.reset()
        cache(prompt, past_key_values=kv, use_cache=True)
        assert_close(run(cache.model, input_ids=step, past_key_values=kv), whole[:, 6:])
    assert cache.stats().hits == {"exact": 4}


@pytest.mark.slow
@pytest.mark.parametrize("family", GENERATORS)
def test_generate_in_bfloat16(family: str) -> None:
    cache, alone = pair(lambda: GENERATORS[family]().to(torch.bfloat16))
    for _ in range(2):
        assert torch.equal(generate(cache.model, **PADDED), generate(alone, **PADDED))
    assert cache.stats().n_hits >= 2
