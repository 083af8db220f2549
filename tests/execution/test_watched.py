"""Hooks within the trunk: those of others keep prefixes and the door shut, which is told; transformers' own do not."""

import logging

import pytest
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from llmcache import LLMCache
from tests.execution.calls import X, assert_close, plain, quietly, run, wrapped
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, tokens

ASKED = pytest.mark.parametrize("what", ["hidden_states", "attentions"])


def embedded_columns(model: nn.Module) -> list[int]:
    """What the embeddings are run for. Their forward is another one from then on, so the weights are, too."""
    n_columns: list[int] = []
    embedding = model.get_input_embeddings()
    forward = embedding.forward
    embedding.forward = lambda ids: (n_columns.append(ids.shape[1]), forward(ids))[1]
    return n_columns


def capture(model: nn.Module, what: str, ids: Tensor) -> None:
    assert quietly(model, input_ids=ids, **{f"output_{what}": True})[what] is not None


@ASKED
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_a_call_that_captures_does_not_end_prefix_hits(what: str, when: str) -> None:
    model = build(GENERATORS["llama"])
    model.set_attn_implementation("eager")
    text = tokens(1, 24)
    if when == "before wrapping":
        capture(model, what, text)
    n_columns = embedded_columns(model)
    cache = LLMCache.wrap(model, prefix_block=4, auto_bypass=False)
    if when == "after wrapping":
        capture(model, what, text)
    assert len(model.model.layers[0]._forward_hooks) + len(model.model.layers[0].self_attn._forward_hooks) > 0
    cache(text[:, :12])
    n_columns.clear()
    found = run(model, input_ids=text)
    assert (n_columns, cache.last[0].n_prefix, cache.stats().n_hooked) == ([12], 12, 0)
    assert_close(found, plain(cache, input_ids=text))
    capture(model, what, text)  # and they capture all tokens as ever
    hidden = cache(text, output_hidden_states=True).hidden_states
    assert {states.shape[1] for states in hidden} == {24}


@ASKED
def test_nor_does_it_shut_the_door(what: str) -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    cache.model.set_attn_implementation("eager")
    n_columns = embedded_columns(cache.model)
    capture(cache.model, what, X["input_ids"])
    cache(**X)
    n_columns.clear()
    cache(**X)
    assert (n_columns, cache.stats().hits, cache.stats().n_hooked) == ([], {"exact": 2}, 0)


def test_hooks_of_others_keep_prefixes_from_serving_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    cache, text = wrapped(GENERATORS["llama"], prefix_block=4, auto_bypass=False), tokens(2, 24)
    cache(text[:, :12])
    handle = cache.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="llmcache"):
        for n in (16, 20):
            cache(text[:, :n])
    assert [outcome.n_prefix for outcome in cache.last] == [0, 0]
    assert cache.stats().n_hooked == 4
    assert "n_hooked: 4" in str(cache.stats())
    assert len([message for message in caplog.messages if "hooks hang on" in message]) == 1
    handle.remove()
    cache(text)
    assert [outcome.n_prefix for outcome in cache.last] == [12, 12]
    assert cache.stats().n_hooked == 4


def test_hooks_of_others_keep_the_door_shut_and_that_is_told() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    seen: list[int] = []
    handle = cache.model.bert.encoder.layer[1].register_forward_hook(lambda *_: seen.append(1))
    for n in range(3):
        cache(**X)
        assert (len(seen), cache.stats().n_hooked) == (n + 1, 2 * (n + 1))
    assert cache.stats().hits == {"exact": 4}  # hits all the same, by the long way
    handle.remove()
    n_columns = embedded_columns(cache.model)
    for _ in range(2):
        cache(**X)
    n_columns.clear()
    cache(**X)
    assert (n_columns, cache.stats().n_hooked) == ([], 6)


def test_a_hook_on_every_module_is_seen() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    for _ in range(2):
        cache(**X)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        cache(**X)
    finally:
        handle.remove()
    assert cache.model.bert.embeddings in seen
    assert cache.stats().n_hooked == 2


def test_calls_are_not_told_where_nothing_is_lost() -> None:
    """No prefix without K/V, and no door where fingerprints are made of states."""
    cache = wrapped(GENERATORS["llama"])
    cache.model.model.layers[1].register_forward_hook(lambda *_: None)
    cache(tokens(1, 8), use_cache=False)
    assert cache.stats().n_hooked == 0
