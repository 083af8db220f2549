"""The audit and calls: looks stop for calls that come, and calls that leave no idle moment do some themselves."""

import threading

import numpy as np
import pytest
from torch import nn

from llmcache import LLMCache
from llmcache.audit.account import AuditAccount
from llmcache.audit.rate import Rate
from tests import inside
from tests.audit.test_audit import ask, cache, folder, fresh, known, model, reading  # noqa: F401
from tests.audit.test_idle_worker import wait_until


@pytest.mark.slow
def test_a_call_does_looks_that_have_waited_if_calls_have_earned_the_time(
    cache: LLMCache,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shadow, spent = inside.audit(cache).worker, []
    monkeypatch.setattr(cache._flow._meter, "spent", lambda call, seconds: spent.append(seconds))
    ask(cache, fresh(60))
    n_drawn = known(cache).n_drawn
    assert known(cache).n_recomputed == 0 < n_drawn
    shadow._patience_s, shadow._credit_s = 0.0, 1e6
    (again,) = fresh(1)
    with cache.disabled():
        own = cache(**again).logits
    cache(**again)
    n_recomputed = known(cache).n_recomputed
    assert n_recomputed > 0
    assert cache(**again).logits.argmax() == own.argmax() or cache.last[0].rung is not None
    while shadow._jobs:
        shadow._credit_s = 1e6
        cache(**again)
    assert known(cache).n_waiting == 0 and known(cache).n_recomputed == known(cache).n_drawn
    assert cache.stats().errors == 0
    assert sum(spent) > 0  # told to the cost model


def test_a_look_stops_at_the_next_layer_when_a_call_comes(model: nn.Module, cache: LLMCache) -> None:  # noqa: F811
    shadow, came = inside.audit(cache).worker, threading.Event()
    ask(cache, fresh(60))
    n_drawn, reached = known(cache).n_drawn, []

    def meet(*_: object) -> None:
        if shadow.may_stop and not came.is_set():
            shadow.enter()
            came.set()

    layers = inside.trunk(cache).layers
    hooks = [next(layers[0].children()).register_forward_pre_hook(meet)]
    hooks.append(next(layers[2].children()).register_forward_pre_hook(lambda *_: reached.append(shadow._n_calls)))
    with shadow._condition:
        shadow._idle_s = 0.0
        shadow._condition.notify()
    assert came.wait(60)
    wait_until(lambda: not shadow._is_working)
    assert not reached and known(cache).n_recomputed == 0 and known(cache).n_waiting == n_drawn
    shadow.leave()
    wait_until(lambda: known(cache).n_recomputed == n_drawn)
    for hook in hooks:
        hook.remove()
    assert cache.stats().errors == 0


def test_where_looks_wait_fewer_are_drawn_and_count_more() -> None:
    usual, eased = AuditAccount(0.01, 0.2, 0.05), AuditAccount(0.01, 0.2, 0.05)
    for _ in range(3000):
        usual.see(0.0)
        eased.see(0.0, 0.25)
    assert 2 * eased.n_drawn < usual.n_drawn
    weights = {weight for weight, _ in eased.rate._open}
    assert weights == {1 / (0.2 * 0.25), 1.0 / (5 * 0.2 * 0.25)}


@pytest.mark.slow
def test_limits_hold_where_probabilities_are_lowered_for_a_while() -> None:
    """In 300 streams of one rate, limits at 10 % are wrong at most as often, eased by what was drawn before."""
    rng, wrong = np.random.default_rng(0), np.zeros(2)
    for _ in range(300):
        rate, n_waiting = Rate(0.2), 0
        for _ in range(400):
            ease = 0.25 if n_waiting > 5 else 1.0
            rate.see(ease)
            n_waiting = max(0, n_waiting - (rng.random() < 0.1))
            if rng.random() < 0.2 * ease:
                n_waiting += 1
                rate.draw(1 / (0.2 * ease), ease)
                rate.settle(1 / (0.2 * ease), bool(rng.random() < 0.05), ease)
        wrong += (rate.lower(0.1) > 0.05, rate.upper(0.1) < 0.05)
    assert (wrong / 300 <= 0.1).all()
    assert rate.upper(0.1) < 0.5
