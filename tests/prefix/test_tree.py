"""A batch of prompts as a tree: each different token is computed once, and outputs are the plain model's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from llmcache.calls.tree import _STEP, Branch, Columns, Part, Tree
from tests.contract.judge import check_same, uncomputed
from tests.prefix.prompts import FAMILIES, branch, close, fail_once, plainly, run, wrapped
from tests.tiny_models import batch, build, tokens
from tests.tiny_models import llama as llama_config

STEM = tokens(1, 24)

# -- growth ------------------------------------------------------------------------------------------------------------

Drawn = tuple[list[int], int, int, int]  # tokens of a row, its origin, and how many are known and wanted


@st.composite
def drawn_rows(draw: Any) -> list[Drawn]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        n = len(ids)
        rows.append((ids, draw(st.integers(0, 1)), draw(st.integers(0, n - 1)), draw(st.integers(0, n))))
    return rows


def held(ids: Sequence[int], begin: int, end: int) -> list[Part]:
    """Return the columns of tokens, one by one; their states are the tokens."""
    return [(Columns((), (), torch.tensor([[[one]]])), 0, 1) for one in ids[begin:end]]


def grown(rows: Sequence[Drawn]) -> tuple[Tree, list[Branch]]:
    branches = []
    for number, (ids, origin, n_known, n_wanted) in enumerate(rows):
        packed, known = np.array(ids, np.uint16).tobytes(), partial(held, ids)
        branches.append(Branch(number, np.array(ids), packed, origin, n_known, known, n_wanted))
    return Tree(branches), branches


def beginnings(rows: Sequence[Drawn], n_of_row: Sequence[int]) -> set[tuple[int, tuple[int, ...]]]:
    """Return the different beginnings of rows, up to a number of tokens of each."""
    return {
        (origin, tuple(ids[: i + 1])) for (ids, origin, *_), n in zip(rows, n_of_row, strict=True) for i in range(n)
    }


@settings(max_examples=200, deadline=None, derandomize=True)
@given(drawn_rows())
def test_a_tree_has_each_different_beginning_once_and_a_path_for_each_row(rows: list[Drawn]) -> None:
    tree, branches = grown(rows)
    known, wanted = (beginnings(rows, [row[i] for row in rows]) for i in (2, 3))
    different = beginnings(rows, [len(row[0]) for row in rows])
    assert sum(len(one.ids) for one in tree.segments) == len(different)
    assert tree.n_new == len(different - known)
    assert sum(len(one.ids) - tree.served_tokens()[one.number] for one in branches) == tree.n_new
    for (ids, origin, n_known, n_wanted), one in zip(rows, branches, strict=True):
        assert np.concatenate([segment.ids for segment in one.path]).tolist() == ids
        assert {segment.origin for segment in one.path} == {origin}
        assert [segment.begin for segment in one.path] == [0, *(segment.end for segment in one.path[:-1])]
        assert one.path[-1].end == len(ids) and {id(segment) for segment in one.path} <= set(map(id, tree.segments))
        assert all(segment.parts is not None for segment in one.path if segment.end <= n_known)
        new = [segment for segment in one.path if segment.parts is None]
        for segment in new:
            segment.parts = held(segment.ids.tolist(), 0, len(segment.ids))
        found = [int(columns.states[first]) for columns, first, _ in one.parts(0, len(ids))]
        assert found == ids
        kept = beginnings([(ids, origin, 0, 0)], [one.n_kept()])
        assert one.n_kept() >= n_wanted and all(segment.is_inner for segment in new if segment.end <= n_wanted)
        assert all((origin, tuple(ids[:i])) in wanted | known | different for i in range(1, 1 + len(kept)))
        for segment in new:
            segment.parts = None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn_rows(), st.booleans())
def test_steps_come_after_the_steps_of_their_ancestors(rows: list[Drawn], packs: bool) -> None:
    tree, _ = grown(rows)
    steps = [*tree.steps(5, packs)]
    order = [one for step in steps for one in step]
    assert {*map(id, order)} == {id(one) for one in tree.segments if one.parts is None} and len(order) == len(
        {*map(id, order)}
    )
    for i, one in enumerate(order):
        above = one.path()[:-1]
        assert all(parent.parts is not None or any(parent is before for before in order[:i]) for parent in above)
    assert all(len(step) == 1 or (packs and sum(len(one.ids) for one in step) <= 5) for step in steps)


# -- computed as a tree, and plainly -----------------------------------------------------------------------------------


def of(*lengths: tuple[int, int]) -> list[Tensor]:
    """Return prompts of a number of tokens of `STEM`, and a number of their own."""
    return [branch(STEM, n, n + own, seed) for seed, (n, own) in enumerate(lengths, start=2)]


ROWS: dict[str, list[Tensor]] = {
    "one beginning": of((20, 4), (20, 2), (20, 1), (18, 4)),
    "equal rows": [*of((12, 4)) * 3, *of((12, 3))],
    "one the beginning of another": [STEM, STEM[:, :9], STEM[:, :17], STEM[:, :16]],
    "known to different depths": of((9, 12), (20, 2), (16, 4), (3, 2)),
    "one wholly new": [STEM[:, :20], *of((20, 3), (0, 15), (18, 1))],
    "one token": [STEM[:, :1], STEM, STEM[:, :23], tokens(1, 1, 9)],
}


def inputs_of(rows: list[Tensor], padding: str, positions: str) -> dict[str, Tensor]:
    inputs = batch(rows, left=padding == "left")
    if positions == "counted":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return inputs


@pytest.mark.parametrize(("padding", "positions"), [("left", "none"), ("left", "counted"), ("right", "none")])
@pytest.mark.parametrize("what", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_kv_are_the_plain_models(family: str, what: str, padding: str, positions: str) -> None:
    inputs = inputs_of(ROWS[what], padding, positions)
    model, left_out = build(FAMILIES[family]), None
    for known in ([], [STEM], [STEM[:, :17], ROWS[what][0]]):
        with wrapped(model, *known) as cache:
            for more in ({}, {"use_cache": False}, {"logits_to_keep": 1}, {"return_dict": False}, {}):
                expected = plainly(cache, **inputs, **more)
                left_out = uncomputed(model, inputs)
                check_same(
                    run(model, **inputs, **more), expected, padding=left_out, where=f"{len(known)} known, {more}"
                )
            assert {outcome.rung for outcome in cache.last} == {"exact"} and cache.stats().errors == 0


PADDED = batch(ROWS["known to different depths"], left=True)
PADDED["input_ids"][PADDED["attention_mask"] == 0] = 7  # the states of token 0 may be zeros


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_and_the_trunk_get_padding_as_the_model_computes_it(family: str) -> None:
    model = build(FAMILIES[family])
    trunk = model.base_model
    of_head: list[dict[str, Any]] = [{"labels": PADDED["input_ids"]}, {"logits_to_keep": 6}]
    with wrapped(model, STEM) as cache:
        for _ in range(2):
            for more in ({}, {"use_cache": False}):
                run(model, **PADDED, **more)  # stores rows without padding
                for called, inputs in ((trunk, PADDED), *((model, PADDED | one) for one in of_head)):
                    with cache.disabled():
                        expected = run(called, **inputs, **more)
                    check_same(run(called, **inputs, **more), expected, padding=uncomputed(called, inputs))
        assert cache.stats().errors == 0


def test_a_hook_on_the_trunk_gets_padding_as_the_model_computes_it(gpt2: Any) -> None:
    seen: list[Tensor] = []
    with wrapped(gpt2, STEM) as cache:
        run(gpt2, **PADDED)
        hook = gpt2.transformer.register_forward_hook(lambda *given: seen.append(given[-1][0]))
        run(gpt2, **PADDED)
        plainly(cache, **PADDED)
        hook.remove()
        assert cache.stats().errors == 0
    close(seen[0], seen[1])


@pytest.mark.parametrize("who", ["a hook of the trunk", "a hook of the head", "the caller"])
def test_logits_are_made_of_states_as_they_were_edited(llama: Any, who: str) -> None:
    ids, found = torch.cat([STEM.expand(4, -1), torch.arange(5, 9)[:, None]], dim=1), []

    def edit(states: Tensor) -> None:
        states[1:] *= 2

    cache = wrapped(llama)
    if who == "a hook of the trunk":
        llama.model.register_forward_hook(lambda *given: edit(given[-1][0]))
    elif who == "a hook of the head":
        llama.lm_head.register_forward_pre_hook(lambda *given: edit(given[-1][0]))
    for call in (cache, partial(plainly, cache), cache):
        if who == "the caller":
            states = run(llama.model, ids)[0]
            with torch.inference_mode():
                edit(states)
                found.append(llama.lm_head(states if call is cache else states.clone()))
        else:
            found.append(call(ids).logits)
    close(found[0], found[1])
    close(found[2], found[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [{"do_sample": True, "num_return_sequences": 8}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=str,
)
def test_samples_beams_and_static_caches_continue_alike(family: str, how: dict[str, Any]) -> None:
    model, found = build(FAMILIES[family]), []
    inputs = batch(of((20, 2), (20, 4), (12, 3)), left=True)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, **how}
    with wrapped(model, STEM) as cache:
        for context in (cache.disabled(), cache.namespace("own"), cache.namespace("own")):
            torch.manual_seed(0)
            with context:
                found.append(model.generate(**inputs, **settings))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert cache.stats().hits["prefix"] and cache.stats().errors == 0


def test_a_static_cache_is_filled(llama: Any) -> None:
    inputs, step = batch(of((20, 2), (20, 4), (12, 3)), left=True), tokens(3, 1, 9)
    found = []
    with wrapped(llama, STEM) as cache:
        for call in (partial(plainly, cache), cache, cache):
            kv_cache = StaticCache(config=llama.config, max_cache_len=32)
            call(**inputs, past_key_values=kv_cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(step)], dim=1)
            found.append(call(step, attention_mask=mask, past_key_values=kv_cache).logits)
    close(found[1], found[0])
    close(found[2], found[0])


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.fixture
def long_llama() -> Any:
    return build(lambda: tf.LlamaForCausalLM(llama_config(max_position_embeddings=1024)))


class Columns0:
    """Counts the columns that layer 0 receives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n, original = 0, LlamaDecoderLayer.__call__

        def counted(layer: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.n += states.shape[0] * states.shape[1] * (layer.self_attn.layer_idx == 0)
            return original(layer, states, *args, **kwargs)

        patch.setattr(LlamaDecoderLayer, "__call__", counted)


LONG, OWN = tokens(1, 300), tokens(16, 20, 1)
OWN[:, 0] = torch.arange(16) + 5
COLD: dict[str, tuple[list[Tensor], Tensor, int]] = {
    "16 rows of 300 shared and 20 own": ([], torch.cat([LONG.expand(16, -1), OWN], 1), 620),
    "8 equal rows": ([], tokens(1, 500).expand(8, -1), 500),
    "rows with nothing in common": ([], tokens(4, 20), 80),
    "4 rows of 40 shared and 400 own": ([], torch.cat([LONG[:, :40].expand(4, -1), tokens(4, 400, 5)], 1), 1760),
}
KNOWN: dict[str, tuple[list[Tensor], Tensor, int]] = {
    "17 tokens, of which a block is known": ([LONG], branch(LONG, 16, 17), 1),
    "a block that is known": ([LONG], LONG[:, :16], 1),
    "3 rows known, 1 new": ([*tokens(4, 40)[:3].split(1)], tokens(4, 40), 40),
    "4 rows with a known beginning": ([LONG], torch.cat([LONG[:, :64].expand(4, -1), tokens(4, 3, 5)], 1), 12),
}


@pytest.mark.parametrize(
    ("what", "use_cache"), [*((what, True) for what in COLD | KNOWN), *((what, False) for what in COLD)]
)
def test_each_different_token_is_computed_once(
    long_llama: Any, what: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, ids, n_computed = (COLD | KNOWN)[what]
    cache = wrapped(long_llama, tokens(2, 2, 8), prefix={"block": 16})
    for prompt in known:
        cache(prompt, use_cache=use_cache)
    plain = plainly(cache, ids).logits
    counted = Columns0(monkeypatch)
    for _ in range(2):
        close(cache(ids, use_cache=use_cache).logits, plain)
        assert counted.n == n_computed
    assert cache.stats().errors == 0


def test_decoding_without_kv_computes_a_token_a_step(long_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    ids = LONG[:, :40]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = wrapped(long_llama, tokens(2, 2, 8), prefix={"block": 8})
    with cache.disabled():
        expected = long_llama.generate(**inputs, **settings)
    counted = Columns0(monkeypatch)
    assert torch.equal(long_llama.generate(**inputs, **settings), expected)
    assert counted.n < 40 + 41 + 22 * 9
    assert cache.stats().n_entries.popitem()[1] <= 2 + 24 // 8 and cache.stats().errors == 0


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_model_in_a_later_step_is_its_own(llama: Any) -> None:
    ids = torch.cat([STEM.expand(4, -1), tokens(4, 3, 5)], 1)
    ids[2, -1] = 10**6
    cache, told = wrapped(llama), []
    for call in (cache, partial(plainly, cache)):
        kv_cache = DynamicCache()
        with pytest.raises(IndexError) as error:
            call(ids, past_key_values=kv_cache)
        told.append((str(error.value), kv_cache.get_seq_length()))
    stats = cache.stats()
    assert told[0] == told[1] and (stats.n_stored, stats.n_blocks, stats.held_nbytes) == (0, 0, 0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("known", [[], [STEM]], ids=["cold", "known"])
def test_a_step_that_fails_leaves_nothing(
    llama: Any, known: list[Tensor], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_STEP, "cpu", 8)
    ids = torch.cat([STEM.expand(6, -1), tokens(6, 3, 5)], 1)
    cache, kv_cache = wrapped(llama, tokens(1, 2, 8), *known), DynamicCache()
    before, plain = cache.stats(), plainly(cache, ids).logits
    with monkeypatch.context() as patch:
        fail_once(patch, LlamaMLP, "__call__", 6, error)  # of 4 layers: in the second step
        if error is RuntimeError:
            close(cache(ids, past_key_values=kv_cache).logits, plain)
            assert (cache.stats().errors, kv_cache.get_seq_length()) == (1, 27)
            return
        with pytest.raises(error):
            cache(ids, past_key_values=kv_cache)
    after = cache.stats()
    assert kv_cache.get_seq_length() == 0
    assert (after.n_stored, after.n_blocks, after.held_nbytes) == (before.n_stored, before.n_blocks, before.held_nbytes)
    close(cache(ids, past_key_values=kv_cache).logits, plain)


# -- stores, namespaces, purges ----------------------------------------------------------------------------------------

SHARED = torch.cat([STEM.expand(3, -1), tokens(3, 6, 5)], 1)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_store_has_what_the_rows_of_a_batch_share(tmp_path: Path, use_cache: bool) -> None:
    served = []
    for ids in (SHARED, SHARED, branch(STEM, 24, 30, 9)):
        model = build(FAMILIES["llama"])
        with wrapped(model, store={"name": "disk", "folder": str(tmp_path)}) as cache:
            plain = plainly(cache, ids).logits
            close(cache(ids, use_cache=use_cache).logits, plain)
            served.append([(outcome.rung, outcome.n_prefix) for outcome in cache.last])
            assert cache.stats().errors == 0
    assert served == [[(None, 0), ("prefix", 24), ("prefix", 24)], [("exact", 0)] * 3, [("prefix", 24)]]


def test_what_is_purged_or_of_another_namespace_serves_no_row(llama: Any) -> None:
    cache = wrapped(llama)
    cold = [0, 24, 24]

    def served(ids: Tensor = SHARED) -> list[int]:
        plain = plainly(cache, ids).logits
        close(cache(ids).logits, plain)
        return [-1 if outcome.rung == "exact" else outcome.n_prefix for outcome in cache.last]

    assert served() == cold and served() == [-1, -1, -1]
    with cache.namespace("other"):
        assert served() == cold
    with cache.namespace("reader", prefixes_from="other"):
        assert served() == [29, 29, 29]
    with cache.namespace("other"):
        cache.forget(input_ids=SHARED)
        assert served() == cold
    assert served() == [-1, -1, -1]
    cache.clear()
    assert served() == cold
