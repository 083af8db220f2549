"""Prompts that share a prefix: outputs equal the plain model's, whatever the batch and the K/V cache."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaMLP

from llmcache.calls.columns import ColumnRunner
from tests.contract.judge import check_same
from tests.prefix.prompts import (
    CACHES,
    FAMILIES,
    branch,
    close,
    fail_once,
    plainly,
    run,
    wrapped,
)
from tests.tiny_models import batch, build, tokens

STEM = tokens(1, 24)
ASKED = branch(STEM, 20, 24)
ROWS = [branch(STEM, n, length, seed) for seed, (n, length) in enumerate([(20, 22), (9, 15), (16, 16), (12, 24)])]


@pytest.mark.parametrize("left", [True, False])
def test_rows_with_different_prefixes_and_padding(gpt2: Any, left: bool) -> None:
    inputs = batch(ROWS, left)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    plain, valid, known = run(gpt2, **inputs).logits, inputs["attention_mask"].bool(), [20, 9, 16, 12]
    cache = wrapped(gpt2, STEM)
    close(cache(**inputs).logits[valid], plain[valid])
    assert [outcome.n_prefix for outcome in cache.last] == known
    cache.clear()
    cache(STEM)
    close(cache(**inputs, logits_to_keep=1).logits, plain[:, -1:])
    # On the right, the head reads padding of three rows; of the fourth, 12 of all 96 columns are known.
    assert [outcome.n_prefix for outcome in cache.last] == (known if left else [0] * 4)
    assert left or [outcome.missed for outcome in cache.last] == ["padding"] * 3 + ["too_short"]
    assert cache.stats().errors == 0


@pytest.mark.parametrize("asked", ["loss", "all logits", "two logits", "the trunk"])
@pytest.mark.parametrize("left", [True, False])
def test_padding_is_left_out_only_where_nobody_reads_it(llama: Any, asked: str, left: bool) -> None:
    inputs = batch([branch(STEM, 20, 22, seed=0), STEM[:, :16]], left)
    inputs["input_ids"][inputs["attention_mask"] == 0] = 7  # the states of token 0 are zeros
    more: dict[str, Any] = {"loss": {"labels": inputs["input_ids"]}, "two logits": {"logits_to_keep": 2}}.get(asked, {})
    called = llama.model if asked == "the trunk" else llama
    plain = run(called, **inputs, **more)
    with wrapped(llama, STEM) as cache:
        run(llama, **batch([tokens(1, 5)], left), logits_to_keep=1)  # must not affect the next call
        served = run(called, **inputs, **more)
        assert cache.stats().errors == 0
    for name in ("loss", "logits", "last_hidden_state"):
        if name in plain and plain[name] is not None:
            where = inputs["attention_mask"].bool() if asked == "all logits" else ...
            close(served[name][where], plain[name][where])


@pytest.mark.parametrize("who", ["a hook of the head", "a hook of the trunk"])
def test_padding_is_computed_where_others_than_the_head_read_it(llama: Any, who: str) -> None:
    prompts = [tokens(1, 16), tokens(1, 8, seed=5)]
    inputs = batch(prompts, left=True)
    inputs["input_ids"][1, :8] = 7  # the states of token 0 are zeros
    plain = run(llama.model, **inputs).last_hidden_state
    seen: list[Tensor] = []
    with wrapped(llama, *prompts) as cache:
        if who == "a hook of the head":
            hook = llama.register_forward_pre_hook(lambda *_: seen.append(llama.model(**inputs).last_hidden_state))
        else:
            hook = llama.model.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
        cache(**inputs, logits_to_keep=1)
        hook.remove()
    close(seen[0], plain)


def test_a_row_that_is_known_as_a_whole_does_not_hold_the_others_up(llama: Any) -> None:
    inputs = batch([STEM[:, :8], ASKED], left=False)
    plain = run(llama, **inputs).logits
    cache = wrapped(llama, STEM)
    close(cache(**inputs, logits_to_keep=4).logits, plain[:, -4:])
    assert [outcome.n_prefix for outcome in cache.last] == [0, 20]  # padding that is read is computed
    cache.clear()
    cache(STEM)
    where = inputs["attention_mask"].bool()
    close(cache(**inputs).logits[where], plain[where])
    assert [outcome.n_prefix for outcome in cache.last] == [8, 20]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("starts", [(0, 7), (7, 0), (7, 7)])
def test_a_prompt_whose_positions_begin_elsewhere(family: str, starts: tuple[int, int]) -> None:
    first, then = (torch.arange(24)[None] + start for start in starts)
    cache = wrapped(build(FAMILIES[family]))
    cache(STEM, position_ids=first)
    plain = plainly(cache, ASKED, position_ids=then)
    found = cache(ASKED, position_ids=then)
    check_same(found, plain)
    is_known = family != "gpt2" or starts[0] == starts[1]  # the states of learned positions are others
    assert cache.last[0].n_prefix == 20 * is_known


def test_a_mask_that_is_not_causal_is_left_to_the_model(llama: Any) -> None:
    stem, causal = tokens(1, 12), torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    seen = causal.clone()
    seen[..., 5, 3] = False
    cache = wrapped(llama, stem)
    plain = plainly(cache, stem, attention_mask=seen, past_key_values=DynamicCache()).logits
    assert torch.equal(cache(stem, attention_mask=seen, past_key_values=DynamicCache()).logits, plain)
    assert cache.last[0].bypassed == "mask_4d"
    cache(stem, attention_mask=causal, past_key_values=DynamicCache())
    assert cache.last[0].rung == "exact"


# -- trouble -----------------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Tensor, int]] = {
    "an id out of range": (torch.cat([STEM[:, :20], torch.tensor([[10**6]])], dim=1), 0),
    "beyond the context": (branch(STEM, 24, 68), 0),  # of 64
    "an empty prompt": (STEM[:, :0], 0),
    "a static cache that is too small": (ASKED, 22),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_model_refuses_is_refused_as_without_a_cache(gpt2: Any, what: str) -> None:
    (prompt, room), cache, told = REFUSED[what], wrapped(gpt2, STEM), []
    for ask in (cache, partial(plainly, cache)):
        kv_cache = StaticCache(config=gpt2.config, max_cache_len=room) if room else DynamicCache()
        with pytest.raises((IndexError, RuntimeError)) as error:
            ask(prompt, past_key_values=kv_cache)
        told.append((type(error.value), str(error.value), int(kv_cache.get_seq_length())))
    assert told[0] == told[1]
    assert (cache.stats().n_prefix_tokens, cache.stats().errors) == (0, 0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("broken", "ids"),
    [
        ((tf.Cache, "update", 2), ASKED),
        ((tf.Cache, "update", 3), STEM),
        ((LlamaMLP, "__call__", 2), ASKED),  # not `forward`, which is watched
        ((ColumnRunner, "_fill", 1), ASKED),
    ],
    ids=["while K/V is filled", "while all of it is filled", "in a layer", "while the output is completed"],
)
def test_what_fails_leaves_no_past(
    llama: Any,
    broken: tuple[Any, str, int],
    ids: Tensor,
    error: type[BaseException],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, kv = wrapped(llama), CACHES[kind](llama.config)
    cache(STEM, past_key_values=CACHES[kind](llama.config))
    plain = plainly(cache, ids).logits
    with monkeypatch.context() as patch:
        fail_once(patch, *broken, error)
        if error is RuntimeError:  # the cache computes the call; a model's own error would come again
            close(cache(ids, past_key_values=kv).logits, plain)
            assert (cache.stats().errors, kv.get_seq_length()) == (1, 24)
            return
        with pytest.raises(error):
            cache(ids, past_key_values=kv)
    assert (kv.get_seq_length(), cache.stats().hits) == (0, {})
    close(cache(ids, past_key_values=kv).logits, plain)
