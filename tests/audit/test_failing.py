"""A failed recompute counts as a changed answer; calls that fail stop approximate reuse."""

from dataclasses import replace
from typing import Any

import pytest

from llmcache import LLMCache
from llmcache.reuse.audit.account import _MOST_OPEN, AuditAccount
from tests import inside
from tests.audit.test_audit import fresh, n_hits_of
from tests.topics import ask, known, rungs_of


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not today")


# -- recomputes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_whose_looks_all_fail_ends_reuse(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside.audit(cache)._recomputer, "compute", fail)
    statuses = [known(cache).status]
    for one in fresh(150):
        cache(**one)
        cache.drain()
        statuses.append(known(cache).status)
        if statuses[-1] == "off":
            break
    assert list(dict.fromkeys(statuses)) == ["certified", "tightened", "off"]
    assert known(cache).n_alarms == 2
    health = cache.stats().health
    assert health.is_failing and health.failed_recomputes > 0.2 and health.failed_calls == 0
    assert str(health).startswith("failing: 0% of calls, ")


@pytest.mark.parametrize("part", ["model", "key", "verdict", "store"])
def test_a_look_without_a_verdict_counts_as_changed_and_a_store_that_fails_costs_none(
    cache: LLMCache, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_hits, audit = n_hits_of(cache, fresh(8)), inside.audit(cache)
    recomputer = audit._recomputer
    compute = recomputer._recompute

    def read_as_another(looks: Any) -> Any:
        return [replace(case, row=replace(case.row, key="other")) for case in compute(looks)]

    parts = {
        "model": (recomputer, "compute", fail),
        "key": (recomputer, "_recompute", read_as_another),
        "verdict": (audit._answers, "agree", fail),
        "store": (inside.bank(cache), "put", fail),
    }
    monkeypatch.setattr(*parts[part])
    assert cache.drain() == n_hits > 0
    error = "CalibrationError" if part in ("model", "key") else "RuntimeError"
    step = "store an audited request" if part == "store" else "audit a hit"
    assert cache.stats().health.failures == {f"{step}: {error}": n_hits}
    assert known(cache).n_recomputed == (n_hits if part == "store" else 0)
    assert (known(cache).n_lost + known(cache).n_alarms > 0) == (part != "store")  # an alarm begins a new account


def test_samples_without_a_verdict_are_lost_once_others_have_overtaken_them() -> None:
    """And count once, as a late verdict does not change; samples that were settled or withdrawn are not lost."""
    account = AuditAccount(0.02, 1.0, 0.05)
    samples = [account.see(0.0) for _ in range(_MOST_OPEN)]
    assert not account.lose_overdue() and account.counts["n_lost"] == 0
    rings = []
    for _ in range(100):
        samples.append(account.see(0.0))
        rings.append(account.lose_overdue())
    assert account.counts["n_lost"] == 100 and rings.count(True) == 1  # it rings once
    wealth = account.alarm.wealth()[0]
    assert not account.settle(samples[0], True) and not account.lose(samples[0])
    assert (account.alarm.wealth()[0] == wealth).all()
    for number, sample in enumerate(samples[100:]):
        account.settle(sample, False) if number % 2 else account.withdraw(sample)
        assert not account.lose(sample)
    for _ in range(_MOST_OPEN):
        account.see(0.0)
        assert not account.lose_overdue()
    assert (account.counts["n_lost"], account.counts["n_changed"]) == (100, 1)


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lookups_that_fail_stop_approximate_reuse_until_calls_succeed_again(
    cache: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert n_hits_of(cache, fresh(20)) > 0
    with monkeypatch.context() as broken:
        broken.setattr(inside.sources(cache), "search", fail)
        ask(cache, fresh(20, seed=9))
        assert known(cache).status == "failing"
        assert set(rungs_of(cache, fresh(20, seed=9)[:3])) == {"exact"}
    health = cache.stats().health
    assert health.is_failing and health.failed_calls >= 0.05
    assert health.failures["look up a call: RuntimeError"] < 20  # later calls did not search
    assert "nothing is reused under a calibration meanwhile" in caplog.text
    assert n_hits_of(cache, fresh(20, seed=10)) == 0
    ask(cache, fresh(150, seed=11))
    assert known(cache).status == "certified"
    assert "no longer fail" in caplog.text
    assert n_hits_of(cache, fresh(20, seed=12)) > 0
    assert str(cache.stats().health) == "good"
