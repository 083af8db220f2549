"""One calibration for all caches on a store: taken up, decided alike, and ended for all."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache import ConfigError, LLMCache, StoreError
from llmcache.banks.stores import Bytes, Store, StoreKey
from llmcache.calibration.published import FORMAT, Standing
from llmcache.request.rows import Scope
from tests import inside
from tests.inside import components, partition
from tests.redis_server import redis_server, wait_until
from tests.topics import (
    N_CALIBRATED,
    Inputs,
    Reading,
    alone,
    ask,
    batched,
    classifier,
    known,
    requests,
    rungs_of,
)

SETTINGS: dict[str, Any] = {
    "max_drop": 0.05,
    "auto_bypass": False,
    "audit": 1.0,
    "audit_in_background": False,
    "store_least_tokens": 0,
    "share_calibration": True,
}
STREAM = requests(60, seed=31)[0]
OTHERS = requests(40, seed=32)[0]
Start = Callable[..., LLMCache]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[list[int], list[str | None]]]:
    """A disk on which a cache has published its calibration, and how that cache then served `STREAM`."""
    folder = tmp_path_factory.mktemp("published") / "store"
    with LLMCache.wrap(classifier(), store=on(folder), **SETTINGS) as cache:
        assert cache.calibrate(batched(requests(N_CALIBRATED)[0])).is_certified
        cache.drain()
        shutil.copytree(folder, folder.with_name("copy"))
        return folder.with_name("copy"), ask(cache, STREAM)


def on(folder: Path) -> dict[str, Any]:
    return {"name": "disk", "folder": str(folder)}


@pytest.fixture
def store(published: tuple[Path, Any], tmp_path: Path) -> dict[str, Any]:
    """A disk with that calibration, for one test."""
    return on(shutil.copytree(published[0], tmp_path / "store"))


@pytest.fixture
def start(store: dict[str, Any]) -> Iterator[Start]:
    """Starts workers on it, which have taken up what they will."""
    caches: list[LLMCache] = []

    def act(model: Any = None, reading: Reading | None = None, **settings: Any) -> LLMCache:
        answer_of = {} if reading is None else {"answer_of": reading}
        caches.append(LLMCache.wrap(model or classifier(), **{**SETTINGS, "store": store, **settings}, **answer_of))
        return begin(caches[-1])

    yield act
    for cache in caches:
        cache.unwrap()


def begin(cache: LLMCache) -> LLMCache:
    """Have a first request asked, after which the store is looked at."""
    cache(**requests(1, seed=77)[0][0])
    cache.drain()
    return cache


def store_of(cache: LLMCache) -> Store:
    used = components(cache).tier
    assert used is not None
    return used._store


def alarm(cache: LLMCache, reading: Reading, seed: int) -> None:
    """Have the audit of one cache find that answers are wrong, until its alarm rings."""
    reading.drifts, before = True, known(cache).n_alarms
    for one in requests(400, seed=seed)[0]:
        cache(**one)
        cache.drain()
        if known(cache).n_alarms > before:
            reading.drifts = False
            return
    raise AssertionError("no alarm")


def place_of(scope: Scope) -> dict[str, Any]:
    """What an announcement tells of where it belongs."""
    return {"scope": [scope.weights, scope.dtype, scope.attention]}


def status(cache: LLMCache) -> str:
    """As it stands when a call has begun."""
    cache(**STREAM[0])
    return known(cache).status


# -- taken up ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", [None, N_CALIBRATED])
def test_a_worker_takes_it_up_and_decides_as_the_one_that_calibrated(
    start: Start, published: tuple[Path, Any], learn: int | None
) -> None:
    cache = start(learn=learn)
    assert known(cache).status == "certified"
    assert ask(cache, STREAM) == published[1]
    assert published[1][1].count("semantic") > 20
    assert cache.stats().errors == 0 and cache.stats().store.n_mismatched == {}


def test_without_the_setting_each_cache_has_its_own(start: Start, store: dict[str, Any]) -> None:
    cache = start(share_calibration=False)
    assert cache.calibration is None
    for wrong in ({"tau": 0.9, "store": store}, {}):
        with pytest.raises(ConfigError, match="share_calibration=True"):
            LLMCache.wrap(classifier(), share_calibration=True, **wrong)


@pytest.mark.parametrize("setting", [{"max_drop": 0.04}, {"decide": "consensus"}, {"audit": 0.5}, {"delta": 0.04}])
def test_one_that_shows_something_else_is_not_taken_up(start: Start, setting: dict[str, Any]) -> None:
    cache = start(**setting)
    assert cache.calibration is None and known(cache).status == "off"
    assert cache.stats().store.n_mismatched == {}


def test_one_of_another_head_is_not_taken_up(start: Start) -> None:
    model: Any = classifier()
    with torch.no_grad():
        model.classifier.bias.add_(1.0)
    cache = start(model)
    assert cache.calibration is None
    assert cache.stats().errors == 0


def test_one_of_another_secret_is_passed_over_and_said_so_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LLMCACHE_STORE_SECRET", "another")
    with caplog.at_level(logging.WARNING, "llmcache"):
        cache = start()
        begin(cache)
    assert cache.calibration is None
    assert cache.stats().store.n_mismatched["damaged"] >= 1
    assert ["passed over" in record.message for record in caplog.records] == [True]
    assert ask(cache, STREAM)[0] == alone(cache, STREAM)


def test_a_damaged_body_is_passed_over_and_computed(start: Start, store: dict[str, Any]) -> None:
    first = start()
    parts = components(first)
    _, standing, place = parts.sharing._shared
    key = parts.tier._key(place.scope, f"b{place.by}.{standing.body}")
    first.unwrap()
    other = LLMCache.wrap(classifier(), store=store, **SETTINGS)
    used, get_many = store_of(other), store_of(other).get_many

    def damaged(keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        found = get_many(keys, deadline)
        return [v if v is None or k != key else bytes(v[:-9]) + b"x" * 9 for k, v in zip(keys, found, strict=True)]

    used.get_many = damaged
    begin(other)
    assert other.calibration is None
    assert other.stats().store.n_mismatched == {"damaged": 1}
    other.unwrap()


def test_one_of_a_later_format_is_passed_over(start: Start) -> None:
    one, other = start(), start()
    parts = components(one)
    _, standing, place = parts.sharing._shared
    about = {**standing.about(), **place_of(place.scope), "format": FORMAT + 1, "version": standing.version + 1}
    parts.tier.announce(place.scope, f"c{place.by}.00000f.{standing.body}.00", {}, about, place.generation)
    one.drain()
    assert status(other) == "certified"
    assert other.stats().store.n_mismatched == {"other_format": 1}


def test_sealed_by_us_but_of_no_use_it_is_passed_over(start: Start) -> None:
    one, other = start(), start()
    parts = components(one)
    _, standing, place = parts.sharing._shared
    bad = Standing(standing.version + 1, "f" * 24)
    parts.tier.put(place.scope, f"b{place.by}.{bad.body}", {"x": torch.ones(2)}, {"calibration": 3}, place.generation)
    about = {**bad.about(), **place_of(place.scope), "format": FORMAT}
    parts.tier.announce(place.scope, f"c{place.by}.{bad.name}", {}, about, place.generation)
    one.drain()
    for _ in range(3):
        begin(other)
    assert known(other).status == "certified"
    assert other.stats().store.n_mismatched == {"damaged": 1}


@pytest.mark.slow
def test_sources_of_several_namespaces_are_not_published(tmp_path: Path) -> None:
    settings = {**SETTINGS, "store": on(tmp_path / "store")}
    with (
        LLMCache.wrap(classifier(), learn=N_CALIBRATED, **settings) as one,
        LLMCache.wrap(classifier(), **settings) as two,
    ):
        parts = batched(requests(N_CALIBRATED)[0])
        for i, some in enumerate(parts):
            with one.namespace("ab"[i % 2]):
                one(**some)
        assert known(one).status == "certified"
        one.drain()
        for name in "ab":
            with two.namespace(name):
                begin(two)
        assert two.calibration is None
        with one.namespace("a"):
            assert rungs_of(one, STREAM).count("semantic") > 5


@pytest.mark.slow
def test_growing_sources_are_shared_from_the_start_and_come_from_all(tmp_path: Path) -> None:
    settings = {**SETTINGS, "sources": "growing", "audit": 0, "store": on(tmp_path / "store")}
    noisy = requests(60, seed=5, noise=0.5)[0]
    with (
        LLMCache.wrap(classifier(), learn=N_CALIBRATED, **settings) as one,
        LLMCache.wrap(classifier(), **settings) as two,
    ):
        for some in batched(requests(N_CALIBRATED)[0]):
            one(**some)
        one.drain()
        begin(two)
        assert two.calibration == one.calibration and known(two).status == "growing"
        n_found = len(partition(two))
        assert n_found == len(partition(one)) == one.calibration.n_sources
        rungs = rungs_of(one, noisy)
        one.drain()
        begin(two)
        assert len(partition(two)) >= n_found + rungs.count(None) > n_found
        assert rungs_of(two, noisy).count(None) < rungs.count(None) / 2
        assert one.stats().errors == two.stats().errors == 0


# -- sources that are missing ------------------------------------------------------------------------------------------


def lose(cache: LLMCache, share: int) -> None:
    """The store has lost the states of one in so many sources."""
    used, get_many = store_of(cache), store_of(cache).get_many

    def get(keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        found = get_many(keys, deadline)
        is_lost = [key.name.startswith("e") and not key.digest[0] % share for key in keys]
        return [None if gone else value for gone, value in zip(is_lost, found, strict=True)]

    used.get_many = get


def test_where_a_source_is_missing_it_is_computed_and_nothing_else_changes(
    store: dict[str, Any], published: tuple[Path, Any]
) -> None:
    with LLMCache.wrap(classifier(), store=store, **SETTINGS) as cache:
        lose(cache, 2)
        begin(cache)
        n_sources = len(partition(cache))
        assert n_sources == cache.calibration.n_sources > cache.stats().n_stored
        answers, rungs = ask(cache, STREAM)
        own = alone(cache, STREAM)
        wanted_answers, wanted_rungs = published[1]
        served = [rung is not None for rung in rungs]
        assert 5 < sum(served) < sum(rung is not None for rung in wanted_rungs)
        for i, is_served in enumerate(served):
            assert (answers[i], rungs[i]) == ((wanted_answers[i], wanted_rungs[i]) if is_served else (own[i], None))
        assert len(partition(cache)) == n_sources  # they vote on
        assert cache.stats().errors == 0


@pytest.mark.slow
def test_a_missing_source_that_is_asked_for_serves_from_then_on(
    store: dict[str, Any], published: tuple[Path, Any]
) -> None:
    with LLMCache.wrap(classifier(), store=store, **SETTINGS) as cache:
        lose(cache, 1)
        begin(cache)
        n_sources = len(partition(cache))
        assert rungs_of(cache, OTHERS) == [None] * len(OTHERS)
        for one in batched(requests(N_CALIBRATED)[0]):  # all sources, and others
            cache(**one)
        assert len(partition(cache)) == n_sources
        assert ask(cache, STREAM) == published[1]


def test_a_source_that_the_store_has_after_all_is_read_when_it_is_to_serve_and_pinned(
    store: dict[str, Any], published: tuple[Path, Any]
) -> None:
    with LLMCache.wrap(classifier(), store=store, **SETTINGS) as cache:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_of(cache), "get_many", store_of(cache).get_many)  # what `lose` puts there is undone
            lose(cache, 1)
            begin(cache)
        assert cache.calibration is not None and cache.stats().n_stored == 1
        assert ask(cache, STREAM) == published[1]
        sources = [record for record in inside.records(cache) if record.slots]
        assert len(sources) == cache.calibration.n_sources
        assert sum(bool(record.entries) for record in sources) > 10
        assert all(record.is_pinned for record in sources)


@pytest.mark.slow
def test_sources_that_are_missing_are_saved_all_the_same(
    store: dict[str, Any], published: tuple[Path, Any], tmp_path: Path
) -> None:
    with LLMCache.wrap(classifier(), store=store, **SETTINGS) as cache:
        lose(cache, 2)
        begin(cache)
        n_sources = len(partition(cache))
        answers, rungs = ask(cache, STREAM)
        cache.save(tmp_path / "saved")
    for changed in ({}, {"store": {"name": "memory"}, "share_calibration": False}):
        manifest = tmp_path / "saved" / "manifest.json"
        saved = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**saved, "config": {**saved["config"], **changed}}))
        with LLMCache.load(classifier(), tmp_path / "saved") as loaded:
            assert len(partition(loaded)) == n_sources
            again = ask(loaded, STREAM)
            assert again[0] == answers
            assert [rung for rung in again[1] if rung != "exact"] == [rung for rung in rungs if rung is not None]
            assert loaded.stats().errors == 0


# -- ended for all -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_alarm_anywhere_tightens_everywhere_and_a_second_one_ends_it(start: Start) -> None:
    reading = Reading()
    one, other = start(reading=reading), start()
    limit = other.calibration.limit
    alarm(one, reading, seed=41)
    assert (known(one).status, status(other)) == ("tightened", "tightened")
    assert other.calibration.limit == one.calibration.limit < limit
    assert known(other).n_alarms == 1
    late = start()
    assert known(late).status == "tightened" and late.calibration.limit == one.calibration.limit
    alarm(one, reading, seed=42)
    assert [status(cache) for cache in (one, other, late)] == ["off"] * 3
    assert known(start()).status == "off"
    assert known(start(learn=N_CALIBRATED)).status == "learning"
    assert all(rung in (None, "exact") for rung in rungs_of(other, OTHERS))


def test_drift_is_told_to_all(start: Start) -> None:
    one, other = start(), start()
    shared = components(one).calibrated
    shared.drifted(one.calibration)
    one.drain()
    assert status(other) == "drifted"
    assert known(start()).status == "off"


@pytest.mark.parametrize("how", ["purge", "clear"])
def test_a_purge_ends_it_for_all(start: Start, how: str) -> None:
    one, other = start(), start()
    one.purge(namespace="default") if how == "purge" else one.clear()
    assert status(other) == "off"
    assert rungs_of(one, OTHERS[:5]) == [None] * 5
    assert start().calibration is None


@pytest.mark.slow
def test_a_new_calibration_takes_the_place_of_the_old_one(start: Start) -> None:
    one, other = start(), start()
    made = one.calibrate(batched(requests(N_CALIBRATED, seed=3)[0]))
    for _ in range(2):
        status(other)
        other.drain()
    assert other.calibration == made
    assert ask(other, OTHERS)[1].count("semantic") > 10
    late = start()
    assert late.calibration == made
    assert one.calibrate(batched(requests(N_CALIBRATED, seed=4)[0]), max_drop=0.2).chosen is not None
    assert status(other) == "certified" and other.calibration == made  # that is not what the settings ask for


def test_what_ended_here_does_not_come_back_from_the_store(start: Start) -> None:
    cache = start()
    components(cache).calibrated.end()
    assert rungs_of(cache, OTHERS) == [None] * len(OTHERS)
    cache.drain()
    assert cache.calibration is None


@pytest.mark.slow
def test_one_made_while_the_store_did_not_answer_stays_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading()
    settings = {**SETTINGS, "store": on(tmp_path / "store")}
    with (
        LLMCache.wrap(classifier(), **settings, answer_of=reading) as one,
        LLMCache.wrap(classifier(), **settings) as two,
    ):

        def fail(*_: Any) -> None:
            raise StoreError("out of order")

        with monkeypatch.context() as patch:
            patch.setattr(store_of(one), "generation", fail)
            made = one.calibrate(batched(requests(N_CALIBRATED)[0]))
        wait_until(lambda: components(begin(one)).tier.is_answering)
        assert begin(two).calibration is None and one.calibration == made
        assert components(one).sharing._shared is None
        alarm(one, reading, seed=61)
        assert one.calibration.n_alarms == 1


# -- each on its own account -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_counts_its_own_requests_and_quarantines_its_own_sources(start: Start) -> None:
    reading = Reading()
    one, other = start(reading=reading), start()
    n_before = known(other).n_requests
    hit = next(x for x in STREAM if rungs_of(one, [x]) == ["semantic"])
    (source,) = [outcome.source for outcome in one.last]
    reading.drifts = True
    one.drain()
    assert known(one).n_changed == 1 and source in inside.banks(one).quarantined
    assert rungs_of(other, [hit]) == ["semantic"]
    other.drain()
    assert (known(other).n_requests - n_before, known(other).n_changed) == (1, 0)
    assert source not in inside.banks(other).quarantined


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [("put_many",), ("events", "get_many", "put_many", "contains_prefix", "ping", "generation")]
)
def test_an_alarm_while_the_store_does_not_answer_is_heard_of_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    reading = Reading()
    one, other = start(reading=reading), start()

    def fail(*_: Any) -> None:
        raise StoreError("out of order")

    with monkeypatch.context() as patch:
        for name in broken:
            patch.setattr(store_of(one), name, fail)
        alarm(one, reading, seed=51)
        assert one.calibration.n_alarms == 1 and status(other) == "certified"
    wait_until(lambda: begin(one) is one and status(other) == "tightened")  # once the store answers


@pytest.mark.slow
def test_on_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        settings = {**SETTINGS, "store": {"name": "redis", "url": server.url, "timeout_ms": 5_000.0}}
        reading = Reading()
        with (
            LLMCache.wrap(classifier(), **settings, answer_of=reading) as one,
            LLMCache.wrap(classifier(), **settings, learn=N_CALIBRATED) as other,
        ):
            made = one.calibrate(batched(requests(N_CALIBRATED)[0]))
            assert made.is_certified
            wait_until(lambda: begin(other).calibration == made)
            assert rungs_of(other, OTHERS).count("semantic") > 20
            alarm(one, reading, seed=41)
            wait_until(lambda: status(other) == "tightened")
            with LLMCache.wrap(classifier(), **settings) as late:
                wait_until(lambda: known(begin(late)).status == "tightened")
            one.purge(namespace="default")
            assert status(other) in ("learning", "off")
            assert one.stats().errors == other.stats().errors == 0


def test_what_the_store_has_lost_is_written_again(start: Start, store: dict[str, Any]) -> None:
    cache = start()
    index = store_of(cache)._index
    with index.writing() as changes:
        changes._remove([n for (n,) in changes._do("SELECT id FROM held").fetchall()])
    later: list[Inputs] = requests(1, seed=78)[0]
    assert LLMCache.wrap(classifier(), **{**SETTINGS, "store": store}).unwrap() is not None
    cache(**later[0])
    cache.drain()
    assert start().calibration == cache.calibration
