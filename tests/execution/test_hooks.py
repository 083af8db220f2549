"""Installing and removing: every module's `__dict__` is restored, and an error leaves no call open."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from llmcache.banks.memory import SMALL_BYTES
from llmcache.models.hooks import Swap, parts_of
from tests.execution.calls import X, agree, assert_close, attributes, once, pair, run
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, TOKEN_HEADS, build, states, tokens


def foreign(module: nn.Module) -> Any:
    """What accelerate's `add_hook_to_module` puts in place of a forward."""
    old = module.forward

    def new_forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    return functools.update_wrapper(functools.partial(new_forward, module), old)


@pytest.mark.parametrize("family", BARE)
def test_unwrap_restores_every_dict_and_signatures_are_kept(family: str) -> None:
    model = build(BARE[family])
    run(model, **X)  # what transformers itself installs on first use is there now
    before = attributes(model)
    signatures = [inspect.signature(module.forward) for module in model.modules()]
    cache = LLMCache.wrap(model, tau=0.9, allow_unsafe=True)
    assert attributes(model) != before
    assert [inspect.signature(module.forward) for module in model.modules()] == signatures
    cache(**X)
    cache(**X)
    cache.unwrap()
    assert attributes(model) == before
    assert [list(part) for part in attributes(model)] == [list(part) for part in before]


@pytest.mark.parametrize("payload", ["sequence", "mean"])
def test_hooks_on_the_final_norm_go_too(payload: str) -> None:
    model = build(BARE["llama"])
    run(model, input_ids=tokens(1, 4))
    before = attributes(model)
    LLMCache.wrap(model, payload=payload).unwrap()
    assert attributes(model) == before


@pytest.mark.parametrize("inputs", [None, torch.full((1, 4), 10_000)], ids=["the body fails", "the model fails"])
def test_the_context_manager_unwraps_after_an_error(inputs: torch.Tensor | None) -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    with pytest.raises((KeyError, IndexError)), LLMCache.wrap(model) as cache:
        assert isinstance(cache, LLMCache)
        if inputs is None:
            raise KeyError("mine")
        cache(input_ids=inputs)
    assert attributes(model) == before


def test_a_foreign_forward_is_put_back() -> None:
    model, alone = build(BARE["bert"]), build(BARE["bert"])
    layer = model.encoder.layer[1]
    layer.forward = wrapper = foreign(layer)
    before = attributes(model)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            agree(cache, alone, **X)
        assert cache.stats().hits == {"exact": 2}
    assert layer.__dict__["forward"] is wrapper
    assert attributes(model) == before


def test_a_foreign_forward_put_on_top_stays_and_unwrap_can_be_tried_again() -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    cache = LLMCache.wrap(model)
    layer = model.encoder.layer[1]
    ours = layer.forward
    layer.forward = foreign(layer)
    with pytest.raises(WrapError, match=r"BertLayer.*then call unwrap"):
        cache.unwrap()
    layer.forward = ours  # the wrapper is removed, as the error asks
    cache.unwrap()
    assert attributes(model) == before
    LLMCache.wrap(model).unwrap()


def test_a_layer_that_lost_its_swap_costs_speed_only() -> None:
    cache, alone = pair(BARE["bert"])
    del cache.model.encoder.layer[0].forward  # what `accelerate.hooks.remove_hook_from_module` does
    assert torch.equal(states(cache(**X)), run(alone, **X))


@pytest.mark.parametrize("what", ["swap", "hook"])
def test_an_install_that_fails_half_way_restores_all(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["gpt2"])
    before = attributes(model)
    made = Swap.__init__

    def fail(*args: Any, **_: Any) -> None:
        if what == "swap" and args[1] is not model.h[2]:
            return made(*args)
        raise RuntimeError("no")

    with monkeypatch.context() as broken:
        target = (Swap, "__init__") if what == "swap" else (model.ln_f, "register_forward_hook")
        broken.setattr(*target, fail)
        with pytest.raises(RuntimeError, match="no"):
            LLMCache.wrap(model)
    assert attributes(model) == before
    LLMCache.wrap(model).unwrap()


def test_wrapping_twice_is_refused() -> None:
    model = build(CLASSIFIERS["bert"])
    other_head = TOKEN_HEADS["span"]()
    other_head.bert = model.bert
    cache = LLMCache.wrap(model)
    before = attributes(model)
    for again in (model, model.bert, other_head, nn.Sequential(model)):
        with pytest.raises(WrapError, match="already wrapped"):
            LLMCache.wrap(again)
    assert attributes(model) == before  # the refusal broke nothing
    cache.unwrap()
    with LLMCache.wrap(model.bert), pytest.raises(WrapError):
        LLMCache.wrap(model)
    LLMCache.wrap(model).unwrap()


def test_unwrap_returns_the_model_and_is_idempotent() -> None:
    model = build(BARE["bert"])
    cache = LLMCache.wrap(model)
    assert cache.unwrap() is model
    before = attributes(model)
    second = LLMCache.wrap(model)
    assert cache.unwrap() is model  # the old cache does not take the new one off
    assert attributes(model) != before
    second.unwrap()
    assert attributes(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("where", range(4))
def test_an_exception_in_a_layer_leaves_nothing_behind(where: int) -> None:
    cache, alone = pair(BARE["bert"], layers="all")
    layers = cache.model.encoder.layer
    layers[where].attention.register_forward_pre_hook(once(lambda: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        cache(**X)
    stats = cache.stats()
    assert (stats.n_stored, stats.n_requests, stats.nbytes) == (0, 0, 0)
    # A layer called by itself is outside any call.
    assert layers[0](torch.zeros(1, 3, 32)).shape == (1, 3, 32)
    assert torch.equal(states(cache(**X)), run(alone, **X))
    agree(cache, alone, **X)
    assert cache.stats().hits == {"exact": 2}


def test_an_exception_above_the_trunk_is_the_callers_alone() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    with pytest.raises(ValueError, match="Expected input batch_size"):
        cache(**X, labels=torch.zeros(7, dtype=torch.long))
    assert torch.equal(states(cache(**X)), run(alone, **X))


def test_calling_forward_itself_is_served_as_well() -> None:
    """sentence-transformers 6 calls `model.forward(...)`, which runs no native hook."""
    cache, alone = pair(CLASSIFIERS["bert"])
    with torch.inference_mode():
        cache.model.bert.forward(**X)
    assert cache.stats().n_misses == 2
    agree(cache, alone, **X)
    assert cache.stats().hits == {"exact": 2}


def test_a_layer_run_by_hand_is_the_plain_layer() -> None:
    cache, alone = pair(BARE["bert"])
    cache(input_ids=tokens(2, 5))
    hidden = torch.randn(2, 5, 32)
    with torch.no_grad():
        assert torch.equal(cache.model.encoder.layer[2](hidden), alone.encoder.layer[2](hidden))
        assert torch.equal(cache.model.encoder(hidden).last_hidden_state, alone.encoder(hidden).last_hidden_state)


def test_two_caches_in_one_thread_do_not_mix() -> None:
    pairs = pair(BARE["bert"]), pair(GENERATORS["gpt2"])
    for _ in range(2):
        for cache, alone in pairs:
            agree(cache, alone, **X)
    assert [cache.stats().hits for cache, _ in pairs] == [{"exact": 2}] * 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("length", [5, 40], ids=["small entries", "large entries"])
def test_what_the_caller_does_to_an_output_never_reaches_the_store(length: int, mode: Callable[[], Any]) -> None:
    cache, alone = pair(BARE["gpt2"])
    inputs = {"input_ids": tokens(2, length)}
    expected = run(alone, **inputs)
    with mode():
        for _ in range(3):
            output = cache.model(**inputs, use_cache=True)
            assert_close(output.last_hidden_state, expected)
            output.last_hidden_state.fill_(7.0)
            for layer in output.past_key_values.layers:
                layer.keys.fill_(7.0)
                layer.values.fill_(7.0)
    assert cache.stats().hits == {"exact": 4}
    assert (cache.stats().held_nbytes > 2 * SMALL_BYTES) == (length == 40)


@pytest.mark.parametrize("family", BARE)
def test_parts_of_a_module_are_all_its_modules_once(family: str) -> None:
    model: Any = build(BARE[family])
    model.again = next(model.children())  # at two places
    model.register_module("empty", None)
    parts = parts_of(model)
    assert {*parts} == {*model.modules()} - {model}
    assert len(parts) == len({*parts})
