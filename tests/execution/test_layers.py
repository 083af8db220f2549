"""Layers that are shared, replaced, taken out, compiled or run by others than the trunk: right answers, and counted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache, UnsupportedModelError
from tests.execution.calls import (
    BY_STATES,
    LAYERS,
    MIXED,
    SEEN,
    Make,
    agree,
    assert_close,
    attributes,
    one_layer,
    pair,
    quietly,
    run,
    rungs,
    shallow,
)
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, states, tokens

settings_of_both_ways = pytest.mark.parametrize("settings", [{}, BY_STATES], ids=["exact", "mean"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shared(make: Make, path: str) -> Make:
    """Makes models that run two layers in turn: 0, 1, 0, 1."""

    def share() -> nn.Module:
        model = make()
        layers: Any = model.get_submodule(path)
        layers[2], layers[3] = layers[0], layers[1]
        return model

    return share


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5", "mpnet"])
@pytest.mark.parametrize("stored", ["last", "all", [1], [0, 2]])
@settings_of_both_ways
def test_a_layer_that_is_run_several_times(family: str, stored: Any, settings: dict[str, Any]) -> None:
    model, alone = (build(shared(BARE[family], LAYERS[family])) for _ in range(2))
    run(model, **SEEN)
    before = attributes(model)
    with LLMCache.wrap(model, layers=stored, **settings) as cache:
        for inputs, expected in ((SEEN, [None] * 3), (SEEN, ["exact"] * 3), (MIXED, ["exact"] * 3 + [None] * 2)):
            agree(cache, alone, **inputs)
            assert rungs(cache) == expected
        assert (cache.stats().errors, cache.stats().bypassed) == (0, {})
    assert attributes(model) == before


def test_a_decoder_that_shares_layers_is_refused_where_its_kv_would_be_stored() -> None:
    model = build(shared(BARE["gpt2"], LAYERS["gpt2"]))
    before = attributes(model)
    with pytest.raises(UnsupportedModelError, match="run at several places"):
        LLMCache.wrap(model)
    assert attributes(model) == before


def test_a_classifier_that_shares_layers_has_no_kv() -> None:
    cache, alone = pair(shared(CLASSIFIERS["gpt2"], "transformer.h"), **{**BY_STATES, "allow_unsafe": False})
    cache(**SEEN)
    assert_close(states(cache(**MIXED)), run(alone, **MIXED, use_cache=False))
    assert rungs(cache) == ["exact"] * 3 + [None] * 2


def another(number: int) -> nn.Module:
    return build(BARE["bert"], seed=8).encoder.layer[number]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one replaced": lambda encoder: encoder.layer.__setitem__(3, another(3)),
    "two swapped": lambda encoder: encoder.layer.extend([encoder.layer.pop(2), encoder.layer.pop(2)][::-1]),
    "one deleted": lambda encoder: encoder.layer.pop(3),
    "one added": lambda encoder: encoder.layer.append(another(0)),
    "list replaced": lambda encoder: setattr(encoder, "layer", encoder.layer[:2]),
    "a forward lost": lambda encoder: encoder.layer[2].__dict__.pop("forward", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@settings_of_both_ways
def test_layers_that_are_no_longer_those_that_were_wrapped(change: str, settings: dict[str, Any]) -> None:
    cache, alone = pair(BARE["bert"], **settings)
    cache(**SEEN)
    for model in (cache.model, alone):
        CHANGES[change](model.encoder)
    for n in (1, 2):
        assert torch.equal(states(cache(**SEEN)), run(alone, **SEEN))
        assert cache.stats().bypassed == {"other_layers": 3 * n}
    assert (cache.stats().n_hits, cache.stats().errors, cache.stats().n_stored) == (0, 0, 3)
    assert not any("forward" in module.__dict__ for module in cache.unwrap().modules())


COMPILED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "first": (lambda model: model.bert.encoder.layer[0], "compiled_layers"),
    "last": (lambda model: model.bert.encoder.layer[1], "compiled_layers"),
    "encoder": (lambda model: model.bert.encoder, "other_layers"),
    "whole": (lambda model: model, "compiled"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", COMPILED)
@settings_of_both_ways
def test_what_is_compiled_in_its_place_is_told(what: str, settings: dict[str, Any]) -> None:
    part, reason = COMPILED[what]
    is_served = what == "encoder" and not settings  # decided before the layers, which then run unseen
    cache, alone = pair(one_layer if what == "whole" else shallow, **settings)
    cache(**SEEN)
    part(cache.model).compile(backend="eager")
    for n in (1, 2):
        agree(cache, alone, **MIXED)
        assert cache.stats().bypassed == ({} if is_served else {reason: 5 * n})
    expected = ({"exact": 3 + 5}, 0, 5) if is_served else ({}, 0, 3)
    assert (cache.stats().hits, cache.stats().errors, cache.stats().n_stored) == expected


@pytest.mark.slow
def test_layers_that_were_compiled_before_are_served() -> None:
    """What the log advises."""
    model, alone = build(shallow), build(shallow)
    layers = model.bert.encoder.layer
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, backend="eager")
    names = [list(module.__dict__) for module in model.modules()]
    with LLMCache.wrap(model, **BY_STATES) as cache:
        cache(**SEEN)
        for _ in range(2):
            agree(cache, alone, **MIXED)
        assert (cache.stats().hits, cache.stats().bypassed, cache.stats().errors) == ({"exact": 8}, {}, 0)
    assert [list(module.__dict__) for module in model.modules()] == names
    assert_close(run(model, **MIXED), run(alone, **MIXED))


def go_past(layer: Any) -> None:
    """Put a forward on a layer that calls what ours was put on."""
    original = layer.forward.original
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)


def n_columns(output: Any) -> set[int]:
    return {kv.keys.shape[2] for kv in output.past_key_values.layers}


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_layer_whose_forward_goes_past_ours(family: str, number: int) -> None:
    """Nothing shows it in advance: rows skip layers, and the state that stands for them is never put in."""
    cache, alone = pair(BARE[family], prefix=False, **BY_STATES)
    cache(**SEEN)
    go_past(cache.model.get_submodule(LAYERS[family])[number])
    for _ in range(2):
        output = agree(cache, alone, **MIXED)
        assert {outcome.bypassed for outcome in cache.last} == {"other_layers"}
        assert family != "gpt2" or n_columns(output) == {6}
    assert cache.stats().n_stored == 3


def test_tokens_are_generated_while_one_layer_goes_past_ours() -> None:
    cache, alone = pair(GENERATORS["llama"], prefix=False)
    asked = {"inputs": tokens(2, 6), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cache.model.generate(**asked)
    go_past(cache.model.model.layers[2])
    assert torch.equal(cache.model.generate(**asked), alone.generate(**asked))
    assert cache.stats().bypassed["other_layers"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [0, 2, 3])
@pytest.mark.parametrize("inputs", [SEEN, MIXED], ids=["hit", "mixed"])
def test_a_layer_that_a_hook_runs_by_hand_between_two(by_hand: int, inputs: dict[str, Tensor]) -> None:
    cache, alone = pair(GENERATORS["gpt2"], prefix=False, **BY_STATES)
    cache(**SEEN)
    layers = cache.model.transformer.h
    layers[1].register_forward_hook(lambda module, args, output: (layers[by_hand](args[0]), None)[1])
    assert n_columns(agree(cache, alone, **inputs)) == {6}


def test_a_layer_that_is_run_within_another_is_none_of_the_trunks_steps() -> None:
    cache, alone = pair(BARE["bert"], **BY_STATES)
    layers, hidden, found = cache.model.encoder.layer, torch.ones(2, 5, 32), []
    layers[2].attention.register_forward_pre_hook(lambda *_: found.append(layers[0](hidden)))
    for inputs in (SEEN, MIXED):
        agree(cache, alone, **inputs)
    assert rungs(cache) == ["exact"] * 3 + [None] * 2
    expected = quietly(alone.encoder.layer[0], hidden_states=hidden)
    assert all(torch.equal(one, expected) for one in found)
    assert (len(found), cache.stats().bypassed) == (2, {})


def test_a_norm_that_a_hook_applies_to_each_layer() -> None:
    cache, alone = pair(BARE["llama"], payload="mean", **BY_STATES)
    model = cache.model
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: (model.norm(output), None)[1])
    for _ in range(2):
        assert_close(states(cache(**SEEN)).mean(1), run(alone, **SEEN).mean(1))
    assert cache.stats().hits == {"exact": 3}
