"""States of other weights, adapters, dtypes or kernels are never served; going back serves the old ones again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from llmcache import LLMCache
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, states, tokens

X = padded([6, 4])
Change = Callable[[nn.Module], Any]


def plain(cache: LLMCache, **more: Any) -> torch.Tensor:
    with cache.disabled():
        return states(cache(**X, **more))


def hits(cache: LLMCache) -> int:
    return cache.stats().n_hits


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(1.5)


CHANGES: dict[str, Change] = {
    "in place": scaled,
    "load_state_dict": lambda model: model.load_state_dict(build(BARE["bert"], seed=7).state_dict()),
    "assigned state dict": lambda model: model.load_state_dict(build(BARE["bert"], seed=7).state_dict(), assign=True),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "embedding": lambda model: nn.init.normal_(model.embeddings.word_embeddings.weight),
    "new parameter": lambda model: setattr(
        model.encoder.layer[0].output.dense, "weight", nn.Parameter(torch.randn(32, 48))
    ),
    "new layer": lambda model: setattr(
        model.encoder.layer[0], "output", build(BARE["bert"], 5).encoder.layer[0].output
    ),
    "eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tau", [None, -1.0])
def test_nothing_is_served_after_a_change(change: str, tau: float | None) -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model, tau=tau)
    cache(**X)
    before = hits(cache)
    CHANGES[change](model)
    cold = states(cache(**X))
    assert hits(cache) == before
    assert torch.equal(cold, plain(cache))
    warm = states(cache(**X))
    assert hits(cache) == before + 2
    where = X["attention_mask"].bool()
    torch.testing.assert_close(warm[where], cold[where])
    assert warm.dtype == cold.dtype


def test_going_back_serves_the_old_entries_again() -> None:
    model = build(BARE["bert"])
    original = {name: value.clone() for name, value in model.state_dict().items()}
    cache = LLMCache.wrap(model)
    first = states(cache(**X))
    model.load_state_dict(build(BARE["bert"], seed=7).state_dict())
    cache(**X)
    assert hits(cache) == 0
    model.load_state_dict(original)
    again = states(cache(**X))
    assert hits(cache) == 2
    torch.testing.assert_close(again[X["attention_mask"].bool()], first[X["attention_mask"].bool()])


def test_attention_kernels_keep_apart_and_come_back() -> None:
    model = build(BARE["gpt2"])
    cache = LLMCache.wrap(model)
    for implementation, expected in (("sdpa", 0), ("eager", 0), ("sdpa", 2), ("eager", 4)):
        model.set_attn_implementation(implementation)
        cache(**X)
        assert hits(cache) == expected


@contextmanager
def bf16() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bart"])
def test_autocast_keeps_apart(family: str) -> None:
    model = build(BARE[family])
    where = X["attention_mask"].bool()
    cache = LLMCache.wrap(model, tau=-1.0, allow_unsafe=True)
    cold = states(cache(**X))
    with bf16():
        cast = states(cache(**X))
        assert hits(cache) == 0
        assert torch.equal(cast, plain(cache))
        torch.testing.assert_close(states(cache(**X))[where], cast[where])
    assert hits(cache) == 2
    torch.testing.assert_close(states(cache(**X))[where], cold[where])
    assert hits(cache) == 4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_kv_made_under_autocast_keeps_its_dtype(family: str) -> None:
    """There it is narrower than the states."""
    model = build(BARE[family])
    first, both = tokens(1, 9), torch.cat([tokens(1, 9), tokens(1, 9, seed=1)])
    with bf16(), torch.inference_mode():
        plain = [model(first, use_cache=True), model(both, use_cache=True)]
    cache = LLMCache.wrap(model)
    with bf16():
        for expected, ids in zip((plain[0], *plain, plain[1]), (first, first, both, both), strict=True):
            output = cache(ids, use_cache=True)
            for layer, other in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
                assert (layer.keys.dtype, layer.values.dtype) == (other.keys.dtype, other.values.dtype)
                torch.testing.assert_close(layer.keys, other.keys, atol=0.1, rtol=0.1)
    assert cache.stats().hits == {"exact": 4}


def test_rounded_entries_are_never_served_as_lossless() -> None:
    """fp16 keeps fp16 states bit for bit; after a cast to fp32 it does not."""
    model = build(BARE["bert"]).half()
    cache = LLMCache.wrap(model, compression="fp16")
    cache(**X)
    cache(**X)
    assert hits(cache) == 2
    model.float()
    cache(**X)
    where = X["attention_mask"].bool()
    torch.testing.assert_close(states(cache(**X))[where], plain(cache)[where], atol=1e-5, rtol=1e-5)


def test_a_fused_optimizer_step_between_two_calls() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    cache(**X)
    step = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model.train()
    model(**X, labels=torch.tensor([0, 1])).loss.backward()
    step.step()
    model.eval()
    assert torch.equal(states(cache(**X)), plain(cache))


@pytest.mark.parametrize("payload", ["sequence", "cls"])
def test_states_of_padding_are_not_answers(payload: str) -> None:
    """[CLS] heads read place 0, padding or not; entries keep valid tokens."""
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 4], left=True)
    cache = LLMCache.wrap(model, payload=payload)
    with cache.disabled():
        expected = cache(**inputs).logits
    for _ in range(2):
        torch.testing.assert_close(cache(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


# -- adapters ----------------------------------------------------------------------------------------------------------


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False, **more)


def two_adapters() -> PeftModel:
    torch.manual_seed(3)
    model = get_peft_model(build(CLASSIFIERS["bert"]), lora(), adapter_name="north")
    model.add_adapter("south", lora())
    model.set_adapter("north")
    return model.eval()


def agrees(cache: LLMCache, **more: Any) -> bool:
    """Whether the wrapped model, cold or warm, answers as the plain one does."""
    expected = plain(cache, **more)
    return all(torch.allclose(states(cache(**X, **more)), expected, atol=1e-5) for _ in range(2))


def test_an_adapter_added_after_wrapping() -> None:
    base = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(base)
    first = states(cache(**X))
    model = get_peft_model(base, lora()).eval()
    with torch.inference_mode():
        adapted = states(model(**X))
    assert hits(cache) == 0
    assert not torch.allclose(adapted, first)
    with model.disable_adapter(), torch.inference_mode():
        torch.testing.assert_close(states(model(**X)), first, atol=1e-5, rtol=1e-5)


def test_switching_adapters_serves_each_its_own() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    for adapter, expected in (("north", 0), ("south", 0), ("north", 2), ("south", 4)):
        model.set_adapter(adapter)
        torch.testing.assert_close(states(cache(**X)), plain(cache), atol=1e-5, rtol=1e-5)
        assert hits(cache) == expected
    with model.disable_adapter():
        assert torch.equal(states(cache(**X)), plain(cache))
    assert hits(cache) == 4


def test_merging_and_unmerging() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    model.merge_adapter()
    assert agrees(cache)
    model.unmerge_adapter()
    assert agrees(cache)
    model.merge_adapter()
    with model.disable_adapter():  # unmerges within the forward
        assert agrees(cache)
    assert agrees(cache)


def test_merging_another_adapter_than_the_active_one() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    model.merge_adapter(["south"])
    assert agrees(cache)


def test_merging_for_good() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    cache(**X)
    merged = model.merge_and_unload()
    with torch.inference_mode():
        ours = states(merged(**X))
        cache.unwrap()
        assert torch.equal(ours, states(merged(**X)))


def test_the_scale_of_an_adapter() -> None:
    from peft.helpers import rescale_adapter_scale

    model = two_adapters()
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    with rescale_adapter_scale(model, 0.1):
        assert agrees(cache)
    assert agrees(cache)


def test_adapters_named_row_by_row() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    for names in (["north", "north"], ["south", "south"], ["north", "south"], ["__base__", "north"]):
        assert agrees(cache, adapter_names=names)


def test_a_row_named_adapter_in_a_batch_that_is_partly_known() -> None:
    model = two_adapters()
    cache = LLMCache.wrap(model)
    ids = tokens(2, 6)
    cache(input_ids=ids[:1], adapter_names=["north"])
    with cache.disabled():
        expected = cache(input_ids=ids, adapter_names=["north", "south"]).logits
    torch.testing.assert_close(
        cache(input_ids=ids, adapter_names=["north", "south"]).logits, expected, atol=1e-5, rtol=1e-5
    )


def test_transformers_own_adapters() -> None:
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model)
    assert agrees(cache)
    model.add_adapter(lora(), "north")
    model.eval()
    assert agrees(cache)
    model.disable_adapters()
    assert agrees(cache)
    model.enable_adapters()
    assert agrees(cache)
