"""A decoder's requests are stored once, as blocks and a tail, and come back unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from llmcache.calls.kv_fill import make_output
from tests.prefix.prompts import BLOCK, CACHES, close, plainly, run, wrapped
from tests.tiny_models import CACHE, padded, tokens

LENGTHS = {"shorter than a block": 3, "full blocks": 8, "blocks and a tail": 10}
PER_TOKEN = (2 * 4 * 2 * 8 + 32) * 4  # bytes in the Llama: keys and values of 4 layers and 2 heads, and a state

of_each_length = pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)


def same(one: Any, other: Any) -> bool:
    """Whether logits and K/V of two outputs are bit-equal."""
    pairs = [(one.logits, other.logits)]
    for ours, theirs in zip(one.past_key_values.layers, other.past_key_values.layers, strict=True):
        pairs += [(getattr(ours, name), getattr(theirs, name)) for name in ("keys", "values")]
    n_columns = one.logits.shape[1]  # a static cache has room for more
    return all(torch.equal(a[..., :n_columns, :], b[..., :n_columns, :]) for a, b in pairs)


def nothing_runs(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Make all modules of the trunk fail; patch their classes, so that the cache sees no hooks or other forwards."""
    for module in model.base_model.children():
        for part in module.children() if isinstance(module, nn.ModuleList) else (module,):
            monkeypatch.setattr(type(part), "__call__", lambda *_, **__: pytest.fail("it ran"))


# -- memory ------------------------------------------------------------------------------------------------------------


@of_each_length
def test_a_prompt_is_held_once(llama: Any, length: int) -> None:
    cache = wrapped(llama)
    for repeat in range(2):
        for seed in range(8):
            cache(tokens(1, length, seed))
            assert cache.last[0].rung == ("exact" if repeat else None)
    stats = cache.stats()
    assert stats.held_nbytes == stats.prefix_nbytes == 8 * length * PER_TOKEN
    assert (stats.n_stored, stats.n_entries, stats.nbytes) == (8, {3: 0}, 0)
    assert (stats.n_blocks, stats.hits, stats.hits_by_layer) == (8 * (length // BLOCK), {"exact": 8}, {3: 8})
    assert stats.n_layers_skipped == 8 * 4


def test_what_prompts_share_is_held_and_saved_once_and_each_end_is_known(llama: Any, tmp_path: Path) -> None:
    stem = tokens(1, 40)
    cache = wrapped(llama)
    ids = torch.cat([stem.expand(8, -1), tokens(8, 3, seed=1)], dim=1)
    assert same(cache(ids), cache(ids))
    stats = cache.stats()
    assert (stats.hits, stats.n_stored) == ({"prefix": 7, "exact": 8}, 8)
    assert stats.held_nbytes == (40 + 8 * 3) * PER_TOKEN
    cache.save(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("states-*")) < 2 * stats.held_nbytes
    cache(stem)
    assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 39)  # the stem itself was never asked


def test_tokens_that_no_layer_ran_on_are_saved(llama: Any) -> None:
    stem, budget = tokens(1, 40), 80 * PER_TOKEN
    cache = wrapped(llama, stem, stem, torch.cat([stem, tokens(1, 3, seed=1)], dim=1), max_bytes=budget)
    stats = cache.stats()
    assert (stats.n_prompt_tokens, stats.n_computed_tokens, stats.n_saved_tokens) == (40 + 40 + 43, 40 + 3, 80)
    assert (stats.n_prefix_tokens, stats.token_hit_rate) == (40, stats.to_dict()["token_hit_rate"]) == (40, 80 / 123)
    assert "65.0% of 123 tokens saved" in stats._repr_html_()
    assert stats.prefix_max_nbytes == budget and f"blocks='{stats.n_blocks}, " in repr(cache)


def test_all_of_the_budget_goes_to_blocks_and_they_make_way_for_entries(llama: Any) -> None:
    budget = 4 * 8 * PER_TOKEN
    cache = wrapped(llama, max_bytes=budget)

    def ask(seed: int, **more: Any) -> None:
        cache(tokens(1, 8, seed), **more)
        assert cache.stats().held_nbytes <= budget

    for seed in range(6):
        ask(seed)
    assert cache.stats().prefix_nbytes == budget
    for seed in range(14):
        ask(seed, use_cache=False)
    stats = cache.stats()
    assert 0.4 * budget < stats.nbytes <= 0.5 * budget <= stats.prefix_nbytes
    for seed in range(20, 24):
        ask(seed, use_cache=False)
        ask(seed)
    assert cache.stats().errors == 0


def test_a_prompt_that_does_not_fit_is_counted_and_its_beginning_serves(llama: Any) -> None:
    cache = wrapped(llama, tokens(1, 10), tokens(1, 10), max_bytes=9 * PER_TOKEN)
    stats = cache.stats()
    assert (stats.n_too_large, stats.n_stored, stats.hits, stats.n_blocks) == (2, 0, {"prefix": 1}, 2)


# -- repeats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "length"), [("dynamic", 10), ("static", 8), ("none", 3)])
def test_a_repeat_is_equal_and_nothing_runs(
    llama: Any, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, step = tokens(2, length), tokens(2, 1, seed=9)
    plain, to_extend = (run(llama, ids, past_key_values=CACHES[kind](llama.config)) for _ in range(2))
    after = run(llama, step, past_key_values=to_extend.past_key_values).logits
    cache = wrapped(llama)
    for number in range(3):
        with monkeypatch.context() as patch:
            if number:
                nothing_runs(patch, llama)
            output = cache(ids, past_key_values=CACHES[kind](llama.config))
        assert type(output.past_key_values) is type(plain.past_key_values)
        assert output.past_key_values.get_seq_length() == length
        assert same(output, plain)
        assert torch.equal(cache(step, past_key_values=output.past_key_values).logits, after)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 4}, 0)


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_that_was_left_out_is_not_taken_for_what_the_model_makes_of_it(gpt2: Any, use_cache: bool) -> None:
    inputs = padded([22, 3], left=True)
    labelled = {**inputs, "labels": inputs["input_ids"], "use_cache": use_cache}
    plain = run(gpt2, **labelled)
    cache = wrapped(gpt2, inputs["input_ids"][:1])
    cache(**inputs, use_cache=use_cache)
    for _ in range(2):
        close(cache(**labelled).logits, plain.logits)
    assert cache.stats().errors == 0


class ByPlace(nn.Module):
    """Mimics kernels whose rounding depends on a row's place in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = torch.arange(len(x), dtype=x.dtype)[:, None, None]
        return x + 1e-5 * places


@pytest.mark.parametrize("prefix", [True, False], ids=["in blocks", "as entries"])
def test_rows_that_are_the_same_request_come_back_each_as_it_was(gpt2: Any, prefix: bool) -> None:
    gpt2.transformer.h[0].mlp.dropout = ByPlace()
    cache = wrapped(gpt2, prefix=prefix)
    inputs = {name: x[[0, 1, 1]] for name, x in padded([10, 8], left=True).items()}
    inputs["labels"] = inputs["input_ids"]  # by which padding is read: each row is computed
    first = cache(**inputs)
    assert not torch.equal(first.logits[1], first.logits[2])
    for _ in range(2):
        assert same(cache(**inputs), first)
    assert cache.stats().hits == {"exact": 6}


def test_beside_a_row_that_cannot_be_kept_in_blocks(llama: Any) -> None:
    inputs = padded([10, 10])
    cache = wrapped(llama)
    cache(**inputs)
    holes = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    holes["attention_mask"][1, 4] = 0
    where, plain = holes["attention_mask"].bool(), plainly(cache, **holes).logits
    for rungs in (["exact", None], ["exact", "exact"]):
        close(cache(**holes).logits[where], plain[where])
        assert [outcome.rung for outcome in cache.last] == rungs


# -- evictions and purges ----------------------------------------------------------------------------------------------


def test_a_prompt_whose_tail_or_blocks_have_left_is_served_what_is_held(llama: Any) -> None:
    ids = tokens(1, 10)
    plain = run(llama, ids).logits
    cache = wrapped(llama, max_bytes=20 * PER_TOKEN)
    seen = []
    for others in range(0, 12, 2):
        cache.clear()
        cache(ids)
        for seed in range(1, 1 + others):
            cache(tokens(1, 2, seed))
        close(cache(ids).logits, plain)
        seen.append((cache.last[0].rung, cache.last[0].n_prefix))
    assert seen == [("exact", 0)] * 3 + [("prefix", 8), ("prefix", 4), (None, 0)]
    assert cache.stats().errors == 0


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_saved_output_may_be_of_another_version_of_transformers(name: str) -> None:
    states, kv_cache = torch.zeros(1, 2, 3), object()
    made = make_output(BaseModelOutputWithPast, ("last_hidden_state", name), states, kv_cache)
    assert made["last_hidden_state"] is states and made[CACHE] is kv_cache
