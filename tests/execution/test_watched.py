"""Hooks within the trunk: those of others keep prefixes and the door shut, which is told; transformers' own do not."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from llmcache import LLMCache
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, padded, tokens

ASKED = [{"output_hidden_states": True}, {"output_attentions": True}]


def layers_run(model: nn.Module) -> list[int]:
    """Counts what the embeddings are run for. Their forward is another one from then on, so the weights are, too."""
    n_columns: list[int] = []
    embedding = model.get_input_embeddings()
    forward = embedding.forward
    embedding.forward = lambda ids: (n_columns.append(ids.shape[1]), forward(ids))[1]
    return n_columns


def with_all(model: nn.Module, asked: dict[str, bool], ids: Tensor) -> None:
    with torch.inference_mode():
        output = model(ids, **asked)
    assert (output.hidden_states if "output_hidden_states" in asked else output.attentions) is not None


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: next(iter(asked)))
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_a_call_that_captures_does_not_end_prefix_hits(asked: dict[str, bool], when: str) -> None:
    model = build(GENERATORS["llama"])
    model.set_attn_implementation("eager")
    text = tokens(1, 24)
    if when == "before wrapping":
        with_all(model, asked, text)
    n_columns = layers_run(model)
    cache = LLMCache.wrap(model, prefix_block=4, auto_bypass=False)
    if when == "after wrapping":
        with_all(model, asked, text)
    assert len(model.model.layers[0]._forward_hooks) + len(model.model.layers[0].self_attn._forward_hooks) > 0
    cache(text[:, :12])
    n_columns.clear()
    with torch.inference_mode():
        found = model(text).logits
    assert (n_columns, cache.last[0].n_prefix, cache.stats().n_hooked) == ([12], 12, 0)
    with cache.disabled(), torch.inference_mode():
        torch.testing.assert_close(found, model(text).logits)
    with_all(model, asked, text)  # and they capture all tokens as ever
    hidden = cache(text, output_hidden_states=True).hidden_states
    assert {states.shape[1] for states in hidden} == {24}


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: next(iter(asked)))
def test_nor_does_it_shut_the_door(asked: dict[str, bool]) -> None:
    model = build(CLASSIFIERS["bert"])
    model.set_attn_implementation("eager")
    n_columns = layers_run(model)
    cache = LLMCache.wrap(model)
    inputs = padded([6, 4])
    with_all(model, asked, inputs["input_ids"])
    cache(**inputs)
    n_columns.clear()
    cache(**inputs)
    assert (n_columns, cache.stats().hits, cache.stats().n_hooked) == ([], {"exact": 2}, 0)


def test_hooks_of_others_keep_prefixes_from_serving_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = build(GENERATORS["llama"])
    cache, text = LLMCache.wrap(model, prefix_block=4, auto_bypass=False), tokens(2, 24)
    cache(text[:, :12])
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="llmcache"):
        for n in (16, 20):
            cache(text[:, :n])
    assert [outcome.n_prefix for outcome in cache.last] == [0, 0]
    assert cache.stats().n_hooked == 4
    assert "n_hooked: 4" in str(cache.stats())
    assert len([record for record in caplog.records if "hooks hang on" in record.getMessage()]) == 1
    handle.remove()
    cache(text)
    assert [outcome.n_prefix for outcome in cache.last] == [12, 12]
    assert cache.stats().n_hooked == 4


def test_hooks_of_others_keep_the_door_shut_and_that_is_told() -> None:
    model = build(CLASSIFIERS["bert"])
    cache, inputs = LLMCache.wrap(model), padded([6, 4])
    seen: list[int] = []
    handle = model.bert.encoder.layer[1].register_forward_hook(lambda *_: seen.append(1))
    for n in range(3):
        cache(**inputs)
        assert (len(seen), cache.stats().n_hooked) == (n + 1, 2 * (n + 1))
    assert cache.stats().hits == {"exact": 4}  # hits all the same, by the long way
    handle.remove()
    n_columns = layers_run(model)
    for _ in range(2):
        cache(**inputs)
    n_columns.clear()
    cache(**inputs)
    assert (n_columns, cache.stats().n_hooked) == ([], 6)


def test_a_hook_on_every_module_is_seen() -> None:
    model = build(CLASSIFIERS["bert"])
    cache, inputs = LLMCache.wrap(model), padded([6, 4])
    for _ in range(2):
        cache(**inputs)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        cache(**inputs)
    finally:
        handle.remove()
    assert model.bert.embeddings in seen
    assert cache.stats().n_hooked == 2


def test_calls_are_not_told_where_nothing_is_lost() -> None:
    """No prefix without K/V, and no door where fingerprints are made of states."""
    model = build(GENERATORS["llama"])
    cache = LLMCache.wrap(model)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    cache(tokens(1, 8), use_cache=False)
    assert cache.stats().n_hooked == 0
