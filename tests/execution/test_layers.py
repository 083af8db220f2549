"""Layers that are shared, replaced, taken out, compiled or run by others than the trunk: right answers, and counted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache, UnsupportedModelError
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

SEEN, FRESH = padded([6, 6, 6]), padded([6, 6], seed=40)
MIXED = {name: torch.cat([SEEN[name], FRESH[name]]) for name in SEEN}
SETTINGS: dict[str, Any] = {"fingerprint": "mean", "tau": 0.9999, "allow_unsafe": True}  # layers are gone through
PATHS = {"bert": "encoder.layer", "gpt2": "h", "t5": "encoder.block", "mpnet": "encoder.layer"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def plain(model: nn.Module, inputs: dict[str, Tensor], **more: Any) -> Tensor:
    with torch.inference_mode():
        return states(model(**inputs, **more))


def shared(family: str, models: dict[str, Callable[[], nn.Module]] = BARE, trunk: str = "") -> nn.Module:
    """A model that runs two layers in turn: 0, 1, 0, 1."""
    model = build(models[family])
    layers: Any = model.get_submodule(trunk + PATHS[family])
    layers[2], layers[3] = layers[0], layers[1]
    return model


@pytest.mark.parametrize("family", ["bert", "t5", "mpnet"])
@pytest.mark.parametrize("stored", ["last", "all", [1], [0, 2]])
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["exact", "mean"])
def test_a_layer_that_is_run_several_times(family: str, stored: Any, settings: dict[str, Any]) -> None:
    model = shared(family)
    dicts = [dict(module.__dict__) for module in model.modules()]
    expected = {id(inputs): plain(model, inputs) for inputs in (SEEN, MIXED)}
    with LLMCache.wrap(model, layers=stored, **settings) as cache:
        for inputs, rungs in ((SEEN, [None] * 3), (SEEN, ["exact"] * 3), (MIXED, ["exact"] * 3 + [None] * 2)):
            torch.testing.assert_close(states(cache(**inputs)), expected[id(inputs)], atol=1e-5, rtol=1e-5)
            assert [outcome.rung for outcome in cache.last] == rungs
        assert (cache.stats().errors, cache.stats().bypassed) == (0, {})
    assert [dict(module.__dict__) for module in model.modules()] == dicts
    assert torch.equal(plain(model, SEEN), expected[id(SEEN)])


def test_a_decoder_that_shares_layers_is_refused_where_its_kv_would_be_stored() -> None:
    model = shared("gpt2")
    dicts = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match="run at several places"):
        LLMCache.wrap(model)
    assert [dict(module.__dict__) for module in model.modules()] == dicts


def test_a_classifier_that_shares_layers_has_no_kv() -> None:
    model = shared("gpt2", CLASSIFIERS, "transformer.")
    model.config.pad_token_id = 0
    expected = plain(model, MIXED, use_cache=False)
    cache = LLMCache.wrap(model, **{**SETTINGS, "allow_unsafe": False})
    cache(**SEEN)
    torch.testing.assert_close(states(cache(**MIXED)), expected, atol=1e-5, rtol=1e-5)
    assert [outcome.rung for outcome in cache.last] == ["exact"] * 3 + [None] * 2


def replace_one(layers: Any) -> None:
    layers[3] = build(BARE["bert"], seed=8).encoder.layer[3]


def swap_two(layers: Any) -> None:
    layers[1], layers[2] = layers[2], layers[1]


def delete_last(layers: Any) -> None:
    del layers[3]


def add_one(layers: Any) -> None:
    layers.append(build(BARE["bert"], seed=8).encoder.layer[0])


def lose_forward(layers: Any) -> None:
    del layers[2].forward


@pytest.mark.parametrize("change", [replace_one, swap_two, delete_last, add_one, lose_forward])
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["exact", "mean"])
def test_layers_that_are_no_longer_those_that_were_wrapped(
    change: Callable[[Any], None], settings: dict[str, Any]
) -> None:
    model, reference = build(BARE["bert"]), build(BARE["bert"])
    cache = LLMCache.wrap(model, **settings)
    cache(**SEEN)
    change(model.encoder.layer)
    if change is not lose_forward:
        change(reference.encoder.layer)
    for n in (1, 2):
        assert torch.equal(states(cache(**SEEN)), plain(reference, SEEN))
        assert cache.stats().bypassed == {"other_layers": 3 * n}
    assert (cache.stats().n_hits, cache.stats().errors, cache.stats().n_stored) == (0, 0, 3)
    cache.unwrap()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_list_of_layers_that_is_replaced_as_a_whole() -> None:
    model, reference = build(BARE["bert"]), build(BARE["bert"])
    cache = LLMCache.wrap(model)
    cache(**SEEN)
    for one in (model, reference):
        one.encoder.layer = one.encoder.layer[:2]
    assert torch.equal(states(cache(**SEEN)), plain(reference, SEEN))
    assert cache.stats().bypassed == {"other_layers": 3}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [[0], [3]])
@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["exact", "mean"])
def test_a_layer_that_is_compiled_in_its_place_is_told(compiled: list[int], settings: dict[str, Any]) -> None:
    model = build(BARE["bert"])
    expected = plain(model, SEEN)
    cache = LLMCache.wrap(model, **settings)
    cache(**SEEN)
    for number in compiled:
        model.encoder.layer[number].compile(backend="eager")
    for n in (1, 2):
        torch.testing.assert_close(states(cache(**SEEN)), expected, atol=1e-5, rtol=1e-5)
        assert cache.stats().bypassed == {"compiled_layers": 3 * n}
    assert cache.stats().errors == 0


@pytest.mark.slow
def test_layers_that_were_compiled_before_are_served() -> None:
    """What the log advises."""
    model = build(BARE["bert"])
    expected = plain(model, MIXED)
    layers = model.encoder.layer
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, backend="eager")
    names = [list(module.__dict__) for module in model.modules()]
    with LLMCache.wrap(model, **SETTINGS) as cache:
        cache(**SEEN)
        for _ in range(2):
            torch.testing.assert_close(states(cache(**MIXED)), expected, atol=1e-5, rtol=1e-5)
        assert (cache.stats().hits, cache.stats().bypassed, cache.stats().errors) == ({"exact": 8}, {}, 0)
    assert [list(module.__dict__) for module in model.modules()] == names
    torch.testing.assert_close(plain(model, MIXED), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["encoder", "whole"])
def test_what_is_compiled_around_the_layers_is_told(what: str) -> None:
    model = build(BARE["bert"])
    expected = plain(model, MIXED)
    cache = LLMCache.wrap(model, **SETTINGS)
    cache(**SEEN)
    (model.encoder if what == "encoder" else model).compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(states(cache(**MIXED)), expected, atol=1e-5, rtol=1e-5)
    assert cache.stats().bypassed == {"other_layers" if what == "encoder" else "compiled": 10}
    assert (cache.stats().n_hits, cache.stats().errors, cache.stats().n_stored) == (0, 0, 3)


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_layer_whose_forward_goes_past_ours(family: str, number: int) -> None:
    """Nothing shows it in advance: rows skip layers, and the state that stands for them is never put in."""
    model = build(BARE[family])
    expected = plain(model, MIXED)
    cache = LLMCache.wrap(model, prefix=False, **SETTINGS)
    cache(**SEEN)
    layer: Any = model.get_submodule(PATHS[family])[number]
    original = layer.forward.original
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    for _ in range(2):
        output = cache(**MIXED)
        torch.testing.assert_close(states(output), expected, atol=1e-5, rtol=1e-5)
        assert {outcome.bypassed for outcome in cache.last} == {"other_layers"}
        if family == "gpt2":
            assert {kv.keys.shape[2] for kv in output.past_key_values.layers} == {6}
    assert cache.stats().n_stored == 3


@pytest.mark.parametrize("by_hand", [0, 2, 3])
@pytest.mark.parametrize("inputs", [SEEN, MIXED], ids=["hit", "mixed"])
def test_a_layer_that_a_hook_runs_by_hand_between_two(by_hand: int, inputs: dict[str, Tensor]) -> None:
    model = build(GENERATORS["gpt2"])
    expected = plain(model, inputs)
    cache = LLMCache.wrap(model, prefix=False, **SETTINGS)
    cache(**SEEN)
    layers = model.transformer.h
    layers[1].register_forward_hook(lambda module, args, output: (layers[by_hand](args[0]), None)[1])
    output = cache(**inputs)
    torch.testing.assert_close(states(output), expected, atol=1e-5, rtol=1e-5)
    assert {kv.keys.shape[2] for kv in output.past_key_values.layers} == {6}


def test_a_layer_that_is_run_within_another_is_none_of_the_trunks_steps() -> None:
    model = build(BARE["bert"])
    layers = model.encoder.layer
    expected = layers[0](torch.ones(2, 5, 32)).detach()
    plainly = plain(model, MIXED)
    cache = LLMCache.wrap(model, **SETTINGS)
    found = []
    layers[2].attention.register_forward_pre_hook(lambda *_: found.append(layers[0](torch.ones(2, 5, 32))))
    for inputs in (SEEN, MIXED):
        output = states(cache(**inputs))
    torch.testing.assert_close(output, plainly, atol=1e-5, rtol=1e-5)
    assert [outcome.rung for outcome in cache.last] == ["exact"] * 3 + [None] * 2
    assert all(torch.equal(one, expected) for one in found)
    assert (len(found), cache.stats().bypassed) == (2, {})


def test_a_norm_that_a_hook_applies_to_each_layer() -> None:
    model = build(BARE["llama"])
    weights = SEEN["attention_mask"].unsqueeze(-1) / SEEN["attention_mask"].sum(1)[:, None, None]
    expected = (plain(model, SEEN) * weights).sum(1)
    cache = LLMCache.wrap(model, payload="mean", **SETTINGS)
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: (model.norm(output), None)[1])
    for _ in range(2):
        torch.testing.assert_close((states(cache(**SEEN)) * weights).sum(1), expected, atol=1e-5, rtol=1e-5)
    assert cache.stats().hits == {"exact": 3}


def test_tokens_are_generated_while_one_layer_goes_past_ours() -> None:
    model = build(GENERATORS["llama"])
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    prompt = tokens(2, 6)
    expected = model.generate(prompt, **settings)
    cache = LLMCache.wrap(model, prefix=False)
    model.generate(prompt, **settings)
    layer: Any = model.model.layers[2]
    original = layer.forward.original
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert torch.equal(model.generate(prompt, **settings), expected)
    assert cache.stats().bypassed["other_layers"] == 2
