"""The audit in a cache: its figures are right, alarms and quarantine follow, and nothing disturbs it."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache, NotCachedError
from llmcache.errors import ConfigError
from llmcache.models.packing import Packing
from llmcache.reuse.audit.account import AuditAccount
from llmcache.reuse.audit.idle_worker import Preempted
from llmcache.reuse.audit.recomputer import Recomputer
from tests import inside
from tests.contract.streams import calibrated, classifier
from tests.redis_server import wait_until
from tests.topics import N_CALIBRATED, Inputs, Reading, ask, batched, edited, known, requests, rungs_of

N = N_CALIBRATED
SETTINGS: dict[str, Any] = {"max_drop": 0.05, "audit": 1.0}
SAMPLE, LABELS = requests(N)


def fresh(n: int, seed: int = 7) -> list[Inputs]:
    return requests(n, seed=seed)[0]


def n_hits_of(cache: LLMCache, inputs: list[Inputs]) -> int:
    """Ask requests; return the number of approximate hits."""
    return rungs_of(cache, inputs).count("semantic")


def first_hit(cache: LLMCache) -> Inputs:
    """Ask until a request is an approximate hit; return it."""
    return next(one for one in fresh(50) if n_hits_of(cache, [one]))


def known_after(cache: LLMCache) -> tuple[int, int, int, int]:
    """Drain; return the numbers of hits drawn, audited, lost and waiting."""
    cache.drain()
    stats = known(cache)
    return stats.n_drawn, stats.n_recomputed, stats.n_lost, stats.n_waiting


def ring(cache: LLMCache, reading: Reading, seed: int = 20) -> int:
    """Serve only wrong answers until the alarm rings; return the number of requests."""
    reading.drifts, before = True, known(cache).n_alarms
    for n, one in enumerate(fresh(400, seed=seed), start=1):
        cache(**one)
        cache.drain()
        if known(cache).n_alarms > before:
            reading.drifts = False
            return n
    raise AssertionError("no alarm")


def trunk_weight(model: nn.Module) -> Tensor:
    return model.bert.encoder.layer[0].output.dense.weight


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_computes_in_the_calls_namespace_and_precision_whoever_drains(model: nn.Module) -> None:
    with LLMCache.wrap(model, **SETTINGS) as cache:
        with cache.namespace("tenant"), torch.autocast("cpu", dtype=torch.bfloat16):
            cache.calibrate(batched(SAMPLE))
            n_hits = n_hits_of(inside.keep_quiet(cache), fresh(60))
        with cache.namespace("other"), cache.disabled():
            cache.drain()
        assert known(cache).n_recomputed == n_hits > 20
        assert known(cache).recomputing_ms > 0
        assert cache.stats().errors == 0
        assert set(inside.bank(cache).namespaces()) == {"tenant"}


@pytest.mark.slow
def test_a_hit_that_is_not_served_after_all_counts_as_none(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    join, failed = Packing.join, []

    def fail_at_first(*args: Any) -> Any:
        if len(failed) < 3:
            failed.append(args)
            raise RuntimeError("it cannot be put together")
        return join(*args)

    n_hits = n_hits_of(cache, fresh(1, seed=32))
    monkeypatch.setattr(Packing, "join", fail_at_first)
    pairs = [rungs_of(cache, [pair]) for pair in batched(fresh(120, seed=33), size=2)]
    assert len(failed) == cache.stats().errors == 3 <= pairs.count([None, None])
    assert ["semantic", "semantic"] in pairs and any(None in pair and "semantic" in pair for pair in pairs)
    assert known(cache).n_drawn == n_hits + sum(rungs.count("semantic") for rungs in pairs)


# -- consequences ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_source_whose_answer_changed_serves_nobody_else_again(
    cache: LLMCache, model: nn.Module, reading: Reading, tmp_path: Path
) -> None:
    reading.drifts = True
    one = first_hit(cache)
    source = cache.last[0].source
    cache.drain()
    assert list(inside.sources(cache).quarantined) == [source] and known(cache).n_quarantined == 1
    sources = {cache.last[0].source for other in fresh(150, seed=30) if n_hits_of(cache, [other])}
    assert sources and source not in sources
    assert rungs_of(cache, [one]) == ["exact"]
    cache.save(tmp_path)
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert list(inside.sources(loaded).quarantined) == [source]


@pytest.mark.slow
def test_the_first_alarm_halves_what_is_served_and_the_second_ends_it(
    cache: LLMCache, model: nn.Module, reading: Reading, tmp_path: Path
) -> None:
    found = cache.calibration
    assert found.watch.tighter < found.chosen.limit
    before, needed = n_hits_of(cache, fresh(150, seed=41)), known(cache).needed
    assert ring(cache, reading) <= needed
    tightened = cache.calibration
    assert not tightened.is_certified
    assert (tightened.limit, tightened.to_dict()["n_alarms"]) == (found.watch.tighter, 1)
    assert (known(cache).status, known(cache).n_alarms) == ("tightened", 1)
    assert known(cache).n_requests < 5  # a new account
    cache.calibrated.alarm(found)  # a calibration that has ended
    assert cache.calibration is tightened
    assert 0 < n_hits_of(cache, fresh(150, seed=42)) < 0.75 * before
    cache.save(tmp_path)
    ring(cache, reading, seed=21)
    assert cache.calibration is None and (known(cache).status, known(cache).n_alarms) == ("off", 2)
    assert n_hits_of(cache, fresh(60, seed=43)) == 0
    cache.unwrap()
    with LLMCache.load(model, tmp_path) as loaded:
        assert loaded.calibration == tightened and known(loaded).status == "tightened"


@pytest.mark.slow
def test_growing_sources_are_joined_by_what_was_looked_into(model: nn.Module) -> None:
    with LLMCache.wrap(model, sources="growing", **SETTINGS) as cache:
        cache.calibrate(batched(SAMPLE))
        shelf = inside.sources(inside.keep_quiet(cache))
        assert known(cache).status == "growing"
        n_hits, n_sources = n_hits_of(cache, fresh(60)), len(shelf)
        cache.drain()
        assert len(shelf) == n_sources + n_hits > n_sources


@pytest.mark.slow
def test_a_calibration_is_renewed_from_what_was_drawn() -> None:
    with calibrated(recalibrate=300, audit=1.0) as cache:
        first = inside.keep_quiet(cache).calibration
        for n, is_renewed in ((299, False), (40, True)):
            ask(cache, fresh(n, seed=70 + n))
            cache.drain()
            assert (cache.calibration is not first) == is_renewed
        renewed = cache.calibration
        assert (renewed.max_drop, renewed.delta, renewed.sources) == (first.max_drop, first.delta, first.sources)
        # Every request since the calibration was drawn, and the newest 2 * 118 are kept.
        assert renewed.n_sources + renewed.n_tested == pytest.approx(236, abs=3)
        assert known(cache).n_requests == cache.stats().errors == 0
        with pytest.raises(ConfigError, match="recalibrate=300 with metric 'accuracy'"):
            cache.calibrate(batched(SAMPLE), labels=LABELS, metric="accuracy")
        assert cache.calibration is renewed


# -- disturbances ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_more_looks_than_can_wait_for_their_weights_none_is_lost(
    cache: LLMCache, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.reuse.audit.audit.MOST_WAITING", 10)
    monkeypatch.setattr("llmcache.reuse.audit.account._MOST_OPEN", 12)
    n_hits = 0
    for one in fresh(45):
        n_hits += n_hits_of(cache, [one])
        with edited(trunk_weight(model)):
            cache.drain()
    stats = known(cache)
    assert (n_hits, stats.n_waiting, stats.n_lost, stats.status) == (10, 10, 0, "certified")
    assert stats.n_recomputed == stats.n_drawn - 10 > 10  # all but ten were computed in their calls


@contextmanager
def calling(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    begin()
    yield
    end()


Otherwise = Callable[[nn.Module], AbstractContextManager[None]]
#: With the status within.
OTHERWISE: dict[str, tuple[Otherwise, str]] = {
    "in training": (lambda model: calling(model.train, model.eval), "certified"),
    "another attention": (  # which the weights' digest ignores; answers may differ in the last bits
        lambda model: calling(*(partial(model.set_attn_implementation, name) for name in ("eager", "sdpa"))),
        "certified",
    ),
    "another trunk": (lambda model: edited(trunk_weight(model)), "other weights"),
    "another head": (lambda model: edited(model.classifier.bias), "other weights"),
}


@pytest.mark.parametrize(("otherwise", "status"), OTHERWISE.values(), ids=OTHERWISE)
def test_looks_wait_for_the_model_to_be_as_it_was_however_often_it_is_not(
    cache: LLMCache, model: nn.Module, otherwise: Otherwise, status: str
) -> None:
    """A recompute needs the model that served; adapters that take turns lose no look."""
    n_hits = 0
    for some, others in zip(batched(fresh(40), size=10), batched(fresh(20, seed=82), size=5), strict=True):
        n_hits += n_hits_of(cache, [some])
        with otherwise(model):
            assert status == "certified" or rungs_of(cache, [others]) == [None] * 5
            assert known_after(cache) == (n_hits, 0, 0, n_hits)
            assert known(cache).status == status
    assert known(cache).n_alarms == known(cache).n_quarantined == cache.stats().errors == 0  # nothing has failed
    assert known_after(cache) == (n_hits, n_hits, 0, 0) and n_hits > 10
    assert known(cache).status == "certified"


def test_a_job_that_gave_way_settles_no_look_twice(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputes that fail as a batch run one by one; a call comes when some are done."""
    n_hits = n_hits_of(cache, fresh(40))
    settled, run, settle, n_runs = [], Recomputer._run, AuditAccount.settle, 0

    def run_some(self: Recomputer, look: Any, inputs: Any) -> Any:
        nonlocal n_runs
        n_runs += 1
        if len(inputs["input_ids"]) > 1:
            raise RuntimeError("not together")
        if n_runs == 14:
            raise Preempted
        return run(self, look, inputs)

    def settle_once(self: AuditAccount, sample: Any, is_changed: bool) -> bool:
        settled.append(sample.number)
        return settle(self, sample, is_changed)

    monkeypatch.setattr(Recomputer, "_run", run_some)
    monkeypatch.setattr(AuditAccount, "settle", settle_once)
    inside.audit(cache)._recomputer.queue._batchable.add(1)  # marks batches as coming out alike
    cache.drain()
    cache.drain()
    assert n_runs > 14 and len(settled) == len(set(settled)) == n_hits == known(cache).n_recomputed


def test_a_call_does_looks_that_have_waited_if_calls_have_earned_the_time(cache: LLMCache) -> None:
    worker, (again,) = inside.audit(cache).worker, fresh(1)
    ask(cache, fresh(40))
    assert known(cache).n_recomputed == 0 < known(cache).n_drawn
    worker._patience_s = 0.0
    while worker._jobs:
        worker._credit_s = 1e6
        cache(**again)
    assert known(cache).n_waiting == 0 and known(cache).n_recomputed == known(cache).n_drawn


def test_a_look_stops_at_the_next_layer_when_a_call_comes(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, came = inside.audit(cache).worker, threading.Event()
    ask(cache, fresh(40))
    n_drawn, reached = known(cache).n_drawn, []
    attentions = [next(layer.children()) for layer in cache.model.bert.encoder.layer]
    kind, weights = type(attentions[0]), [next(attention.parameters()) for attention in attentions]
    call = kind.__call__

    def meet(part: nn.Module, *args: Any, **inputs: Any) -> Any:
        number = next(i for i, weight in enumerate(weights) if weight is next(part.parameters()))
        if number == 0 and threading.current_thread() is worker._thread and not came.is_set():
            worker.enter()
            came.set()
        elif number == 2:
            reached.append(worker._n_calls)
        return call(part, *args, **inputs)

    monkeypatch.setattr(kind, "__call__", meet)  # no hook, which the audit skips, and no forward, which it watches
    with worker._condition:
        worker._idle_s = 0.0
        worker._condition.notify()
    assert came.wait(60)
    wait_until(lambda: not worker._is_working)
    assert not reached and known(cache).n_recomputed == 0 and known(cache).n_waiting == n_drawn
    worker.leave()
    wait_until(lambda: known(cache).n_recomputed == n_drawn)
    assert cache.stats().errors == 0


def test_who_handles_a_log_record_may_ask_for_the_stats(cache: LLMCache, reading: Reading) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(known(cache).status)  # type: ignore[method-assign]
    logging.getLogger("llmcache").addHandler(handler)
    try:
        thread = threading.Thread(target=ring, args=(cache, reading), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and "tightened" in seen  # no deadlock
    finally:
        logging.getLogger("llmcache").removeHandler(handler)


@pytest.mark.slow
def test_with_a_full_queue_drawn_hits_are_computed_and_are_errors_within_only_if_cached(cache: LLMCache) -> None:
    """Within `only_if_cached` no layer may run."""
    inside.audit(cache).worker._max_jobs = 0
    for one in fresh(40):
        with pytest.raises(NotCachedError) as refused, cache.only_if_cached():
            cache(**one)
        assert refused.value.rows == (0,)
    assert known(cache).n_drawn == cache.stats().n_misses == 0
    assert rungs_of(cache, fresh(40)) == [None] * 40
    assert known(cache).n_drawn == known(cache).n_recomputed > 10
    assert known(cache).n_waiting == cache.drain() == cache.stats().errors == 0


def test_a_purge_while_hits_are_recomputed_leaves_nothing(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "semantic" in rungs_of(cache, fresh(40))
    recomputer = inside.audit(cache)._recomputer
    run = recomputer._recompute
    monkeypatch.setattr(recomputer, "_recompute", lambda tasks: (run(tasks), cache.clear())[0])
    cache.drain()
    assert len(inside.bank(cache)) == 0


def test_a_drawn_hit_that_is_forgotten_is_audited_and_not_stored(cache: LLMCache) -> None:
    first, second, *others = served = [one for one in fresh(40) if n_hits_of(cache, [one])]
    cache.forget(**first)
    cache.drain()
    assert others and known(cache).n_recomputed == len(served)
    assert rungs_of(cache, [first]) != ["exact"] == rungs_of(cache, [second])


def test_purged_and_cleared_requests_are_not_looked_into(cache: LLMCache) -> None:
    ask(cache, fresh(40))
    cache.purge(namespace="other")
    assert known(cache).n_waiting > 10
    inside.sources(cache).quarantine("gone", "default")
    inside.sources(cache).quarantine("stays", "other")
    cache.purge(namespace="default")
    assert known(cache).n_waiting == 0
    cache.drain()  # jobs are left, with nothing to audit
    assert (known(cache).n_recomputed, len(inside.bank(cache))) == (0, 0)
    assert list(inside.sources(cache).quarantined) == ["stays"]
    cache.clear()
    assert not inside.sources(cache).quarantined


def test_the_thread_ends_with_unwrap_and_with_the_model(cache: LLMCache, tmp_path: Path) -> None:
    cache.save(tmp_path)
    ask(cache, fresh(40))
    thread = inside.audit(cache).worker._thread
    cache.unwrap()
    assert not thread.is_alive()
    assert (cache.drain(), known(cache).n_recomputed) == (0, 0)  # what waited is dropped
    model = classifier()
    loaded = inside.keep_quiet(LLMCache.load(model, tmp_path))
    ask(loaded, fresh(40))
    thread, gone = inside.audit(loaded).worker._thread, weakref.ref(model)
    del model, loaded
    gc.collect()
    assert gone() is None
    thread.join(timeout=30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_threads_that_call_drain_and_ask_at_once_lose_nothing(cache: LLMCache) -> None:
    inside.audit(cache).worker._idle_s = 0.0
    start = threading.Barrier(4)

    def work(seed: int) -> int:
        start.wait()
        n_hits = 0
        for one in fresh(25, seed=seed):
            n_hits += n_hits_of(cache, [one])
            if seed % 2:
                cache.drain()
            known(cache)
        return n_hits

    with ThreadPoolExecutor(4) as pool:
        n_hits = sum(pool.map(work, range(90, 94)))
    cache.drain()
    stats = known(cache)
    assert stats.n_drawn == stats.n_recomputed == n_hits > 30 and stats.n_requests == 100
    assert cache.stats().errors == inside.audit(cache).worker._n_calls == 0
