"""Installing and removing: every module's `__dict__` is restored, whatever fails."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache, WrapError
from llmcache.models import coupling
from llmcache.models.coupling import find_coupling
from tests.calls.helpers import X, rungs, wrapped
from tests.contract.test_copies import attributes
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, states


def test_all_is_restored_after_a_failed_install_and_an_error_within(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(TOKEN_HEADS["causal"])
    before = attributes(model)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("llmcache.calls.core.HeadSwap", lambda *_: 1 / 0)
        LLMCache.wrap(model)
    assert attributes(model) == before
    with pytest.raises(IndexError), LLMCache.wrap(model) as cache:
        cache(input_ids=torch.full((1, 4), 10_000))
    assert attributes(model) == before


def test_wrapping_twice_is_refused_and_an_old_cache_takes_no_new_one_off() -> None:
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
    with LLMCache.wrap(model.bert):
        before = attributes(model)
        assert cache.unwrap() is model
        assert attributes(model) == before
        with pytest.raises(WrapError):
            LLMCache.wrap(model)


@pytest.mark.parametrize("settings", [{}, {"tau": 0.9}])
def test_of_two_threads_that_wrap_a_model_one_is_refused(settings: Any) -> None:
    model = build(BARE["bert"])
    both_checked = threading.Barrier(2)

    def wait(*args: Any, **kwargs: Any) -> Any:
        both_checked.wait(30)
        return find_coupling(*args, **kwargs)

    def wrap(_: int) -> Any:
        try:
            return LLMCache.wrap(model, **settings)
        except WrapError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(coupling, "find_coupling", wait)
        made = sorted(pool.map(wrap, range(2)), key=lambda one: isinstance(one, str))
    assert isinstance(made[0], LLMCache) and "already wrapped" in made[1]
    made[0].unwrap()


def test_a_hook_on_a_module_that_was_put_in_place_of_an_equal_one_is_run() -> None:
    """An equal module keeps its entries, but a hook on it bypasses the cache."""
    cache = wrapped(BARE["bert"])
    for _ in range(2):
        before = states(cache(**X))
    layer = cache.model.encoder.layer[0].output
    layer.dense = copy.deepcopy(layer.dense)
    assert torch.equal(states(cache(**X)), before) and rungs(cache) == ["exact"] * 2
    layer.dense.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(states(cache(**X)), before)
    assert cache.last[0].bypassed == "hooked"
