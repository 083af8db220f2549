"""Caches that share a Redis: what one computed another serves, and a server in trouble costs speed alone."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmcache import LLMCache, StoreError, persist
from llmcache.banks.stores.seal import SECRET
from tests.inside import components
from tests.redis_server import RedisServer, redis_server, wait_until
from tests.tiny_models import CLASSIFIERS, GENERATORS, build, tokens

IDS = tokens(1, 9)


def start(url: str, make: Callable[[], Any] = CLASSIFIERS["bert"], **options: Any) -> LLMCache:
    store = {"name": "redis", "url": url, "timeout_ms": 5_000.0, **options}
    return LLMCache.wrap(build(make), store=store, store_least_tokens=0, auto_bypass=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def started(server: RedisServer) -> Iterator[Callable[..., LLMCache]]:
    caches = []

    def act(*args: Any, **options: Any) -> LLMCache:
        caches.append(start(server.url, *args, **options))
        return caches[-1]

    yield act
    for cache in caches:
        cache.unwrap()


def plainly(cache: LLMCache, ids: Tensor = IDS) -> Tensor:
    with cache.disabled():
        return cache(ids)[0]


def rung(cache: LLMCache, ids: Tensor = IDS) -> str | None:
    """By which rung a request is served; its answer has to be right."""
    output = cache(ids)[0]
    found = cache.last[0].rung
    torch.testing.assert_close(output, plainly(cache, ids), atol=1e-5, rtol=1e-5)
    cache.drain()
    return found


def is_answering(cache: LLMCache) -> bool:
    stats = cache.stats().store
    return stats is not None and stats.is_answering and stats.n_values is not None


@pytest.mark.parametrize("make", [CLASSIFIERS["bert"], GENERATORS["gpt2"]])
def test_what_one_computed_another_serves_until_it_is_purged(started: Callable[..., LLMCache], make: Any) -> None:
    one, other = started(make), started(make)
    ids = tokens(1, 40)
    assert [rung(one, ids), rung(other, ids)] == [None, "exact"]
    assert rung(other, ids) == "exact"  # from memory
    one.purge(namespace="default")
    assert [rung(other, ids), rung(one, ids)] == [None, "exact"]
    one.clear()
    assert [rung(other, ids), rung(one, ids)] == [None, "exact"]
    assert one.stats().errors == other.stats().errors == 0


def test_a_paused_server_costs_speed_alone(started: Callable[..., LLMCache], server: RedisServer) -> None:
    one, other = started(timeout_ms=20.0), started(timeout_ms=20.0)
    wait_until(lambda: rung(one) == "exact")
    with server.paused():
        assert rung(one) == "exact"  # from memory
        for seed in range(10):
            assert rung(other, tokens(1, 9, seed=seed)) is None
        assert not is_answering(other)
        with pytest.raises(StoreError):
            one.purge(namespace="default")
    wait_until(lambda: is_answering(other))
    other(tokens(1, 12, seed=99))
    other.drain()
    wait_until(lambda: rung(one, tokens(1, 12, seed=99)) == "exact")


@pytest.mark.parametrize("pause", ["", "from before", "from when it was heard", "for a moment"])
def test_what_was_purged_since_a_save_is_not_served_from_it(
    started: Callable[..., LLMCache],
    server: RedisServer,
    pause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is anything else forgotten, whatever becomes of the server meanwhile."""
    one, names = started(), ("purged", "kept")
    for name in names:
        with one.namespace(name):
            assert rung(one) is None
    one.save(tmp_path / "save")
    one.purge(namespace="purged")
    with ExitStack() as stack:
        restore = persist.restore

        def pause_and_restore(*args: Any) -> None:
            stack.enter_context(server.paused())
            if pause == "for a moment":
                threading.Timer(0.1, stack.close).start()
            restore(*args)

        if pause == "from before":
            stack.enter_context(server.paused())
        elif pause:
            monkeypatch.setattr(persist, "restore", pause_and_restore)
        other = LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path / "save")
        assert ("not used, as it may have been purged since" in caplog.text) == (not pause.startswith("from"))
        if pause.startswith("from"):
            for name in names:
                with other.namespace(name):
                    assert rung(other) == "exact"  # as by one that has run all the time
    wait_until(lambda: is_answering(other))
    wait_until(lambda: not follows_late(other))
    for name, found in zip(names, (None, "exact"), strict=True):
        with other.namespace(name):
            assert rung(other) == found
    other.unwrap()


def follows_late(cache: LLMCache) -> bool:
    """Whether the next call would not hear of a purge."""
    tier = components(cache).tier
    assert tier is not None
    try:
        tier._store.events(None)
    except StoreError:
        return True
    return False


def test_who_was_away_forgets_what_was_purged_meanwhile(started: Callable[..., LLMCache], server: RedisServer) -> None:
    one, other = started(), started()
    assert [rung(one), rung(other)] == [None, "exact"]
    server.kill()
    for seed in range(5):
        rung(other, tokens(1, 9, seed=seed))
    assert rung(other) == "exact"  # from memory
    server.start()
    wait_until(lambda: purges(one))
    assert rung(other) is None


def purges(cache: LLMCache) -> bool:
    with suppress(StoreError):
        cache.purge(namespace="default")
        return True
    return False


def test_a_cache_starts_before_its_server(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    caches = [start(server.url), start(server.url)]
    assert "is computed until it answers" in caplog.text
    assert [rung(cache, tokens(1, 9, seed=seed)) for cache in caches for seed in (0, 0, 1)] == [None, "exact", None] * 2
    server.start()
    for cache in caches:
        wait_until(lambda cache=cache: is_answering(cache))
    wait_until(lambda: rung(caches[0], tokens(1, 20)) == "exact")
    wait_until(lambda: rung(caches[1], tokens(1, 20)) == "exact")
    caches[0].purge(namespace="default")
    assert rung(caches[1], tokens(1, 9)) is None
    for cache in caches:
        cache.unwrap()


def test_a_server_without_memory_is_read_and_what_was_not_written_counted(
    started: Callable[..., LLMCache], server: RedisServer
) -> None:
    one, other = started(), started()
    rung(one)
    server.do("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb")
    assert rung(other) == "exact"
    assert rung(one, tokens(1, 12)) is None
    assert rung(other, tokens(1, 12)) is None
    stats = one.stats()
    assert stats.store is not None and stats.store.n_dropped == 1 and stats.errors == 1


def test_values_of_others_are_counted_misses(
    started: Callable[..., LLMCache], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung(started())
    (name,) = server.names("llmcache:*:*:*")
    value = server.do("GET", name)
    for wrong, reason in (
        (b"theirs", "damaged"),
        (value[: len(value) // 2], "damaged"),
        (value[:4] + b"\3\0" + value[6:], "other_format"),
        (value[:20] + bytes(20) + value[40:], "other_key"),
    ):
        server.do("SET", name, wrong, "EX", 60)
        cache = started()
        assert rung(cache) is None
        assert cache.stats().store.n_mismatched == {reason: 1}  # type: ignore[union-attr]
    server.do("SET", name, value, "EX", 60)
    monkeypatch.setenv(SECRET, "another")
    cache = started()
    assert rung(cache) is None
    assert cache.stats().store.n_mismatched == {"damaged": 1}  # type: ignore[union-attr]


def work(url: str, say: Connection) -> None:
    """What a process of its own serves of five requests."""
    cache = start(url)
    rungs = [rung(cache, tokens(1, 9, seed=seed)) for seed in range(5)]
    cache.unwrap()
    say.send(rungs)


@pytest.mark.slow
def test_processes_share_what_they_compute(server: RedisServer) -> None:
    context = multiprocessing.get_context("spawn")
    for expected in (None, "exact"):
        listen, say = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(server.url, say))
        process.start()
        say.close()
        assert listen.recv() == [expected] * 5
        process.join(60)
        assert process.exitcode == 0
