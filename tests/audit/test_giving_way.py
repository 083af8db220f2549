"""Recomputes stop when a call comes; calls that leave no idle moment do some recomputes themselves."""

import threading
from typing import Any

import pytest
from torch import nn

from llmcache import LLMCache
from tests import inside
from tests.audit.test_audit import fresh
from tests.audit.test_idle_worker import wait_until
from tests.topics import ask, known


def test_a_call_does_looks_that_have_waited_if_calls_have_earned_the_time(cache: LLMCache) -> None:
    shadow, (again,) = inside.audit(cache).worker, fresh(1)
    ask(cache, fresh(60))
    assert known(cache).n_recomputed == 0 < known(cache).n_drawn
    shadow._patience_s = 0.0
    while shadow._jobs:
        shadow._credit_s = 1e6
        cache(**again)
    assert known(cache).n_waiting == 0 and known(cache).n_recomputed == known(cache).n_drawn


def test_a_look_stops_at_the_next_layer_when_a_call_comes(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow, came = inside.audit(cache).worker, threading.Event()
    ask(cache, fresh(60))
    n_drawn, reached = known(cache).n_drawn, []
    attentions = [next(layer.children()) for layer in cache.model.bert.encoder.layer]
    kind, weights = type(attentions[0]), [next(attention.parameters()) for attention in attentions]
    call = kind.__call__

    def meet(part: nn.Module, *args: Any, **inputs: Any) -> Any:
        number = next(i for i, weight in enumerate(weights) if weight is next(part.parameters()))
        if number == 0 and shadow.may_stop and not came.is_set():
            shadow.enter()
            came.set()
        elif number == 2:
            reached.append(shadow._n_calls)
        return call(part, *args, **inputs)

    monkeypatch.setattr(kind, "__call__", meet)  # no hook, which the audit skips, and no forward, which it watches
    with shadow._condition:
        shadow._idle_s = 0.0
        shadow._condition.notify()
    assert came.wait(60)
    wait_until(lambda: not shadow._is_working)
    assert not reached and known(cache).n_recomputed == 0 and known(cache).n_waiting == n_drawn
    shadow.leave()
    wait_until(lambda: known(cache).n_recomputed == n_drawn)
    assert cache.stats().errors == 0
