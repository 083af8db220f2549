"""A decoder's requests are stored once, as blocks and a tail, and come back unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.prefix.prompts import BLOCK, CACHES, FAMILIES, branch, close, fail_once, plainly, run, wrapped
from tests.tiny_models import GENERATORS, build, padded, rounding, tokens

LENGTHS = {"shorter than a block": 3, "full blocks": 8, "blocks and a tail": 10}
PER_TOKEN = (2 * 4 * 2 * 8 + 32) * 4  # bytes in the Llama: keys and values of 4 layers and 2 heads, and a state

of_each_length = pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)


@pytest.fixture
def model() -> Any:
    return build(GENERATORS["llama"])


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
def test_a_prompt_is_held_once(model: Any, length: int) -> None:
    cache = wrapped(model)
    for repeat in range(2):
        for seed in range(8):
            cache(tokens(1, length, seed))
            assert cache.last[0].rung == ("exact" if repeat else None)
    stats = cache.stats()
    assert stats.held_nbytes == stats.prefix_nbytes == 8 * length * PER_TOKEN
    assert (stats.n_stored, stats.n_entries, stats.nbytes) == (8, {3: 0}, 0)
    assert (stats.n_blocks, stats.hits, stats.hits_by_layer) == (8 * (length // BLOCK), {"exact": 8}, {3: 8})
    assert stats.n_layers_skipped == 8 * 4


def test_what_prompts_share_is_held_and_saved_once_and_each_end_is_known(model: Any, tmp_path: Path) -> None:
    stem = tokens(1, 40)
    cache = wrapped(model)
    ids = torch.cat([stem.expand(8, -1), tokens(8, 3, seed=1)], dim=1)
    assert same(cache(ids), cache(ids))
    stats = cache.stats()
    assert (stats.hits, stats.n_stored) == ({"exact": 8}, 8)
    assert stats.held_nbytes == (40 + 8 * 3) * PER_TOKEN
    cache.save(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("states-*")) < 2 * stats.held_nbytes
    cache(stem)
    assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 39)  # the stem itself was never asked


@pytest.mark.slow
def test_all_of_the_budget_goes_to_blocks_and_they_make_way_for_entries(model: Any) -> None:
    budget = 10 * 8 * PER_TOKEN
    cache = wrapped(model, max_bytes=budget)

    def ask(seed: int, **more: Any) -> None:
        cache(tokens(1, 8, seed), **more)
        assert cache.stats().held_nbytes <= budget

    for _ in range(2):
        for seed in range(12):
            ask(seed)
        assert cache.stats().prefix_nbytes == budget
        for seed in range(30):
            ask(seed, use_cache=False)
        stats = cache.stats()
        assert 0.4 * budget < stats.nbytes <= 0.5 * budget <= stats.prefix_nbytes
        for seed in range(40, 50):
            ask(seed, use_cache=False)
            ask(seed)
        cache.clear()
    assert cache.stats().errors == 0


def test_a_prompt_that_does_not_fit_is_counted_and_its_beginning_serves(model: Any) -> None:
    cache = wrapped(model, tokens(1, 10), tokens(1, 10), max_bytes=9 * PER_TOKEN)
    stats = cache.stats()
    assert (stats.n_too_large, stats.n_stored, stats.hits, stats.n_blocks) == (1, 0, {"prefix": 1}, 2)


# -- repeats -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "length"),
    [
        *((family, kind, LENGTHS["blocks and a tail"]) for family in FAMILIES for kind in CACHES),
        *(
            ("llama", kind, LENGTHS[name])
            for kind in ("none", "static")
            for name in ("shorter than a block", "full blocks")
        ),
    ],
)
def test_a_repeat_comes_back_bit_for_bit_and_nothing_runs(
    family: str, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build(FAMILIES[family])
    ids, step = tokens(2, length), tokens(2, 1, seed=9)
    plain, to_extend = (run(model, ids, past_key_values=CACHES[kind](model.config)) for _ in range(2))
    after = run(model, step, past_key_values=to_extend.past_key_values).logits
    cache = wrapped(model)
    for number in range(3):
        with monkeypatch.context() as patch:
            if number:
                nothing_runs(patch, model)
            output = cache(ids, past_key_values=CACHES[kind](model.config))
        assert type(output.past_key_values) is type(plain.past_key_values)
        assert output.past_key_values.get_seq_length() == length
        assert same(output, plain)
        assert torch.equal(cache(step, past_key_values=output.past_key_values).logits, after)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 4}, 0)


@pytest.mark.parametrize("left", [True, False])
def test_rows_of_a_padded_batch_are_found_in_other_batches(model: Any, left: bool) -> None:
    inputs = padded([10, 3, 8], left=left)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    plain = run(model, **inputs)
    cache = wrapped(model)
    for _ in range(2):
        assert same(cache(**inputs), plain)
    assert cache.stats().held_nbytes == 3 * 10 * PER_TOKEN  # padding is stored too
    new = {"input_ids": tokens(1, 10, seed=7), "attention_mask": torch.ones(1, 10), "position_ids": torch.arange(10)}
    mixed = cache(**{name: torch.cat([value, new[name].view(1, 10).long()]) for name, value in inputs.items()})
    assert [outcome.rung for outcome in cache.last] == ["exact"] * 3 + [None]
    mixed.logits = mixed.logits[:3]
    mixed.past_key_values.batch_select_indices(torch.arange(3))
    assert same(mixed, plain)
    assert cache.stats().hits == {"exact": 6}


def test_padding_that_was_cut_is_not_taken_for_what_the_model_makes_of_it(model: Any) -> None:
    """For a row that begins after the cut columns, all tokens are computed, but not all padding."""
    inputs = padded([22, 3], left=True)
    plain = run(model, **inputs).logits
    cache = wrapped(model, inputs["input_ids"][:1])
    cache(**inputs, logits_to_keep=1)
    assert [outcome.n_prefix for outcome in cache.last] == [19, 0]  # until the other row begins
    close(cache(**inputs).logits, plain)


@of_each_length
@pytest.mark.parametrize("prefix", [True, False], ids=["in blocks", "as entries"])
def test_rows_that_are_the_same_request_come_back_each_as_it_was(length: int, prefix: bool) -> None:
    cache = wrapped(rounding("gpt2"), prefix=prefix)
    inputs = {name: x.repeat_interleave(2, 0) for name, x in padded([length, length - 2], left=True).items()}
    first = cache(**inputs)
    assert not torch.equal(first.logits[0], first.logits[1])
    for _ in range(2):
        assert same(cache(**inputs), first)
    assert cache.stats().hits == {"exact": 8}


def test_rows_beside_held_ones_whose_kv_is_not_found_are_computed_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, ids = wrapped(model), tokens(2, 10)
    plain = plainly(cache, ids)
    cache(ids[:1])

    class Emptied(tf.DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            made = super().update(*args, **kwargs)
            self.layers[0].keys = None
            return made

    monkeypatch.setattr("llmcache.calls.prefix.DynamicCache", Emptied)
    found = cache(ids, past_key_values=tf.DynamicCache())
    for ours, theirs in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        close(ours.keys, theirs.keys)
    assert cache.stats().errors == 1


def test_beside_a_row_that_cannot_be_kept_in_blocks(model: Any) -> None:
    inputs = padded([10, 10])
    cache = wrapped(model)
    cache(**inputs)
    holes = inputs | {"attention_mask": inputs["attention_mask"].clone()}
    holes["attention_mask"][1, 4] = 0
    where, plain = holes["attention_mask"].bool(), plainly(cache, **holes).logits
    for rungs in (["exact", None], ["exact", "exact"]):
        close(cache(**holes).logits[where], plain[where])
        assert [outcome.rung for outcome in cache.last] == rungs


# -- evictions and purges ----------------------------------------------------------------------------------------------


def test_a_prompt_whose_tail_or_blocks_have_left_is_served_what_is_held(model: Any) -> None:
    ids = tokens(1, 10)
    plain = run(model, ids).logits
    cache = wrapped(model, max_bytes=20 * PER_TOKEN)
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


def test_namespaces_share_nothing_and_are_purged_and_counted(model: Any) -> None:
    cache, asked = wrapped(model), tokens(1, 8, seed=8)
    for name in ("a", "b"):
        with cache.namespace(name):
            for length in LENGTHS.values():
                cache(tokens(1, length, seed=length))
                assert cache.last[0].rung is None
    assert cache.stats().n_stored == 6
    assert cache.purge(namespace="a") == 3
    assert (cache.stats().n_stored, cache.stats().held_nbytes) == (3, sum(LENGTHS.values()) * PER_TOKEN)
    for name, ids, rung in (("a", asked, None), ("b", branch(asked, 7, 9), "prefix"), ("b", asked, "exact")):
        with cache.namespace(name):
            cache(ids)
            assert cache.last[0].rung == rung
    cache.clear()
    assert (cache.stats().n_stored, cache.stats().held_nbytes, cache.stats().n_blocks) == (0, 0, 0)


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_was_half_filled_layer_by_layer_is_emptied(
    model: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, kv = tokens(1, 10), CACHES[kind](model.config)
    plain = run(model, ids).logits
    cache = wrapped(model, ids)  # calls of another kind: this kind's packing is not known yet
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # layers run: the model itself fails
        fail_once(patch, tf.Cache, "update", 3, KeyboardInterrupt)  # two layers were filled already
        cache(ids, past_key_values=kv)
    assert kv.get_seq_length() == 0
    assert torch.equal(cache(ids, past_key_values=kv).logits, plain)


# -- saving ------------------------------------------------------------------------------------------------------------


SAVED = {
    "one by one": [{"input_ids": tokens(1, n, seed=n)} for n in LENGTHS.values()],
    "padded on the left": [padded([10, 3, 8], left=True)],
    "padded on the right": [padded([10, 3, 8])],
}


@pytest.mark.parametrize("inputs", SAVED.values(), ids=SAVED)
def test_repeats_and_prefixes_survive_a_restart(model: Any, inputs: list[dict[str, Tensor]], tmp_path: Path) -> None:
    with wrapped(model) as cache:
        first = [cache(**one) for one in inputs]
        with cache.namespace("other"):
            cache(tokens(1, 8))
        before = cache.stats()
        cache.save(tmp_path)
    with LLMCache.load(build(GENERATORS["llama"]), tmp_path) as cache:
        after = cache.stats()
        for name in ("n_stored", "n_blocks", "held_nbytes"):
            assert getattr(after, name) == getattr(before, name)
        for one, expected in zip(inputs, first, strict=True):
            assert same(cache(**one), expected)
        assert cache.stats().hits == {"exact": 3}
        if len(inputs) > 1:
            cache(branch(tokens(1, 10, seed=10), 10, 14))
            assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 10)
        assert cache.purge(namespace="other") == 1
