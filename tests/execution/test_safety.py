"""States of other dtypes or adapters are never served; going back serves the old ones again."""

import pytest
import torch
from peft import get_peft_model
from peft.helpers import rescale_adapter_scale

from llmcache import LLMCache
from tests.execution.calls import X, assert_close, check, lora, plain, quietly, run, two_adapters, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, states, tokens


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bart"])
def test_autocast_keeps_apart(family: str) -> None:
    cache = wrapped(BARE[family], tau=-1.0, allow_unsafe=True)
    check(cache, n_hits=2, **X)
    with bf16():
        cast = states(cache(**X))
        assert cache.stats().n_hits == 2
        assert torch.equal(cast, plain(cache, **X))
        check(cache, n_hits=4, **X)
    check(cache, n_hits=4, **X)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_kv_made_under_autocast_keeps_its_dtype(family: str) -> None:
    """There it is narrower than the states."""
    model = build(BARE[family])
    first, both = tokens(1, 9), torch.cat([tokens(1, 9), tokens(1, 9, seed=1)])
    with bf16():
        plain = [quietly(model, input_ids=ids, use_cache=True) for ids in (first, both)]
        cache = LLMCache.wrap(model)
        for expected, ids in zip((plain[0], *plain, plain[1]), (first, first, both, both), strict=True):
            output = cache(ids, use_cache=True)
            for layer, other in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
                assert (layer.keys.dtype, layer.values.dtype) == (other.keys.dtype, other.values.dtype)
                torch.testing.assert_close(layer.keys, other.keys, atol=0.1, rtol=0.1)
    assert cache.stats().hits == {"exact": 4}


def test_rounded_entries_are_never_served_as_lossless() -> None:
    """fp16 keeps fp16 states bit for bit; after a cast to fp32 it does not."""
    cache = LLMCache.wrap(build(BARE["bert"]).half(), compression="fp16")
    check(cache, n_hits=2, **X)
    cache.model.float()
    check(cache, **X)


@pytest.mark.parametrize("payload", ["sequence", "cls"])
def test_states_of_padding_are_not_answers(payload: str) -> None:
    """[CLS] heads read place 0, padding or not; entries keep valid tokens."""
    check(wrapped(CLASSIFIERS["bert"], payload=payload), **padded([6, 4], left=True))


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_an_adapter_added_after_wrapping() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    first = states(cache(**X))
    model = get_peft_model(cache.model, lora()).eval()
    assert not torch.allclose(run(model, **X), first)
    assert cache.stats().n_hits == 0
    with model.disable_adapter():
        assert_close(run(model, **X), first)


def test_without_its_adapter_a_model_is_another_one() -> None:
    cache = LLMCache.wrap(two_adapters())
    check(cache, n_hits=2, **X)
    with cache.model.disable_adapter():
        check(cache, n_hits=2, **X)


def test_merging_and_unmerging() -> None:
    cache = LLMCache.wrap(two_adapters())
    check(cache, **X)
    cache.model.merge_adapter()
    check(cache, **X)
    cache.model.unmerge_adapter()
    check(cache, **X)
    cache.model.merge_adapter()
    with cache.model.disable_adapter():  # unmerges within the forward
        check(cache, **X)
    check(cache, **X)


def test_merging_another_adapter_than_the_active_one() -> None:
    cache = LLMCache.wrap(two_adapters())
    check(cache, **X)
    cache.model.merge_adapter(["south"])
    check(cache, **X)


def test_merging_for_good() -> None:
    cache = LLMCache.wrap(two_adapters())
    cache(**X)
    merged = cache.model.merge_and_unload()
    ours = run(merged, **X)
    cache.unwrap()
    assert torch.equal(ours, run(merged, **X))


def test_the_scale_of_an_adapter() -> None:
    cache = LLMCache.wrap(two_adapters())
    check(cache, **X)
    with rescale_adapter_scale(cache.model, 0.1):
        check(cache, **X)
    check(cache, **X)


def test_adapters_named_row_by_row() -> None:
    cache = LLMCache.wrap(two_adapters())
    cache(**{name: value[:1] for name, value in X.items()}, adapter_names=["north"])  # a batch is partly known
    for names in (["north", "south"], ["north", "north"], ["south", "south"], ["__base__", "north"]):
        check(cache, **X, adapter_names=names)


def test_transformers_own_adapters() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    check(cache, **X)
    cache.model.add_adapter(lora(), "north")
    cache.model.eval()
    check(cache, **X)
    cache.model.disable_adapters()
    check(cache, **X)
    cache.model.enable_adapters()
    check(cache, **X)
