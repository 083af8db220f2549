"""Prompts that share a beginning: what is served is what the plain model computes, whatever the batch and the cache."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from llmcache import LLMCache
from llmcache.reuse.prefix.kv_fill import join
from tests import inside
from tests.tiny_models import CLASSIFIERS, GENERATORS, PAD, STRANGE_GENERATORS, build, tokens

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],  # 4 query heads, 2 K/V heads
    "qwen3": STRANGE_GENERATORS["qwen3"],
}
BLOCK = 4
WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def branch(ids: Tensor, n_shared: int, length: int, seed: int) -> Tensor:
    """A prompt (1, length) that begins like another one."""
    return torch.cat([ids[:, :n_shared], tokens(1, length - n_shared, seed)], dim=1)


def batch(prompts: list[Tensor], left: bool) -> dict[str, Tensor]:
    """Prompts (1, n) of different lengths as one padded batch."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids, mask = torch.full((len(prompts), width), PAD), torch.zeros(len(prompts), width, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        n = prompt.shape[1]
        where = slice(width - n, width) if left else slice(0, n)
        ids[number, where], mask[number, where] = prompt[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, **inputs: Any) -> Tensor:
    return model.generate(**{"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, **inputs})


def wrapped(model: nn.Module, **settings: Any) -> LLMCache:
    return LLMCache.wrap(model, **{"prefix_block": BLOCK, "auto_bypass": False, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_same(family: str) -> None:
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    draw = random.Random(0)
    prompts = [branch(stem, draw.randint(0, 20), draw.randint(21, 30), seed) for seed in range(30)]
    plain = [greedy(model, input_ids=prompt) for prompt in prompts]
    cache = wrapped(model)
    for prompt, expected in zip(prompts, plain, strict=True):
        assert torch.equal(greedy(model, input_ids=prompt), expected)
    stats = cache.stats()
    assert stats.hits["prefix"] > 20
    assert stats.n_requests == stats.n_hits + stats.n_misses == len(prompts)
    assert 0 < stats.n_prefix_tokens < stats.n_prompt_tokens == sum(prompt.shape[1] for prompt in prompts)
    assert stats.errors == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_decode(family: str, way: str) -> None:
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    prompt = branch(stem, 18, 22, seed=1)
    torch.manual_seed(3)
    plain = greedy(model, input_ids=prompt, **WAYS[way])
    cache = wrapped(model)
    cache(stem)
    torch.manual_seed(3)
    assert torch.equal(greedy(model, input_ids=prompt, **WAYS[way]), plain)
    assert cache.stats().n_prefix_tokens > 0
    assert cache.stats().errors == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("return_dict", [True, False])
def test_logits_at_all_positions(family: str, return_dict: bool) -> None:
    model = build(FAMILIES[family])
    first, second = tokens(1, 24), branch(tokens(1, 24), 13, 21, seed=1)
    with torch.inference_mode():
        plain = [model(ids, return_dict=return_dict)[0] for ids in (first, second)]
    cache = wrapped(model)
    assert torch.equal(cache(first, return_dict=return_dict)[0], plain[0])  # cold is bit-equal
    output = cache(second, return_dict=return_dict)
    torch.testing.assert_close(output[0], plain[1], atol=1e-5, rtol=1e-5)
    assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 13)
    assert output[1].get_seq_length() == 21
    torch.testing.assert_close(cache(second, logits_to_keep=3).logits, plain[1][:, -3:], atol=1e-5, rtol=1e-5)
    assert cache.last[0].n_prefix == 20  # its own blocks were stored as well
    assert cache.stats().errors == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [True, False])
def test_rows_with_different_prefixes_and_padding(family: str, left: bool) -> None:
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    rows = [branch(stem, n, length, seed) for seed, (n, length) in enumerate([(20, 22), (9, 15), (16, 16), (12, 24)])]
    inputs = batch(rows, left)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        plain = model(**inputs, position_ids=positions).logits
    tokens_of = greedy(model, **inputs) if left else None
    cache = wrapped(model, exact=False)
    cache(stem)
    torch.testing.assert_close(cache(**inputs, position_ids=positions).logits, plain, atol=1e-5, rtol=1e-5)
    # Padding on the left is computed, and so is all that follows it.
    assert [outcome.n_prefix for outcome in cache.last] == ([0, 0, 0, 0] if left else [9, 9, 9, 9])
    cache.clear()
    cache(stem)
    last = cache(**inputs, position_ids=positions, logits_to_keep=1).logits
    torch.testing.assert_close(last, plain[:, -1:], atol=1e-5, rtol=1e-5)
    # Known are 20, 9, 16 and 12 tokens; with padding on the left they end in columns 22, 18, 24 and 12.
    assert [outcome.n_prefix for outcome in cache.last] == ([10, 3, 4, 12] if left else [9, 9, 9, 9])
    if left:
        cache.clear()
        greedy(model, input_ids=stem)
        assert torch.equal(greedy(model, **inputs), tokens_of)
        assert {outcome.rung for outcome in cache.last} == {"prefix"}
    assert cache.stats().errors == 0


@pytest.mark.parametrize("asked", ["loss", "all logits", "two logits", "the trunk"])
@pytest.mark.parametrize("left", [True, False])
def test_columns_with_padding_are_cut_only_where_nobody_reads_them(asked: str, left: bool) -> None:
    model: Any = build(FAMILIES["llama"])
    stem = tokens(1, 24)
    prompts = [branch(stem, n, length, seed) for seed, (n, length) in enumerate([(20, 22), (16, 16)])]
    inputs = batch(prompts, left)
    more: dict[str, Any] = {"loss": {"labels": inputs["input_ids"]}, "two logits": {"logits_to_keep": 2}}.get(asked, {})
    called = model.model if asked == "the trunk" else model
    with torch.inference_mode():
        plain = called(**inputs, **more)
        with wrapped(model, exact=False) as cache:
            cache(stem)
            model(**batch([tokens(1, 5)], left), logits_to_keep=1)  # is not to be taken for what the next call asks
            served = called(**inputs, **more)
            assert cache.stats().errors == 0
    for name in ("loss", "logits", "last_hidden_state"):
        if name in plain and plain[name] is not None:
            torch.testing.assert_close(served[name], plain[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache(family: str) -> None:
    """`generate()` makes a 4-D mask for it, of which rows are cut."""
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    inputs = batch([branch(stem, 20, 22, seed=1), branch(stem, 13, 17, seed=2)], left=True)
    plain = greedy(model, **inputs, cache_implementation="static")
    cache = wrapped(model)
    cache(stem)
    assert torch.equal(greedy(model, **inputs, cache_implementation="static"), plain)
    assert [outcome.n_prefix for outcome in cache.last] == [18, 13]
    assert set(cache.stats().bypassed) == {"decode"}
    assert cache.stats().errors == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache_and_no_padding(family: str) -> None:
    """`generate()` then leaves the mask out, in some families by kind of layer."""
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    inputs = {"input_ids": torch.cat([stem, tokens(1, 9, seed=1)], dim=1)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    plain = greedy(model, **inputs, cache_implementation="static")
    cache = wrapped(model)
    cache(stem)
    for _ in range(2):
        assert torch.equal(greedy(model, **inputs, cache_implementation="static"), plain)
        assert [outcome.rung for outcome in cache.last] == ["prefix"]
    assert set(cache.stats().bypassed) == {"decode"}
    assert cache.stats().errors == 0


def test_a_mask_that_is_not_causal_is_left_to_the_model() -> None:
    model = build(GENERATORS["llama"])
    stem = tokens(1, 12)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen[5, 3] = False
    cache = wrapped(model)
    cache(stem)
    with cache.disabled():
        plain = cache(stem, attention_mask=seen[None, None], past_key_values=DynamicCache()).logits
    assert torch.equal(cache(stem, attention_mask=seen[None, None], past_key_values=DynamicCache()).logits, plain)
    assert cache.last[0].bypassed == "mask_4d"
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    cache(stem, attention_mask=causal, past_key_values=DynamicCache())
    assert cache.last[0].rung == "exact"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_is_known_as_a_whole_does_not_hold_the_others_up(family: str) -> None:
    model = build(FAMILIES[family])
    stem = tokens(1, 24)
    inputs = batch([stem[:, :8], branch(stem, 20, 24, seed=1)], left=False)
    with torch.inference_mode():
        plain = model(**inputs).logits
    cache = wrapped(model, exact=False)
    cache(stem)
    last = cache(**inputs, logits_to_keep=4).logits
    torch.testing.assert_close(last, plain[:, -4:], atol=1e-5, rtol=1e-5)
    assert [outcome.n_prefix for outcome in cache.last] == [8, 20]
    torch.testing.assert_close(cache(**inputs).logits, plain, atol=1e-5, rtol=1e-5)
    assert [outcome.n_prefix for outcome in cache.last] == [8, 8]  # padding that may be read is computed


def test_positions_that_differ_do_not_share() -> None:
    """Without position_ids a model counts columns, padding included."""
    model = build(GENERATORS["gpt2"])
    stem = tokens(1, 12)
    inputs = batch([stem, tokens(1, 14, seed=1)], left=True)
    cache = wrapped(model)
    cache(stem)
    with cache.disabled():
        plain = cache(**inputs).logits
    assert torch.equal(cache(**inputs).logits, plain)
    assert cache.stats().n_prefix_tokens == 0
    holes = torch.cat([torch.arange(6), torch.arange(7, 13)])[None]
    with cache.disabled():
        plain = cache(stem, position_ids=holes).logits
    assert torch.equal(cache(stem, position_ids=holes).logits, plain)
    assert cache.stats().n_prefix_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_callers_cache(family: str, kind: str) -> None:
    model = build(FAMILIES[family])
    stem, step = tokens(2, 16), tokens(2, 1, seed=9)
    prompts = torch.cat([stem[:, :13], tokens(2, 4, seed=3)], dim=1)

    def turn() -> Tensor:
        kv = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=20)
        with torch.inference_mode():
            first = model(prompts, past_key_values=kv)
            assert int(kv.get_seq_length()) == 17
            return torch.cat([first.logits, model(step, past_key_values=kv).logits], dim=1)

    plain = turn()
    cache = wrapped(model)
    cache(stem)
    torch.testing.assert_close(turn(), plain, atol=1e-5, rtol=1e-5)
    assert cache.stats().n_prefix_tokens == 2 * 13
    assert cache.stats().errors == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_within_another_and_around_it(family: str) -> None:
    model = build(FAMILIES[family])
    whole = tokens(1, 24)
    for stored, asked, n in ((24, 12, 11), (24, 10, 9), (12, 24, 12), (10, 24, 10), (24, 3, 0), (3, 24, 0)):
        with wrapped(model) as cache:
            with cache.disabled():
                plain = cache(whole[:, :asked]).logits
            cache(whole[:, :stored])
            torch.testing.assert_close(cache(whole[:, :asked]).logits, plain, atol=1e-5, rtol=1e-5)
            assert cache.last[0].n_prefix == n


def test_exact_repeats_are_served_by_their_own_rung() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    first = cache(tokens(1, 24)).logits
    assert torch.equal(cache(tokens(1, 24)).logits, first)
    assert cache.stats().hits == {"exact": 1}


def test_states_that_were_reused_make_no_blocks() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model, layers=[1])  # so that repeats are served from entries
    cache(tokens(1, 24))
    assert cache.stats().n_blocks == 6
    inside.prefix(cache).clear()
    cache(tokens(1, 24))
    assert (cache.last[0].rung, cache.stats().n_blocks) == ("exact", 0)


def test_namespaces_and_weights_do_not_share() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem = tokens(1, 24)
    cache(stem)
    with cache.namespace("tenant"):
        cache(branch(stem, 20, 24, seed=1))
        assert cache.last[0].rung is None
        cache(branch(stem, 20, 24, seed=2))
        assert cache.last[0].rung == "prefix"
    cache.purge(namespace="tenant")
    with cache.namespace("tenant"):
        cache(branch(stem, 20, 24, seed=3))
        assert cache.last[0].rung is None
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    cache(branch(stem, 20, 24, seed=4))
    assert cache.last[0].rung is None


def test_no_prefix_where_it_cannot_serve() -> None:
    model = build(CLASSIFIERS["gpt2"])  # reads one row, and is run without K/V
    with wrapped(model) as cache:
        cache(tokens(1, 24))
        assert cache.stats().n_blocks == 0
    model = build(GENERATORS["gpt2"])
    for settings in ({"prefix": False}, {"tau": 0.9, "allow_unsafe": True}):
        with wrapped(model, **settings) as cache:
            cache(tokens(1, 24))
            assert cache.stats().n_blocks == 0
    with wrapped(model) as cache:
        cache(tokens(1, 24), use_cache=False)  # makes no K/V to keep
        cache(tokens(1, 24), token_type_ids=tokens(1, 24))
        assert cache.stats().n_blocks == 0


def test_evictions_never_change_an_answer() -> None:
    model = build(GENERATORS["llama"])
    stems = [tokens(1, 24, seed) for seed in range(4)]
    draw = random.Random(1)
    cache = wrapped(model, max_bytes=20_000)
    for seed in range(60):
        prompt = branch(draw.choice(stems), draw.randint(0, 24), 28, seed)
        with cache.disabled():
            plain = cache(prompt).logits
        torch.testing.assert_close(cache(prompt).logits, plain, atol=1e-5, rtol=1e-5)
        assert cache.stats().held_nbytes <= 20_000
    stats = cache.stats()
    assert stats.n_blocks_evicted > 20
    assert stats.hits["prefix"] > 10
    assert stats.errors == 0


def test_ids_out_of_range_raise_and_leave_no_past() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem, kv = tokens(1, 24), DynamicCache()
    cache(stem)
    wrong = torch.cat([stem[:, :20], torch.tensor([[10**6]])], dim=1)
    with pytest.raises(IndexError):
        cache(wrong, past_key_values=kv)
    assert kv.get_seq_length() == 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_interruption_leaves_no_past(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem = tokens(1, 24)
    kv = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=24)
    cache(stem)
    plain = cache(branch(stem, 20, 24, seed=1)).logits
    cache.clear()
    cache(stem)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(model.model.layers[1].mlp), "forward", interrupt)  # of the class: unseen
        cache(branch(stem, 20, 24, seed=1), past_key_values=kv)
    assert kv.get_seq_length() == 0
    torch.testing.assert_close(
        cache(branch(stem, 20, 24, seed=1), past_key_values=kv).logits, plain, atol=1e-5, rtol=1e-5
    )


def test_a_static_cache_that_is_too_small_is_left_to_the_model() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem = tokens(1, 24)
    cache(stem)
    for kept in ("cache", "disabled"):
        kv = StaticCache(config=model.config, max_cache_len=22)
        with (
            pytest.raises((IndexError, RuntimeError)),
            cache.disabled() if kept == "disabled" else cache.namespace("x"),
        ):
            cache(branch(stem, 20, 24, seed=1), past_key_values=kv)
    assert cache.stats().n_prefix_tokens == 0


def test_prompts_beyond_the_context_are_refused_as_before() -> None:
    model = build(GENERATORS["gpt2"])
    cache = wrapped(model)
    stem = tokens(1, 60)
    cache(stem)
    with pytest.raises(IndexError):
        cache(branch(stem, 60, model.config.n_positions + 4, seed=1))


def test_an_empty_prompt_fails_as_without_a_cache() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    cache(tokens(1, 24))
    empty = torch.zeros(1, 0, dtype=torch.int64)
    with cache.disabled(), pytest.raises(RuntimeError) as plain:
        cache(empty)
    with pytest.raises(RuntimeError) as error:
        cache(empty)
    assert str(error.value) == str(plain.value)
    assert cache.stats().errors == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_cache_that_is_half_filled_is_emptied(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem, prompt, kv = tokens(1, 24), branch(tokens(1, 24), 20, 24, seed=1), DynamicCache()
    with cache.disabled():
        plain = cache(prompt).logits
    cache(stem)
    update, n_calls = DynamicCache.update, []

    def fail_once(self: DynamicCache, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> Any:
        n_calls.append(layer)
        if len(n_calls) == 2:  # one layer was filled already
            raise error("broken")
        return update(self, keys, values, layer, *more, **named)

    monkeypatch.setattr(DynamicCache, "update", fail_once)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            cache(prompt, past_key_values=kv)
        assert kv.get_seq_length() == 0
    else:
        assert torch.equal(cache(prompt, past_key_values=kv).logits, plain)
        assert (cache.stats().errors, kv.get_seq_length(), cache.last[0].rung) == (1, 24, None)


def test_an_interruption_while_the_output_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    stem, kv = tokens(1, 24), DynamicCache()
    prompt = branch(stem, 20, 24, seed=1)
    with cache.disabled():
        plain = cache(prompt).logits
    cache(stem)

    def interrupt(pieces: list[Tensor]) -> Tensor:
        if len(pieces) == 2:  # the prefix's states and those of the rest; of blocks there are five
            raise KeyboardInterrupt
        return join(pieces)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("llmcache.reuse.prefix.rung.join", interrupt)
        cache(prompt, past_key_values=kv)
    assert (kv.get_seq_length(), cache.stats().hits) == (0, {})
    torch.testing.assert_close(cache(prompt, past_key_values=kv).logits, plain, atol=1e-5, rtol=1e-5)


def test_threads_that_extend_one_prefix() -> None:
    model = build(GENERATORS["llama"])
    stem = tokens(1, 16)
    prompts = [branch(stem, 16, 28, seed % 5) for seed in range(10)]
    plain = [greedy(model, input_ids=prompt) for prompt in prompts]
    cache = wrapped(model, max_bytes=2 * 30_000)
    wrong: list[int] = []

    def work(numbers: list[int]) -> None:
        for number in numbers * 3:
            if not torch.equal(greedy(model, input_ids=prompts[number]), plain[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(list(range(10))[i:] + list(range(10))[:i],)) for i in (0, 3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.stats().hits["prefix"] > 0
    assert cache.stats().errors == 0


STORIES = Path(os.environ.get("LLMCACHE_MODELS", "")) / "stories260K"


@pytest.mark.skipif(not (STORIES / "config.json").is_file(), reason="needs $LLMCACHE_MODELS/stories260K")
def test_greedy_tokens_of_a_trained_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    draw = random.Random(2)
    generator = torch.Generator().manual_seed(2)
    stems = torch.randint(3, model.config.vocab_size, (5, 96), generator=generator)
    cache = wrapped(model, prefix_block=16)
    for _ in range(40):
        stem = stems[draw.randrange(5)][None, : draw.randint(8, 96)]
        prompt = torch.cat([stem, torch.randint(3, model.config.vocab_size, (1, 8), generator=generator)], dim=1)
        with cache.disabled():
            plain = greedy(model, input_ids=prompt)
        assert torch.equal(greedy(model, input_ids=prompt), plain)
    assert cache.stats().hits["prefix"] > 10


def test_prefixes_alone() -> None:
    """Without the exact rung nothing but blocks is kept, and all of the budget is theirs."""
    model = build(FAMILIES["gpt2"])
    prompt = tokens(1, 22)
    plain = greedy(model, input_ids=prompt)
    cache = wrapped(model, exact=False)
    for n_served in (0, 20):
        assert torch.equal(greedy(model, input_ids=prompt), plain)
        assert cache.last[0].n_prefix == n_served
    stats = cache.stats()
    assert stats.n_stored == 0
    assert stats.n_blocks > 0
    blocks = inside.prefix(cache)
    assert blocks is not None
    held = [x for block in blocks._held.values() for x in (block.keys, block.values, block.states)]
    assert not any(x.is_inference() or x.requires_grad for x in held)
    assert sum(x.untyped_storage().nbytes() for x in held) == stats.prefix_nbytes


@pytest.mark.parametrize("who", ["a hook of the head", "a hook of the trunk"])
def test_padding_is_computed_where_others_than_the_head_read_it(who: str) -> None:
    model: Any = build(FAMILIES["llama"])
    inputs = batch([tokens(1, 16), tokens(1, 8, seed=5)], left=True)
    with torch.inference_mode():
        plain = model.model(**inputs).last_hidden_state
    seen: list[Tensor] = []
    with wrapped(model, exact=False) as cache:
        for prompt in (tokens(1, 16), tokens(1, 8, seed=5)):
            cache(prompt)
        if who == "a hook of the head":
            hook = model.register_forward_pre_hook(lambda *_: seen.append(model.model(**inputs).last_hidden_state))
        else:
            hook = model.model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
        cache(**inputs, logits_to_keep=1)
        hook.remove()
    torch.testing.assert_close(seen[0], plain, atol=1e-5, rtol=1e-5)
