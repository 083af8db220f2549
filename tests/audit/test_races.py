"""What happens during a call or a recompute counts: purges, edits that are taken back, a full queue, late verdicts."""

from collections.abc import Callable
from typing import Any

import pytest

from llmcache import LLMCache, NotCachedError
from tests import inside
from tests.contract.streams import ask, calibrated, requests
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


def test_with_a_full_queue_drawn_hits_are_computed_and_are_errors_within_only_if_cached() -> None:
    """Within `only_if_cached` no layer may run."""
    with calibrated(audit=1.0) as cache:
        inside.audit(cache).worker._max_jobs = 0
        for row in FRESH:
            with pytest.raises(NotCachedError) as refused, cache.only_if_cached():
                cache(input_ids=row[None])
            assert refused.value.rows == (0,)
        assert cache.stats().audit.n_drawn == cache.stats().n_misses == 0
        assert ask(cache, FRESH) == [None] * len(FRESH)
        audit = cache.stats().audit
        assert audit.n_drawn == audit.n_recomputed > 10
        assert audit.n_waiting == cache.drain() == cache.stats().errors == 0


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
