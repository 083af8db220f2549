"""Requests of decoders are held once, as blocks and a tail, and come back as they came out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from llmcache import LLMCache
from llmcache.execution.cost import CostModel
from llmcache.models.adapters import ADAPTERS
from llmcache.reuse import RUNGS
from llmcache.reuse.exact import Exact
from tests.tiny_models import GENERATORS, STRANGE_GENERATORS, build, padded, tokens

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],  # 4 query heads, 2 K/V heads
    "qwen3": STRANGE_GENERATORS["qwen3"],
}
BLOCK = 4
LENGTHS = {"shorter than a block": 3, "full blocks": 8, "blocks and a tail": 10}
PER_TOKEN = (2 * 4 * 2 * 8 + 32) * 4  # bytes in the Llama: keys and values of 4 layers and 2 heads, and a state
CACHES: dict[str, Callable[[Any], Any]] = {
    "none": lambda config: None,
    "dynamic": lambda config: DynamicCache(),
    "made ahead": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),
}


def wrapped(model: nn.Module, **settings: Any) -> LLMCache:
    return LLMCache.wrap(model, **{"prefix_block": BLOCK, "auto_bypass": False, **settings})


def kv_of(output: Any, n_columns: int) -> list[Tensor]:
    """Keys and values of an output's K/V cache, copied."""
    layers = output.past_key_values.layers
    return [getattr(layer, name)[:, :, :n_columns].clone() for layer in layers for name in ("keys", "values")]


def same(one: Any, other: Any, n_columns: int) -> bool:
    """Whether logits and K/V of two outputs are the same, bit for bit."""
    pairs = zip(kv_of(one, n_columns), kv_of(other, n_columns), strict=True)
    return torch.equal(one.logits, other.logits) and all(torch.equal(a, b) for a, b in pairs)


def nothing_runs(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Have all that the trunk holds fail: of the classes, so that nobody sees hooks or replaced forwards."""
    for module in model.base_model.children():
        for part in module.children() if isinstance(module, nn.ModuleList) else (module,):
            monkeypatch.setattr(type(part), "forward", lambda *_, **__: pytest.fail("it ran"))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_prompt_is_held_once(length: int) -> None:
    cache = wrapped(build(GENERATORS["llama"]))
    for repeat in range(2):
        for seed in range(20):
            cache(tokens(1, length, seed))
            assert cache.last[0].rung == ("exact" if repeat else None)
    stats = cache.stats()
    assert stats.held_nbytes == stats.prefix_nbytes == 20 * length * PER_TOKEN
    assert (stats.n_stored, stats.n_entries, stats.nbytes) == (20, {3: 0}, 0)
    assert (stats.n_blocks, stats.hits, stats.hits_by_layer) == (20 * (length // BLOCK), {"exact": 20}, {3: 20})
    assert stats.n_layers_skipped == 20 * 4


def test_what_prompts_share_is_held_once_and_each_end_is_known() -> None:
    model = build(GENERATORS["llama"])
    cache, stem = wrapped(model), tokens(1, 8)
    ids = torch.cat([stem.expand(3, -1), tokens(3, 3, seed=1)], dim=1)
    first, again = cache(ids), cache(ids)
    assert same(first, again, 11)
    assert cache.stats().hits == {"exact": 3}
    assert cache.stats().held_nbytes == (8 + 3 * 3) * PER_TOKEN
    assert cache.stats().n_stored == 3
    cache(stem)
    assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 7)  # which nobody asked before


def test_all_of_the_budget_goes_to_blocks_and_they_make_way_for_entries() -> None:
    model = build(GENERATORS["llama"])
    budget = 10 * 8 * PER_TOKEN
    cache = wrapped(model, max_bytes=budget)
    for seed in range(12):
        cache(tokens(1, 8, seed))
        assert cache.stats().held_nbytes <= budget
    assert cache.stats().prefix_nbytes == budget
    for seed in range(60):
        cache(tokens(1, 8, seed), use_cache=False)
        assert cache.stats().held_nbytes <= budget
    stats = cache.stats()
    assert 0.4 * budget < stats.nbytes <= 0.5 * budget <= stats.prefix_nbytes
    for seed in range(40, 60):
        cache(tokens(1, 8, seed), use_cache=False)
        cache(tokens(1, 8, seed))
        assert cache.stats().held_nbytes <= budget
    cache.clear()
    for seed in range(12):
        cache(tokens(1, 8, seed))
    assert cache.stats().prefix_nbytes == budget
    assert cache.stats().errors == 0


def test_a_prompt_that_does_not_fit_is_counted_and_its_beginning_serves() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model, max_bytes=9 * PER_TOKEN)
    for _ in range(2):
        cache(tokens(1, 10))
    stats = cache.stats()
    assert (stats.n_too_large, stats.n_stored, stats.hits, stats.n_blocks) == (1, 0, {"prefix": 1}, 2)


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_repeat_comes_back_bit_for_bit_and_nothing_runs(
    family: str, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(FAMILIES[family])
    ids, step = tokens(2, length), tokens(2, 1, seed=9)
    with torch.inference_mode():
        plain = model(ids, past_key_values=CACHES[kind](model.config))
        after = model(step, past_key_values=plain.past_key_values).logits
    cache = wrapped(model)
    for number in range(3):
        with monkeypatch.context() as patch:
            if number:
                nothing_runs(patch, model)
            output = cache(ids, past_key_values=CACHES[kind](model.config))
        assert type(output.past_key_values) is type(plain.past_key_values)
        assert output.past_key_values.get_seq_length() == length
        assert same(output, plain, length)
        assert torch.equal(cache(step, past_key_values=output.past_key_values).logits, after)
    assert cache.stats().hits == {"exact": 4}
    assert cache.stats().errors == 0


@pytest.mark.parametrize("return_dict", [True, False])
def test_the_trunks_own_output_is_packed_as_it_was(return_dict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["gpt2"])
    ids = tokens(1, 10)
    cache = wrapped(model)
    with torch.inference_mode():
        first = model.transformer(ids, return_dict=return_dict)
        nothing_runs(monkeypatch, model)
        again = model.transformer(ids, return_dict=return_dict)
    assert (type(again), len(again)) == (type(first), len(first))
    assert torch.equal(again[0], first[0])
    assert cache.last[0].rung == "exact"


@pytest.mark.parametrize("left", [True, False])
def test_rows_of_a_padded_batch_are_found_in_other_batches(left: bool) -> None:
    model = build(GENERATORS["llama"])
    inputs = padded([10, 3, 8], left=left)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        plain = model(**inputs, position_ids=positions)
    cache = wrapped(model)
    first = cache(**inputs, position_ids=positions)
    assert same(first, plain, 10)
    assert same(cache(**inputs, position_ids=positions), plain, 10)
    others = {name: torch.cat([value, value[:1] * 0 + 7]) for name, value in inputs.items()}
    others["attention_mask"][3] = 1
    mixed = cache(**others, position_ids=torch.cat([positions, torch.arange(10)[None]]))
    assert [outcome.rung for outcome in cache.last] == ["exact"] * 3 + [None]
    assert torch.equal(mixed.logits[:3], plain.logits)
    assert all(torch.equal(one[:3], other) for one, other in zip(kv_of(mixed, 10), kv_of(plain, 10), strict=True))
    assert cache.stats().hits == {"exact": 6}


def test_padding_that_was_cut_is_not_taken_for_what_the_model_makes_of_it() -> None:
    """Of a row that begins after the columns that were cut, all tokens are computed, and not all of its padding."""
    model = build(GENERATORS["llama"])
    stem = tokens(1, 22)
    inputs = padded([22, 3], left=True)
    inputs["input_ids"][0] = stem[0]
    with torch.inference_mode():
        plain = model(**inputs).logits
    cache = wrapped(model)
    cache(stem)
    cache(**inputs, logits_to_keep=1)
    assert [outcome.n_prefix for outcome in cache.last] == [19, 0]  # up to where the other row begins
    torch.testing.assert_close(cache(**inputs).logits, plain, atol=1e-5, rtol=1e-5)


def test_a_model_whose_first_parameter_is_of_another_dtype() -> None:
    """What enters the layers is known only when they are reached; what was found before is served all the same."""
    model: Any = build(GENERATORS["llama"])
    model.model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    cache, ids = wrapped(model), tokens(1, 10)
    first = cache(ids)
    for _ in range(2):
        assert same(cache(ids), first, 10)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 2}, 0)


class ByPlace(nn.Module):
    """Stands for kernels whose last bits hang on the row's place in a batch."""

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = torch.arange(len(x), dtype=x.dtype)[:, None, None]
        return x + 1e-5 * places


def rounding() -> Any:
    """A decoder of which no two rows of a batch come out alike."""
    model: Any = build(GENERATORS["gpt2"])
    model.transformer.h[0].mlp.dropout = ByPlace()
    return model.eval()


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_rows_that_are_the_same_request_come_back_each_as_it_was(length: int) -> None:
    cache = wrapped(rounding())
    ids = tokens(2, length).repeat_interleave(2, 0)
    first = cache(ids)
    assert not torch.equal(first.logits[0], first.logits[1])
    for _ in range(2):
        assert same(cache(ids), first, length)
    assert cache.stats().hits == {"exact": 8}


def test_rows_that_came_out_alike_are_held_once() -> None:
    cache = wrapped(build(GENERATORS["llama"]))
    ids = tokens(1, 10).expand(3, -1)
    first = cache(ids)
    if all(torch.equal(kv[0], kv[row]) for kv in kv_of(first, 10) for row in (1, 2)):
        assert (cache.stats().n_stored, cache.stats().held_nbytes) == (1, 10 * PER_TOKEN)
    assert same(cache(ids), first, 10)


def test_a_row_that_differs_in_blocks_of_another_run_comes_back_as_it_was() -> None:
    """Beside a row of which nothing is known all is computed; what is held of the other was rounded otherwise."""
    cache = wrapped(rounding())
    stem = tokens(1, 10)
    cache(stem)
    ids = torch.cat([tokens(1, 14, seed=5), torch.cat([stem[:, :9], tokens(1, 5, seed=6)], dim=1)])
    first = cache(ids)
    assert cache.stats().n_hits == 0
    assert same(cache(ids), first, 14)
    assert cache.stats().hits == {"exact": 2}


def test_beside_a_row_that_cannot_be_kept_in_blocks() -> None:
    model = build(GENERATORS["llama"])
    inputs = padded([10, 10])
    holes = {name: value.clone() for name, value in inputs.items()}
    holes["attention_mask"][1, 4] = 0
    cache = wrapped(model)
    cache(**inputs)
    with cache.disabled():
        plain = cache(**holes).logits
    for rungs in (["exact", None], ["exact", "exact"]):
        output = cache(**holes).logits
        assert [outcome.rung for outcome in cache.last] == rungs
        where = holes["attention_mask"].bool()
        torch.testing.assert_close(output[where], plain[where], atol=1e-5, rtol=1e-5)
    assert cache.stats().n_entries == {3: 1}


def test_other_layers_custom_rungs_and_codecs_have_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Further(Exact):
        name = "further"

    monkeypatch.setitem(RUNGS, "further", Further)
    for settings in ({"layers": [1]}, {"rungs": ["further"]}, {"prefix": False}):
        with wrapped(build(GENERATORS["llama"]), **settings) as cache:
            for _ in range(2):
                cache(tokens(1, 10))
            assert (sum(cache.stats().n_entries.values()), cache.stats().n_stored) == (1, 1)
            assert cache.stats().hits == {"exact": 1}


def test_a_trunk_that_puts_out_more_has_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Llama(tf.LlamaModel):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: Any = None) -> Any:
            output = super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)
            output["more"] = output.last_hidden_state.mean(dim=1)
            return output

    monkeypatch.setitem(
        ADAPTERS, "own", type(ADAPTERS["llama"])("own", ("Llama",), "layers", norm="norm", is_causal=True)
    )
    model: Any = build(GENERATORS["llama"])
    model.model.__class__ = Llama
    cache, ids = wrapped(model), tokens(1, 10)
    for rung in (None, None, "exact"):
        with torch.inference_mode():
            assert "more" in model.model(ids)
        assert cache.last[0].rung == rung
    assert (cache.stats().n_blocks, cache.stats().n_entries, cache.stats().errors) == (0, {3: 1}, 0)


# -- what leaves -------------------------------------------------------------------------------------------------------


def test_a_prompt_whose_tail_or_blocks_have_left_is_served_what_is_held() -> None:
    model = build(GENERATORS["llama"])
    ids = tokens(1, 10)
    with torch.inference_mode():
        plain = model(ids).logits
    cache = wrapped(model, max_bytes=20 * PER_TOKEN)
    seen = []
    for others in range(0, 12, 2):
        cache.clear()
        cache(ids)
        for seed in range(1, 1 + others):
            cache(tokens(1, 2, seed))
        torch.testing.assert_close(cache(ids).logits, plain, atol=1e-5, rtol=1e-5)
        seen.append((cache.last[0].rung, cache.last[0].n_prefix))
    assert seen == [("exact", 0)] * 3 + [("prefix", 8), ("prefix", 4), (None, 0)]
    assert cache.stats().errors == 0


def test_namespaces_are_purged_and_counted() -> None:
    model = build(GENERATORS["llama"])
    cache = wrapped(model)
    for name in ("a", "b"):
        with cache.namespace(name):
            for length in LENGTHS.values():
                cache(tokens(1, length, seed=length))
    assert cache.stats().n_stored == 6
    assert cache.purge(namespace="a") == 3
    assert (cache.stats().n_stored, cache.stats().held_nbytes) == (3, sum(LENGTHS.values()) * PER_TOKEN)
    for name, rung in (("a", None), ("b", "exact")):
        with cache.namespace(name):
            cache(tokens(1, 8, seed=8))
            assert cache.last[0].rung == rung
    cache.clear()
    assert (cache.stats().n_stored, cache.stats().held_nbytes, cache.stats().n_blocks) == (0, 0, 0)


def test_other_weights_find_nothing_and_those_of_before_find_their_own() -> None:
    model: Any = build(GENERATORS["llama"])
    cache, ids = wrapped(model), tokens(1, 10)
    cache(ids)
    for scale, rung in ((2.0, None), (0.5, "exact")):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(scale)
        with cache.disabled():
            plain = cache(ids).logits
        assert torch.equal(cache(ids).logits, plain)
        assert cache.last[0].rung == rung


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_learned", [True, False], ids=["before the layers", "layer by layer"])
def test_a_cache_that_is_half_filled_is_emptied(
    kind: str, error: type[BaseException], is_learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(GENERATORS["llama"])
    cache, ids = wrapped(model), tokens(1, 10)
    plain = cache(ids, past_key_values=CACHES[kind](model.config)).logits
    if not is_learned:
        cache._flow.forget()
    kv, n_calls = CACHES[kind](model.config), []
    update = type(kv).update

    def fail_once(self: Any, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> Any:
        n_calls.append(layer)
        if len(n_calls) == 3:  # two layers were filled already
            raise error("broken")
        return update(self, keys, values, layer, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(type(kv), "update", fail_once)
        if error is RuntimeError and is_learned:
            assert torch.equal(cache(ids, past_key_values=kv).logits, plain)
            assert (cache.stats().errors, kv.get_seq_length(), cache.last[0].rung) == (1, 10, None)
            return
        with pytest.raises(error):  # where layers run, the model itself fails
            cache(ids, past_key_values=kv)
    assert kv.get_seq_length() == 0
    assert torch.equal(cache(ids, past_key_values=kv).logits, plain)


def test_unwrapped_while_some_rows_skip_the_layers() -> None:
    model: Any = build(GENERATORS["llama"])
    cache, ids = wrapped(model), tokens(2, 10)
    with cache.disabled():
        plain = cache(ids)
    cache(ids[:1])
    swap = model.model.layers[2].__dict__["forward"]
    original = swap.original
    swap.original = lambda *args, **kwargs: (cache.unwrap(), original(*args, **kwargs))[1]
    with torch.inference_mode():
        output = model(ids)
    assert same(output, plain, 10)
    assert cache.stats().bypassed["unwrapped"] == 2


def test_an_edit_while_it_is_computed_is_not_stored() -> None:
    model: Any = build(GENERATORS["llama"])
    cache, ids = wrapped(model), tokens(1, 10)
    swap = model.model.layers[2].__dict__["forward"]
    original = swap.original

    def edit(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight.add_(0.1)
        return original(*args, **kwargs)

    swap.original = edit
    cache(ids)
    assert (cache.stats().n_stored, cache.stats().n_blocks, cache.last[0].bypassed) == (0, 0, "weights_changed")


def test_a_request_that_is_held_is_served_while_others_bypass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(GENERATORS["llama"])
    cache = LLMCache.wrap(model, prefix_block=BLOCK)
    cost = cache._components.cost = CostModel(4, 8)
    cost._fewest_times = 1
    for name, value in (("worthwhile_from", 0.9), ("is_cheap", False), ("saved_s", 1.0)):
        monkeypatch.setattr(f"llmcache.execution.length_costs.LengthCosts.{name}", value)
    monkeypatch.setattr("llmcache.execution.length_costs.LengthCosts.serves", lambda self, share: share > 0.3)
    told = []
    for seed in (*range(10), 3, 20):
        cache(tokens(1, 10, seed))
        told.append(cache.last[0].rung or cache.last[0].bypassed)
    assert told == [None] * 8 + ["not_worthwhile"] * 2 + ["exact", "not_worthwhile"]


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [None, True, False])
def test_repeats_and_prefixes_survive_a_restart(tmp_path: Path, left: bool | None) -> None:
    model = build(GENERATORS["llama"])
    inputs = (
        [{"input_ids": tokens(1, n, seed=n)} for n in LENGTHS.values()]
        if left is None
        else [padded([10, 3, 8], left=left)]
    )
    with wrapped(model) as cache:
        first = [cache(**one) for one in inputs]
        with cache.namespace("other"):
            cache(tokens(1, 8))
        before = cache.stats()
        cache.save(tmp_path)
    again = build(GENERATORS["llama"])
    with LLMCache.load(again, tmp_path) as cache:
        after = cache.stats()
        assert (after.n_stored, after.n_blocks, after.held_nbytes) == (
            before.n_stored,
            before.n_blocks,
            before.held_nbytes,
        )
        for one, expected in zip(inputs, first, strict=True):
            assert same(cache(**one), expected, one["input_ids"].shape[1])
        assert cache.stats().hits == {"exact": 3}
        if left is None:
            cache(torch.cat([tokens(1, 10, seed=10), tokens(1, 4)], dim=1))
            assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", 10)
        assert cache.purge(namespace="other") == 1


def test_of_what_prompts_share_one_copy_is_saved(tmp_path: Path) -> None:
    model = build(GENERATORS["llama"])
    with wrapped(model) as cache:
        ids = torch.cat([tokens(1, 40).expand(8, -1), tokens(8, 3, seed=1)], dim=1)
        for row in ids:
            cache(row[None])
        cache.save(tmp_path)
        size = sum(path.stat().st_size for path in tmp_path.glob("states-*"))
        assert size < 2 * cache.stats().held_nbytes < 8 * 43 * PER_TOKEN


def test_a_save_of_a_former_version_is_served(tmp_path: Path) -> None:
    model = build(GENERATORS["llama"])
    inputs = padded([10, 3], left=True)
    with wrapped(model, prefix=False) as cache:  # entries, as all versions before saved them
        first = cache(**inputs)
        cache.save(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"].pop("prefix")
    path.write_text(json.dumps(manifest | {"format": 7}))
    with LLMCache.load(build(GENERATORS["llama"]), tmp_path) as cache:
        for _ in range(2):
            assert same(cache(**inputs), first, 10)
        assert cache.stats().hits == {"exact": 4}
        cache(tokens(1, 7, seed=50))
        assert (cache.stats().n_entries, cache.stats().n_stored) == ({3: 2}, 3)
        cache.save(tmp_path)
    with LLMCache.load(build(GENERATORS["llama"]), tmp_path) as cache:
        assert (cache.stats().n_entries, cache.stats().n_stored) == ({3: 2}, 3)
        cache(**inputs)
        cache(tokens(1, 7, seed=50))
        assert cache.stats().hits == {"exact": 3}
