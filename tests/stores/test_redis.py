"""The Redis store: expiry, full memory, purges, an absent or hanging server, lost connections, refused options."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmcache import ConfigError, StoreError
from llmcache.memory.stores import STORES, Put, redis
from llmcache.memory.stores.redis import RedisStore
from llmcache.support.registry import Component
from llmcache.testing import check_store
from tests.fixtures import Log, Patch
from tests.redis_server import RedisServer, redis_server, wait_until
from tests.stores import values
from tests.stores.values import check_readers, held, key, value

PATIENT = 5_000.0  # milliseconds: enough for a slow machine
SIZE = 3_000
put = partial(values.put, size=SIZE)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """A server that holds nothing."""
    shared.do("FLUSHALL")
    return shared


@pytest.fixture
def open_store(server: RedisServer) -> Iterator[Callable[..., RedisStore]]:
    opened = []

    def open_one(**options: Any) -> RedisStore:
        opened.append(RedisStore(**{"url": server.url, "timeout_ms": PATIENT, **options}))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., RedisStore]) -> RedisStore:
    return open_store()


def made(**options: Any) -> Any:
    """Open the store as a setting does."""
    return Component(name="redis", **options).build(STORES)


def answers(store: RedisStore) -> bool:
    with suppress(StoreError):
        store.numbers([])
        return hears(store, None)
    return False


def hears(store: RedisStore, since: str | None) -> bool:
    with suppress(StoreError):
        store.purges(since)
        return True
    return False


def check_refuses(store: RedisStore) -> None:
    asks = lambda: store.absent([key("a")]), lambda: store.numbers([]), lambda: store.purge("a"), store.stats
    for ask in (lambda: held(store, "a"), lambda: put(store, "b"), *asks):
        with pytest.raises(StoreError):
            ask()


@pytest.mark.slow
def test_it_keeps_the_rules(server: RedisServer) -> None:
    check_store(lambda: RedisStore(server.url, timeout_ms=PATIENT))
    assert server.names("llmcache:*:*:*:*:*") == []


# -- time and room -----------------------------------------------------------------------------------------------------


def test_every_name_leaves_at_its_time(store: RedisStore, server: RedisServer) -> None:
    put(store, "a", "b")
    put(store, "a", namespace="b")
    assert len(server.names()) == 5
    left_s = {name: server.do("TTL", name) for name in server.names()}
    for name, seconds in left_s.items():  # saves outlive the values
        least, most = (86_400, 30 * 86_400) if name.endswith((":numbers", ":purges")) else (0, 86_400)
        assert least < seconds <= most


@pytest.mark.parametrize("namespace", ["a", None])
def test_without_memory_it_fails_to_write_goes_on_to_read_and_can_be_purged(
    store: RedisStore, server: RedisServer, namespace: str | None
) -> None:
    put(store, "a")
    (before,), seen = store.numbers(["a"]), store.purges(None).cursor
    server.do("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb")
    with pytest.raises(StoreError, match="memory"):
        put(store, "b")
    assert held(store, "a", "b") == ["a"] and store.stats().max_bytes == 1 << 20
    store.purge(namespace)
    assert not any(name.count(":") > 3 for name in server.names())
    assert held(store, "a") == []
    server.do("CONFIG", "SET", "maxmemory", 0)
    wait_until(lambda: answers(store))
    assert not store.purges(seen).is_complete
    assert store.numbers(["a"])[0] != before

    def is_put() -> bool:  # once the stream of purges has an entry again
        put(store, "b")
        return held(store, "a", "b") == ["b"]

    wait_until(is_put)


# -- purges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["a", None])
def test_nothing_of_what_was_purged_is_left_in_the_server(
    open_store: Callable[..., RedisStore], server: RedisServer, namespace: str | None
) -> None:
    """And nothing else is touched: neither other applications' keys nor those of another prefix."""
    store, other = open_store(), open_store(prefix="other")
    others = ["llmcache:", "llmcache:x", "llmcache:x:y", "llmcache:x:y:z", "llmcache2:1:2:3", "session:1"]
    for name in others:
        server.do("SET", name, b"mine")
    put(store, *range(1_500))
    put(store, "b", namespace="b")
    put(other, "a")
    assert held(store, "a") == []
    assert store.purge(namespace) == (1_500 if namespace else 1_501)
    assert len(server.names("llmcache:*:*:*:*:*")) == (1 if namespace else 0)
    assert held(store, "b", namespace="b") == (["b"] if namespace else []) and held(other, "a") == ["a"]
    assert all(server.do("GET", name) == b"mine" for name in others)


@pytest.mark.slow
@pytest.mark.parametrize("dropped_by", ["purge", "forget"])
def test_nothing_from_before_a_purge_is_served_after_it(open_store: Callable[..., RedisStore], dropped_by: str) -> None:
    check_readers(open_store, dropped_by, 3)


def test_many_purged_namespaces_take_no_room(store: RedisStore, server: RedisServer, monkeypatch: Patch) -> None:
    monkeypatch.setattr(redis, "_MOST_NAMESPACES", 5)
    monkeypatch.setattr(redis, "LEASE_S", 0.0)
    put(store, "kept", namespace="kept")
    for i in range(20):
        put(store, "a", namespace=f"{i}")
        store.purge(f"{i}")
        assert held(store, "a", namespace=f"{i}") == []
    (numbers,) = server.names("*:numbers")
    assert server.do("HLEN", numbers) <= 6


# -- the server is away ------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_begins_empty_and_is_found_again(
    open_store: Callable[..., RedisStore], server: RedisServer, caplog: Log
) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    seen, generation = store.purges(None).cursor, store.numbers(["a"])[0]
    server.kill()
    check_refuses(store)
    wait_until(lambda: caplog.text.count("is computed until it answers") == 2)  # also the store that was not asked
    server.start()
    for one in (store, other):
        wait_until(lambda one=one: answers(one))
    wait_until(lambda: not store.purges(seen).is_complete)
    assert store.numbers(["a"])[0] == other.numbers(["a"])[0] != generation
    assert held(store, "a") == []
    put(store, "a")
    wait_until(lambda: held(other, "a") == ["a"])
    assert caplog.text.count("is computed until it answers") == caplog.text.count("answers again") == 2


def test_a_server_that_lost_a_purge_serves_nothing_from_before(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--dbfilename", "dump.rdb") as server:
        store = RedisStore(server.url, timeout_ms=PATIENT)
        put(store, "a")
        server.do("SAVE")
        store.purge("a")
        server.kill()
        server.start()
        assert any(name.count(":") == 5 for name in server.names())
        wait_until(lambda: answers(store))
        assert held(store, "a") == []
        store.close()


def test_a_server_that_does_not_answer_costs_an_error(
    open_store: Callable[..., RedisStore], server: RedisServer
) -> None:
    store, patient = open_store(timeout_ms=5.0), open_store()
    wait_until(lambda: answers(store))
    put(patient, "a")
    seen = store.purges(None).cursor
    with server.paused():
        check_refuses(store)
        wait_until(lambda: not hears(store, seen))  # purges are not told from memory
    wait_until(lambda: answers(store))
    assert store.purges(seen).is_complete  # none was lost
    assert held(patient, "a") in ([], ["a"])  # the server may run commands after the pause


def test_connections_that_are_reset_are_made_anew(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    seen = other.purges(None).cursor
    for i in range(20):
        server.reset_connections()
        with suppress(StoreError):
            put(store, i)
        with suppress(StoreError):
            assert set(held(store, *range(i + 1))) <= {*range(20)}
    wait_until(lambda: answers(store) and answers(other))
    put(store, "last")
    assert held(store, "a", "last") == ["a", "last"]
    store.purge("b")
    assert [purge.namespace for purge in other.purges(seen).found] == ["b"]


def test_numbers_that_were_lost_are_given_anew(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    before, seen = store.numbers(["a"])[0], other.purges(None).cursor
    server.do("DEL", *server.names("*:numbers"))
    assert held(store, "a") == []
    store.put_many([Put(key("b"), value("b", SIZE), before, seen)])
    assert store.numbers(["a"])[0] == other.numbers(["a"])[0] != before
    assert held(store, "a", "b") == held(other, "a", "b") == []
    wait_until(lambda: not other.purges(seen).is_complete)


# -- other prefixes, options, versions and servers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://127.0.0.1"}, "url"),
        ({"url": "127.0.0.1:6379"}, "url"),
        ({"prefix": "a:b"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"timeout_ms": 0.0}, "timeout_ms"),
        ({"timeout_ms": "5"}, "timeout_ms"),
        ({"host": "127.0.0.1"}, "host"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ConfigError, match=message):
        made(**{"url": "redis://127.0.0.1:1", **options})


def test_values_of_another_version_are_refused_in_one_line(server: RedisServer) -> None:
    server.do("SET", f"llmcache:{'0' * 40}:{'1' * 32}:5:{'2' * 64}", b"old")
    with pytest.raises(ConfigError, match=r"of another version are kept .*: name another prefix"):
        made(url=server.url)


def test_a_replica_is_refused(server: RedisServer) -> None:
    server.do("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ConfigError, match="read only"):
        made(url=server.url)
    server.do("REPLICAOF", "NO", "ONE")


def test_without_redis_py_it_tells_how_to_get_it(monkeypatch: Patch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis.connection", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[redis\]'"):
        made(url="redis://127.0.0.1:1")
