"""Installing and removing: every module's `__dict__` is restored, and an error leaves no call open."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from llmcache.banks.stores.memory import SMALL_BYTES
from llmcache.models.hooks import Swap, parts_of
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, TOKEN_HEADS, build, padded, states, tokens


def run(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return states(model(**inputs))


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Every module's `__dict__`, containers copied one level deep."""
    copies = []
    for module in model.modules():
        copies.append({k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return copies


def foreign(module: nn.Module) -> Any:
    """What accelerate's `add_hook_to_module` puts in place of a forward."""
    old = module.forward

    def new_forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs)

    return functools.update_wrapper(functools.partial(new_forward, module), old)


@pytest.mark.parametrize("family", BARE)
def test_unwrap_restores_every_dict(family: str) -> None:
    model = build(BARE[family])
    inputs = padded([5, 3])
    run(model, **inputs)  # what transformers itself installs on first use is there now
    before = attributes(model)
    cache = LLMCache.wrap(model, tau=0.9, allow_unsafe=True)
    assert attributes(model) != before
    cache(**inputs)
    cache(**inputs)
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


def test_unwrap_after_an_exception_in_a_forward_restores_every_dict() -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    with pytest.raises(IndexError), LLMCache.wrap(model) as cache:
        cache(input_ids=torch.full((1, 4), 10_000))
    assert attributes(model) == before


def test_a_foreign_forward_is_put_back() -> None:
    model = build(BARE["bert"])
    inputs = padded([5, 3])
    plain = run(model, **inputs)
    layer = model.encoder.layer[1]
    layer.forward = wrapper = foreign(layer)
    before = attributes(model)
    with LLMCache.wrap(model) as cache:
        cache(**inputs)
        assert torch.equal(states(cache(**inputs))[0], plain[0])
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
    model = build(BARE["bert"])
    inputs = padded([5, 3])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    del model.encoder.layer[0].forward  # what `accelerate.hooks.remove_hook_from_module` does
    assert torch.equal(states(cache(**inputs)), plain)


def test_an_install_that_fails_half_way_restores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["gpt2"])
    before = attributes(model)
    made = Swap.__init__

    def fail_at_third(self: Swap, module: nn.Module, listener: Any) -> None:
        if module is model.h[2]:
            raise RuntimeError("no")
        made(self, module, listener)

    monkeypatch.setattr(Swap, "__init__", fail_at_third)
    with pytest.raises(RuntimeError, match="no"):
        LLMCache.wrap(model)
    assert attributes(model) == before
    monkeypatch.undo()
    LLMCache.wrap(model).unwrap()


def test_a_hook_that_cannot_be_installed_restores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BARE["gpt2"])
    before = attributes(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(model.ln_f, "register_forward_hook", refuse)
    with pytest.raises(RuntimeError, match="no"):
        LLMCache.wrap(model)
    monkeypatch.undo()
    assert attributes(model) == before


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
    LLMCache.wrap(model.bert).unwrap()


def test_wrapping_the_trunk_first_refuses_the_whole() -> None:
    model = build(CLASSIFIERS["bert"])
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


def test_the_context_manager_unwraps_when_its_body_fails() -> None:
    model = build(BARE["bert"])
    before = attributes(model)
    with pytest.raises(KeyError), LLMCache.wrap(model) as cache:
        assert isinstance(cache, LLMCache)
        raise KeyError("mine")
    assert attributes(model) == before


@pytest.mark.parametrize("family", BARE)
def test_signatures_are_kept(family: str) -> None:
    model = build(BARE[family])
    before = [inspect.signature(module.forward) for module in model.modules()]
    with LLMCache.wrap(model):
        assert [inspect.signature(module.forward) for module in model.modules()] == before


@pytest.mark.parametrize("where", range(4))
def test_an_exception_in_a_layer_leaves_nothing_behind(where: int) -> None:
    model = build(BARE["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model, layers="all")
    part = model.encoder.layer[where].attention
    part.register_forward_pre_hook(fail := FailOnce())
    with pytest.raises(ZeroDivisionError):
        cache(**inputs)
    assert fail.is_done
    stats = cache.stats()
    assert (stats.n_stored, stats.n_requests, stats.nbytes) == (0, 0, 0)
    # A layer called by itself is outside any call.
    direct = model.encoder.layer[0](torch.zeros(1, 3, 32))
    assert direct.shape == (1, 3, 32)
    assert torch.equal(states(cache(**inputs)), plain)
    torch.testing.assert_close(states(cache(**inputs))[0], plain[0])
    assert cache.stats().hits == {"exact": 2}


class FailOnce:
    """A hook that raises the first time."""

    is_done = False

    def __call__(self, *_: Any) -> None:
        if not self.is_done:
            self.is_done = True
            raise ZeroDivisionError


def test_an_exception_above_the_trunk_is_the_callers_alone() -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    with pytest.raises(ValueError, match="Expected input batch_size"):
        cache(**inputs, labels=torch.zeros(7, dtype=torch.long))
    assert torch.equal(states(cache(**inputs)), plain)


def test_calling_forward_itself_is_served_as_well() -> None:
    """sentence-transformers 6 calls `model.forward(...)`, which runs no native hook."""
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 4])
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    with torch.inference_mode():
        model.bert.forward(**inputs)
    assert cache.stats().n_misses == 2
    torch.testing.assert_close(states(cache(**inputs)), plain)
    assert cache.stats().hits == {"exact": 2}


def test_a_layer_run_by_hand_is_the_plain_layer() -> None:
    model = build(BARE["bert"])
    hidden = torch.randn(2, 5, 32)
    with torch.no_grad():
        plain, whole = model.encoder.layer[2](hidden), model.encoder(hidden).last_hidden_state
        with LLMCache.wrap(model) as cache:
            cache(input_ids=tokens(2, 5))
            assert torch.equal(model.encoder.layer[2](hidden), plain)
            assert torch.equal(model.encoder(hidden).last_hidden_state, whole)


def test_two_caches_in_one_thread_do_not_mix() -> None:
    first, second = build(BARE["bert"], seed=1), build(GENERATORS["gpt2"], seed=2)
    inputs = padded([6, 4])
    plain = run(first, **inputs), run(second, **inputs)
    caches = LLMCache.wrap(first), LLMCache.wrap(second)
    for _ in range(2):
        for cache, expected in zip(caches, plain, strict=True):
            torch.testing.assert_close(states(cache(**inputs))[0], expected[0], atol=1e-5, rtol=1e-5)
    assert [cache.stats().hits for cache in caches] == [{"exact": 2}] * 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("length", [5, 40], ids=["small entries", "large entries"])
def test_what_the_caller_does_to_an_output_never_reaches_the_store(length: int, mode: Callable[[], Any]) -> None:
    model = build(BARE["gpt2"])
    inputs = {"input_ids": tokens(2, length)}
    plain = run(model, **inputs).clone()
    cache = LLMCache.wrap(model)
    with mode():
        for _ in range(3):
            output = model(**inputs, use_cache=True)
            torch.testing.assert_close(output.last_hidden_state, plain)
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
