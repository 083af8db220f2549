"""A cache that fails promises nothing: looks that fail count as changed, calls that fail stop approximate reuse."""

from dataclasses import replace
from typing import Any

import pytest
from llmcache.execution.old_call import Call, Inputs

from llmcache import LLMCache
from llmcache.audit.account import _MOST_OPEN, AuditAccount
from llmcache.counters import Counters, Share, is_told
from tests import inside
from tests.audit.test_audit import fresh, n_hits_of
from tests.topics import ask, known, rungs_of


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not today")


# -- looks -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_of_which_every_look_fails_ends_approximate_reuse(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside.audit(cache)._recomputer, "compute", fail)
    statuses = [known(cache).status]
    for one in fresh(150):
        cache(**one)
        cache.drain()
        statuses.append(known(cache).status)
    assert list(dict.fromkeys(statuses)) == ["certified", "tightened", "off"]
    assert known(cache).n_alarms == 2
    health = cache.stats().health
    assert health.is_failing and health.failed_recomputes > 0.2 and health.failed_calls == 0
    assert set(health.failures) == {"audit a hit: CalibrationError"}
    assert str(health).startswith("failing: 0% of calls, ")
    assert n_hits_of(cache, fresh(40, seed=8)) == 0


@pytest.mark.parametrize("part", ["model", "key", "verdict"])
def test_a_look_without_a_verdict_counts_as_changed(
    cache: LLMCache, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_hits, audit = n_hits_of(cache, fresh(8)), inside.audit(cache)
    recomputer = audit._recomputer
    compute = recomputer._compute_again

    def read_as_another(looks: Any) -> Any:
        return [replace(case, row=replace(case.row, key="other")) for case in compute(looks)]

    parts = {
        "model": (recomputer, "compute", fail),
        "key": (recomputer, "_compute_again", read_as_another),
        "verdict": (audit._answers, "agree", fail),
    }
    monkeypatch.setattr(*parts[part])
    assert cache.drain() == n_hits > 0
    error = "RuntimeError" if part == "verdict" else "CalibrationError"
    assert cache.stats().health.failures == {f"audit a hit: {error}": n_hits}
    assert known(cache).n_recomputed == 0
    assert known(cache).n_lost + known(cache).n_alarms > 0  # an alarm begins a new account


def test_a_store_that_fails_costs_no_verdict(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    n_hits = n_hits_of(cache, fresh(40))
    monkeypatch.setattr(inside.banks(cache), "put", fail)
    cache.drain()
    assert 0 < known(cache).n_recomputed == cache.stats().errors == n_hits


def test_samples_without_a_verdict_are_lost_once_others_have_overtaken_them() -> None:
    account = AuditAccount(0.02, 1.0, 0.05)
    samples = [account.see(0.0) for _ in range(_MOST_OPEN)]
    assert not account.lose_overdue() and account.counts["n_lost"] == 0
    rings = []
    for _ in range(100):
        samples.append(account.see(0.0))
        rings.append(account.lose_overdue())
    assert account.counts["n_lost"] == 100 and rings.count(True) == 1  # it rings once
    assert not account.settle(samples[0], True)  # it counted already
    assert not account.lose(samples[0])
    account.settle(samples[-1], False)
    assert not account.lose(samples[-1])
    assert account.counts["n_lost"] == 100


def test_samples_that_were_looked_into_or_withdrawn_are_not_lost() -> None:
    account = AuditAccount(0.02, 1.0, 0.05)
    for i in range(2 * _MOST_OPEN):
        sample = account.see(0.0)
        account.settle(sample, False) if i % 2 else account.withdraw(sample)
        assert not account.lose_overdue()
    assert (account.counts["n_lost"], account.counts["n_changed"]) == (0, 0)


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lookups_that_fail_stop_approximate_reuse_until_calls_succeed_again(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert n_hits_of(cache, fresh(20)) > 0
    with monkeypatch.context() as broken:
        broken.setattr(inside.banks(cache), "search", fail)
        ask(cache, fresh(20, seed=9))
        assert known(cache).status == "failing"
        assert set(rungs_of(cache, fresh(20, seed=9)[:3])) == {"exact"}
    health = cache.stats().health
    assert health.is_failing and health.failed_calls >= 0.05
    assert health.failures["look up (semantic): RuntimeError"] < 20  # it was not asked any more
    assert "nothing is reused under a calibration meanwhile" in caplog.text
    assert n_hits_of(cache, fresh(20, seed=10)) == 0
    ask(cache, fresh(150, seed=11))
    assert known(cache).status == "certified"
    assert "no longer fail" in caplog.text
    assert n_hits_of(cache, fresh(20, seed=12)) > 0
    assert str(cache.stats().health) == "good"


def test_failures_are_logged_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    for _ in range(1497):
        counters.look(ValueError("no"))
    for _ in range(5):
        counters.error("store", ValueError("no"))
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "store" in text] == ["llmcache failed to store; computing instead"]
    assert len([text for text in texts if "audit" in text]) == 4
    assert "for the 1,000th time" in texts[3]
    assert [n for n in range(1, 2000) if is_told(n)] == [1, 10, 100, 1000]
    assert counters.snapshot().errors == 1502


def test_a_share_turns_at_a_tenth_and_back_at_half_of_that() -> None:
    share = Share()
    turns = [(n, share.is_large) for n in range(40) if share.add(n < 10)]
    assert turns == [(1, True)]
    quiet = next(n for n in range(1, 200) if share.add(False))
    assert 20 < quiet < 120 and not share.is_large
    seldom = Share()
    assert not any(seldom.add(n % 20 == 0) for n in range(5000))


def test_failures_in_one_call_count_as_one() -> None:
    counters = Counters()
    for _ in range(8):
        counters.error("store", ValueError("no"))
    for _ in range(20):
        counters.call(Call(Inputs({}, "default")))
    assert not counters.is_failing
    for _ in range(8):
        counters.error("read", ValueError("no"))
        counters.bypass("error", 1)
    assert counters.is_failing
