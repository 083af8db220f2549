"""What happens during a call or a recompute counts: purges, edits that are taken back, a full queue, late verdicts."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from llmcache import LLMCache, NotCachedError
from llmcache.reuse.audit.account import AuditAccount
from tests import inside
from tests.contract.streams import ask, calibrated, classifier, requests
from tests.tiny_models import BARE, build, tokens

FRESH = requests(40, seed=7)[0]


def watch(monkeypatch: pytest.MonkeyPatch, cache: LLMCache, act: Callable[[], object]) -> None:
    """Act after each run of the trunk for rows without a hit."""
    engine = inside.eager(cache)
    run = engine.run

    def watched(*given: Any) -> Any:
        output = run(*given)
        act()
        return output

    monkeypatch.setattr(engine, "run", watched)


def test_within_only_if_cached_a_hit_that_the_audit_takes_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full queue drawn hits are computed, but not within `only_if_cached`, where no layer may run."""
    with calibrated(audit=1.0) as cache:
        inside.audit(cache).worker._max_jobs = 0
        runs: list[None] = []
        watch(monkeypatch, cache, lambda: runs.append(None))
        n_refused = 0
        for row in FRESH:
            try:
                with cache.only_if_cached():
                    cache(input_ids=row[None])
            except NotCachedError as error:
                assert error.rows == (0,)
                n_refused += 1
        assert n_refused == len(FRESH) and not runs
        assert cache.stats().audit.n_drawn == 0 and cache.stats().errors == 0


@pytest.mark.parametrize("order", [("purge", "clear"), ("clear", "purge")])
def test_nothing_is_stored_that_was_computed_before_the_latest_purge(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        drop = {"purge": lambda: cache.purge(namespace="default"), "clear": cache.clear}
        drop[order[0]]()
        watch(monkeypatch, cache, drop[order[1]])
        cache(input_ids=tokens(1, 6, 1))
        assert cache.stats().n_misses == 1 and len(inside.bank(cache)) == 0


def test_a_purge_while_the_audit_recomputes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with calibrated(audit=1.0) as cache:
        assert "semantic" in ask(inside.keep_quiet(cache), FRESH)
        recomputer = inside.audit(cache)._recomputer
        run = recomputer._recompute

        def purged(tasks: Any) -> Any:
            cases = run(tasks)
            cache.clear()
            return cases

        monkeypatch.setattr(recomputer, "_recompute", purged)
        cache.drain()
        assert len(inside.bank(cache)) == 0


def test_a_drawn_hit_that_is_forgotten_is_audited_and_not_stored() -> None:
    with calibrated(audit=1.0) as cache:
        served = [i for i, rung in enumerate(ask(inside.keep_quiet(cache), FRESH)) if rung == "semantic"]
        cache.forget(input_ids=FRESH[served[:1]])
        cache.drain()
        stats = cache.stats().audit
        assert stats is not None and stats.n_recomputed == len(served) > 1
        assert ask(cache, FRESH[served[:2]])[0] != "exact"
        assert ask(cache, FRESH[served[1:2]]) == ["exact"]


def test_a_late_verdict_on_a_lost_sample_is_not_counted_twice_by_the_alarm() -> None:
    account = AuditAccount(limit=0.01, floor=1.0, alpha=0.05)
    sample = account.see(1.0)
    assert sample is not None
    account.lose(sample)
    wealth = account.alarm.wealth()
    account.settle(sample, is_changed=True)
    assert (account.alarm.wealth() == wealth).all()


def test_a_quarantine_belongs_to_the_namespace_of_its_source() -> None:
    model = classifier()
    with LLMCache.wrap(model, max_drop=0.05, audit={"rate": 1.0, "in_background": False}) as cache:
        with cache.namespace("a"):
            cache.calibrate([{"input_ids": part} for part in requests(600)[0].split(50)])
            served = [row for row in FRESH if ask(cache, row[None]) == ["semantic"]]
        assert served
        _flip(model, cache, served)
        assert cache.stats().audit.n_quarantined > 0
        cache.purge(namespace="default")
        assert cache.stats().audit.n_quarantined > 0
        cache.purge(namespace="a")
        assert cache.stats().audit.n_quarantined == 0


def _flip(model: Any, cache: LLMCache, served: list[Tensor]) -> None:
    """Let the audit find other answers than those that were served."""
    read = inside.audit(cache)._recomputer.observer._read
    inside.audit(cache)._recomputer.observer._read = lambda output: -read(output)
    try:
        cache.drain()
    finally:
        inside.audit(cache)._recomputer.observer._read = read
