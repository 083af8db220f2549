"""Approximate reuse by workers that share a store: each finds by itself what any of them computed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import STORES, LLMCache, StoreError
from llmcache.banks import elsewhere, tier
from llmcache.banks.elsewhere import Elsewhere
from llmcache.banks.stores import Put, Store
from llmcache.banks.stores.seal import Seal
from tests.conformance.outside import Shared
from tests.inside import components
from tests.redis_server import redis_server, wait_until
from tests.tiny_models import CLASSIFIERS, build, tokens
from tests.topics import N_CALIBRATED, batched, classifier, requests, rungs_of

FIRST = tokens(1, 9)
NEAR = FIRST.clone()
NEAR[0, 4] = (NEAR[0, 4] + 7) % 90 + 5
FAR = tokens(1, 9, seed=8)


@pytest.fixture(params=["shared", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a store: one in this process, which tells of everything at once, or a real Redis."""
    if request.param == "redis":
        with redis_server(tmp_path) as server:
            yield {"name": "redis", "url": server.url, "timeout_ms": 5_000.0}
        return
    STORES.register("shared", Shared)
    yield {"name": "shared", "place": request.node.name}
    del STORES["shared"]
    Shared.places.pop(request.node.name, None)


@pytest.fixture
def started(store: dict[str, Any]) -> Iterator[Callable[..., LLMCache]]:
    """Starts workers."""
    caches = []

    def act(model: Any = None, **settings: Any) -> LLMCache:
        options = {"tau": 0.97, "store_least_tokens": 0, "auto_bypass": False, **settings}
        caches.append(LLMCache.wrap(model or build(CLASSIFIERS["bert"]), store=store, **options))
        return caches[-1]

    yield act
    for cache in caches:
        cache.unwrap()


def known(cache: LLMCache) -> Elsewhere:
    """What a worker has heard of, and does not hold."""
    found = components(cache).banks.elsewhere
    assert found is not None
    return found


def store_of(cache: LLMCache) -> Store:
    used = components(cache).tier
    assert used is not None
    return used._store


def listen(cache: LLMCache) -> None:
    """As at the beginning of a call."""
    parts = components(cache)
    assert parts.tier is not None
    parts.tier.generation("default")
    parts.tier.follow(parts.forget, parts.banks.hear if parts.hears else None)
    cache.drain()


def hears(cache: LLMCache, n: int = 1) -> bool:
    listen(cache)
    return len(known(cache)) == n


def ask(cache: LLMCache, ids: Tensor) -> tuple[str | None, Tensor]:
    """By which rung a request is served, and what it is answered."""
    logits = cache(ids).logits
    cache.drain()
    return cache.last[0].rung, logits


def test_what_one_computed_is_found_by_another(started: Callable[..., LLMCache]) -> None:
    one, other = started(), started()
    rung, first = ask(one, FIRST)
    assert rung is None
    wait_until(lambda: hears(other))
    assert other.stats().n_stored == 0
    rung, answer = ask(other, NEAR)
    assert rung == "semantic" and torch.equal(answer, first)
    assert len(known(other)) == 0 and other.stats().n_stored == 1  # it is held from now on
    assert ask(other, FIRST)[0] == "exact"
    assert one.stats().errors == other.stats().errors == 0


def test_a_worker_that_begins_later_finds_what_was_there(started: Callable[..., LLMCache]) -> None:
    one = started()
    for ids in (FIRST, FAR):
        ask(one, ids)
    other = started()
    wait_until(lambda: hears(other, 2))
    assert ask(other, NEAR)[0] == "semantic"


def test_after_a_purge_nothing_of_it_is_found(started: Callable[..., LLMCache]) -> None:
    one, other = started(), started()
    ask(one, FIRST)
    with one.namespace("kept"):
        ask(one, FIRST)
    wait_until(lambda: hears(other))
    one.purge(namespace="default")
    assert ask(other, NEAR)[0] is None
    assert len(known(other)) == 0
    ask(one, FAR)
    wait_until(lambda: hears(other))  # what came afterwards
    one.clear()
    assert ask(other, FAR)[0] is None
    later = started()
    listen(later)
    assert ask(later, FIRST)[0] is None


def test_of_another_namespace_nothing_is_found(started: Callable[..., LLMCache]) -> None:
    one, other = started(), started()
    with one.namespace("theirs"):
        ask(one, FIRST)
    assert ask(other, NEAR)[0] is None
    with other.namespace("theirs"):
        wait_until(lambda: ask(other, FAR) and hears(other))
        assert ask(other, NEAR)[0] == "semantic"


def test_what_the_store_has_lost_is_computed_and_found_no_more(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = started(), started()
    ask(one, FIRST)
    wait_until(lambda: hears(other))
    monkeypatch.setattr(store_of(other), "get_many", lambda keys, deadline: [None] * len(keys), raising=False)
    assert ask(other, NEAR)[0] is None
    assert len(known(other)) == 0


def test_while_the_store_fails_it_is_computed_and_found_again_afterwards(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = started(), started()
    ask(one, FIRST)
    wait_until(lambda: hears(other))

    def fail(*_: Any) -> None:
        raise StoreError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(store_of(other), "get_many", fail, raising=False)
        assert ask(other, NEAR)[0] is None
    assert len(known(other)) == 1


def test_what_left_memory_is_found_and_fetched(started: Callable[..., LLMCache]) -> None:
    cache = started(max_entries=1)
    _, first = ask(cache, FIRST)
    assert ask(cache, FAR)[0] is None
    assert len(known(cache)) == 1 and cache.stats().n_stored == 1
    rung, answer = ask(cache, NEAR)
    assert rung == "semantic" and torch.equal(answer, first)


def test_no_more_is_known_than_there_is_room_for(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "MOST", 2)
    one, other = started(tau=0.9999), started(tau=0.9999)
    for seed in range(4):
        ask(one, tokens(1, 9, seed=seed + 20))
    wait_until(lambda: hears(other, 2))
    assert ask(other, tokens(1, 9, seed=23))[0] == "exact"
    assert len(components(other).banks._index._found_at) == 2


@pytest.mark.parametrize("at_once", [0, 256])
def test_many_announcements_are_read_behind_the_calls(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(tier, "_MOST_AT_ONCE", at_once)
    monkeypatch.setattr(tier, "_AT_ONCE", 3)
    one, other = started(tau=0.9999), started(tau=0.9999)
    listen(other)
    for seed in range(10):
        ask(one, tokens(1, 9, seed=seed + 20))
    wait_until(lambda: hears(other, 10))


def test_who_compares_by_another_fingerprint_hears_nothing(started: Callable[..., LLMCache]) -> None:
    one, other, third = started(), started(fingerprint="simhash"), started()
    ask(one, FIRST)
    wait_until(lambda: hears(third))
    listen(other)
    assert len(known(other)) == 0
    assert ask(other, FIRST)[0] == "exact"  # entries are the same


def test_answers_of_another_head_are_not_heard(started: Callable[..., LLMCache]) -> None:
    one, alike = started(decide="consensus"), started(decide="consensus")
    model: Any = build(CLASSIFIERS["bert"])
    with torch.no_grad():
        model.classifier.weight.neg_()
    other = started(model, decide="consensus")
    ask(one, FIRST)
    wait_until(lambda: hears(alike))
    assert next(iter(known(alike).values())).answer is not None
    listen(other)
    assert len(known(other)) == 0


@pytest.mark.parametrize("name", ["f{by}.x", "e3.x", "f.x", "x"])
def test_announcements_that_are_none_are_passed_over(started: Callable[..., LLMCache], name: str) -> None:
    one, other = started(), started()
    ask(one, FIRST)
    wait_until(lambda: hears(other))
    used, (request,) = components(one).tier, known(other).values()
    assert used is not None
    key = used._key(request.scope, name.format(by=known(one)._compared_by()[:16]))
    number = store_of(one).generation("default")
    sealed = Seal().close(key, {"vector": torch.ones(3)}, {"scope": ["w"], "compared_by": "?"})
    store_of(one).put_many([Put(key, b"", number, note) for note in (b"theirs", bytes(sealed))])
    ask(one, FAR)
    wait_until(lambda: hears(other, 2))
    assert ask(other, NEAR)[0] == "semantic"


def test_one_that_is_loaded_hears_what_was_announced_before(started: Callable[..., LLMCache], tmp_path: Path) -> None:
    one = started()
    ask(one, FIRST)
    one.save(tmp_path / "save")
    ask(one, FAR)
    with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path / "save") as loaded:
        wait_until(lambda: hears(loaded))


def test_growing_sources_come_from_all_workers(store: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_drop": 0.05, "auto_bypass": False, "store": store, "store_least_tokens": 0, "audit": 0}
    calibrated = batched(requests(N_CALIBRATED)[0])
    workers: dict[str, list[LLMCache]] = {}
    for sources in ("growing", "frozen"):
        with LLMCache.wrap(classifier(), sources=sources, **settings) as cache:
            assert cache.calibrate(calibrated).chosen is not None
            cache.save(tmp_path / sources)
        workers[sources] = [LLMCache.load(classifier(), tmp_path / sources) for _ in range(2)]
    asked = requests(60, seed=5, noise=0.5)[0]
    one, other = workers["growing"]
    listen(other)
    rungs = rungs_of(one, asked)
    one.drain()
    assert rungs.count(None) > 3
    wait_until(lambda: hears(other, rungs.count(None)))
    assert all(request.answer is not None for request in known(other).values())
    assert rungs_of(other, asked).count(None) < rungs.count(None) / 2
    one, other = workers["frozen"]
    rungs_of(one, requests(60, seed=6, noise=0.5)[0])
    for cache in (one, other):
        cache.drain()
        listen(cache)
        assert len(known(cache)) == 0
    for cache in (*workers["growing"], *workers["frozen"]):
        assert cache.stats().errors == 0
        cache.unwrap()
