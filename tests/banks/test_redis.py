"""The store on Redis: what it is besides a store, whatever happens to the server, its memory and the connections."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from experiments.measures.over_http.processes import free_port
from llmcache import ConfigError, StoreError
from llmcache.banks.stores import STORES, Put, StoreKey, redis, redis_follower
from llmcache.banks.stores.redis import RedisStore
from llmcache.registry import Component
from llmcache.testing import check_store
from tests.banks.readers import check_readers
from tests.redis_server import RedisServer, redis_server, wait_until

PATIENT = 5_000.0  # milliseconds: no test hangs on how fast this machine is
SIZE = 3_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


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
    """As a setting opens it."""
    return Component(name="redis", **options).build(STORES)


def key(name: object, namespace: str = "a") -> StoreKey:
    return StoreKey(namespace, "0" * 64, f"{name}")


def value(name: object, size: int = SIZE) -> bytes:
    return random.Random(f"{name}").randbytes(size)


def put(store: RedisStore, *names: object, size: int = SIZE, namespace: str = "a") -> None:
    generation = store.generation(namespace)
    store.put_many([Put(key(name, namespace), value(name, size), generation) for name in names])


def held(store: RedisStore, *names: object, namespace: str = "a") -> list[object]:
    """Those of which the store has the value that was put."""
    found = store.get_many([key(name, namespace) for name in names], time.monotonic() + 60)
    assert all(one in (None, value(name)) for name, one in zip(names, found, strict=True))
    return [name for name, one in zip(names, found, strict=True) if one is not None]


def answers(store: RedisStore) -> bool:
    with suppress(StoreError):
        store.ping()
        store.events(None)
        return True
    return False


def is_silent(store: RedisStore, seen: str) -> bool:
    """Whether it is an error to ask what came after a cursor: the server is not heard."""
    try:
        store.events(seen)
    except StoreError:
        return True
    return False


@pytest.mark.slow
def test_it_keeps_the_rules(server: RedisServer) -> None:
    check_store(lambda: RedisStore(server.url, timeout_ms=PATIENT))
    assert server.names("llmcache:*:*:*") == []
    check_readers(lambda: RedisStore(server.url, timeout_ms=PATIENT))


# -- time and room -----------------------------------------------------------------------------------------------------


def test_every_name_leaves_at_its_time(store: RedisStore, server: RedisServer) -> None:
    put(store, "a", "b")
    put(store, "a", namespace="b")
    assert len(server.names()) == 5
    left_s = {name: server.do("TTL", name) for name in server.names()}
    numbers_s = left_s.pop(next(name for name in left_s if name.endswith(":generations")))
    assert all(0 < seconds <= 86_400 for seconds in left_s.values())
    assert 86_400 < numbers_s <= 30 * 86_400  # folders that were saved outlive the values


def test_a_value_whose_time_is_over_is_a_miss(open_store: Callable[..., RedisStore]) -> None:
    store = open_store(ttl_s=1)
    put(store, "a")
    assert held(store, "a") == ["a"]
    wait_until(lambda: not held(store, "a"))
    put(store, "a")
    assert held(store, "a") == ["a"]


def test_what_the_server_evicted_is_a_miss(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store = open_store()
    server.do("CONFIG", "SET", "maxmemory", server.do("INFO", "memory")["used_memory"] + 3_000_000)
    server.do("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    for i in range(40):
        put(store, *range(50 * i, 50 * i + 50))
    kept = held(store, *range(2_000))
    assert 0 < len(kept) < 1_500
    stats = store.stats()
    assert stats.n_evicted >= 2_000 - len(kept) and stats.max_bytes is not None


def test_without_memory_it_fails_to_write_and_goes_on_to_read(store: RedisStore, server: RedisServer) -> None:
    put(store, "a")
    server.do("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb")
    with pytest.raises(StoreError, match="memory"):
        put(store, "b")
    assert held(store, "a", "b") == ["a"]
    assert store.stats().max_bytes == 1 << 20
    server.do("CONFIG", "SET", "maxmemory", 0)
    put(store, "b")
    assert held(store, "a", "b") == ["a", "b"]


@pytest.mark.parametrize("namespace", ["a", None])
def test_without_memory_it_can_be_purged(store: RedisStore, server: RedisServer, namespace: str | None) -> None:
    put(store, "a")
    before = store.generation("a")
    server.do("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb")
    seen = store.events(None).cursor
    store.remove(namespace)
    assert not any(name.count(":") > 2 for name in server.names())
    assert held(store, "a") == []
    server.do("CONFIG", "SET", "maxmemory", 0)
    wait_until(lambda: answers(store))
    assert not store.events(seen).is_complete
    assert store.generation("a") != before
    put(store, "b")
    assert held(store, "a", "b") == ["b"]


@pytest.mark.parametrize("namespace", ["a", None])
def test_all_have_heard_of_a_purge_of_a_server_without_memory(
    open_store: Callable[..., RedisStore], server: RedisServer, namespace: str | None
) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    server.do("CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "1mb")
    seen = other.events(None).cursor
    store.remove(namespace)
    time.sleep(1.5)  # however long ago it was
    assert not other.events(seen).is_complete
    server.do("CONFIG", "SET", "maxmemory", 0)
    put(store, "b")
    wait_until(lambda: answers(other))


def test_a_server_without_memory_at_the_start_is_used_when_it_has_some(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as server:
        store = RedisStore(server.url, timeout_ms=PATIENT)
        with pytest.raises(StoreError):
            put(store, "a")
        server.do("CONFIG", "SET", "maxmemory", 0)
        wait_until(lambda: answers(store))
        put(store, "a")
        assert held(store, "a") == ["a"]
        store.close()


def test_a_value_that_is_larger_than_redis_takes_is_left_out(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_LARGEST", SIZE - 1)
    put(store, "a")
    assert held(store, "a") == []


# -- purges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["a", None])
def test_nothing_of_what_was_purged_is_left_in_the_server(
    store: RedisStore, server: RedisServer, namespace: str | None
) -> None:
    others = ["llmcache:", "llmcache:x", "llmcache:x:y", "llmcache:x:y:z", "llmcache2:1:2:3", "session:1"]
    for name in others:
        server.do("SET", name, b"mine")
    put(store, *range(1_500))
    put(store, "b", namespace="b")
    assert store.remove(namespace) == (1_500 if namespace else 1_501)
    kept = [name for name in server.names() if name.count(":") == 4]
    assert len(kept) == (1 if namespace else 0)
    assert held(store, "b", namespace="b") == (["b"] if namespace else [])
    assert all(server.do("GET", name) == b"mine" for name in others)


def test_what_is_discarded_is_gone_at_once(store: RedisStore, server: RedisServer) -> None:
    put(store, *range(10))
    put(store, "b", namespace="b")
    began = time.monotonic()
    store.discard("a")
    assert time.monotonic() - began < redis_follower.LEASE_S
    assert len([name for name in server.names() if name.count(":") == 4]) == 1
    assert held(store, 1) == [] and held(store, "b", namespace="b") == ["b"]


def test_what_is_written_while_it_is_purged_is_removed(
    open_store: Callable[..., RedisStore], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(), open_store()
    asked = RedisStore._now
    purges = iter([other])

    def purged_after(self: RedisStore, *args: Any) -> dict[str, int]:
        now = asked(self, *args)
        if self is store:
            for one in purges:
                one.remove("a")
        return now

    generation = store.generation("a")
    monkeypatch.setattr(RedisStore, "_now", purged_after)
    store.put_many([Put(key("a"), value("a"), generation)])
    assert held(store, "a") == held(other, "a") == []
    assert server.names("llmcache:*:*:*") == []


@pytest.mark.slow
def test_nothing_from_before_a_purge_is_served_after_it(open_store: Callable[..., RedisStore]) -> None:
    stores, has_ended = [open_store() for _ in range(3)], threading.Event()
    n_begun, n_purged = [0], [0]
    keys = [key(i) for i in range(8)]

    def write(store: RedisStore) -> None:
        while not has_ended.is_set():
            generation, n = store.generation("a"), n_begun[0]
            store.put_many([Put(one, b"%d" % n, generation) for one in keys])

    def read(store: RedisStore) -> int:
        n_read = 0
        while not has_ended.is_set():
            least = n_purged[0]
            found = store.get_many(keys, time.monotonic() + 60)
            assert all(int(bytes(one)) >= least for one in found if one is not None)
            n_read += sum(one is not None for one in found)
        return n_read

    with ThreadPoolExecutor(4) as pool:
        try:
            writers = [pool.submit(write, stores[0]), pool.submit(write, stores[1])]
            readers = [pool.submit(read, stores[1]), pool.submit(read, stores[2])]
            for _ in range(5):
                n_begun[0] += 1
                stores[2].remove("a")
                n_purged[0] += 1
        finally:
            has_ended.set()
        for writer in writers:
            writer.result()
        assert all(reader.result() > 0 for reader in readers)


def test_whoever_purged_knows_that_all_have_heard_of_it(open_store: Callable[..., RedisStore]) -> None:
    store, other = open_store(), open_store()
    for namespace in ("a", "b", None):
        seen = other.events(None).cursor
        store.remove(namespace)
        (told,) = other.events(seen).found
        assert (told.kind, told.namespace) == ("cleared", namespace)


def test_many_purged_namespaces_take_no_room(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_MOST_NAMESPACES", 5)
    monkeypatch.setattr(redis, "LEASE_S", 0.0)
    put(store, "kept", namespace="kept")
    for i in range(20):
        put(store, "a", namespace=f"{i}")
        store.remove(f"{i}")
        assert held(store, "a", namespace=f"{i}") == []
    (numbers,) = server.names("*:generations")
    assert server.do("HLEN", numbers) <= 6


# -- events ------------------------------------------------------------------------------------------------------------


def test_a_stream_that_was_cut_is_told(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store, other = open_store(), open_store()
    seen = other.events(None).cursor
    (stream,) = server.names("*:events")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_follower.Follower, "_read", lambda self, *_: time.sleep(0.01))
        time.sleep(0.3)  # the read that is under way ends
        put(store, *range(100))
        server.do("XTRIM", stream, "MAXLEN", 50)
    wait_until(lambda: not other.events(seen).is_complete)
    seen = other.events(None).cursor
    put(store, "new")
    wait_until(lambda: other.events(seen).found)
    told = other.events(seen)
    assert told.is_complete and [event.key for event in told.found] == [key("new")]


def test_only_the_latest_events_are_kept(
    open_store: Callable[..., RedisStore], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_follower, "_MOST_EVENTS", 200)
    store, other = open_store(), open_store()
    seen = other.events(None).cursor
    put(store, *range(150))
    wait_until(lambda: len(other.events(seen).found) == 150)
    put(store, *range(150, 300))
    wait_until(lambda: not other.events(seen).is_complete)
    (stream,) = server.names("*:events")
    assert server.do("XLEN", stream) <= 300


def test_more_events_than_are_read_at_once_come_in_order(
    open_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_follower, "_AT_ONCE", 7)
    store, other = open_store(), open_store()
    seen = other.events(None).cursor
    put(store, *range(50))
    wait_until(lambda: len(other.events(seen).found) == 50)
    told = other.events(seen)
    assert told.is_complete and [event.key for event in told.found] == [key(i) for i in range(50)]


def test_entries_of_others_in_the_stream_are_passed_over(store: RedisStore, server: RedisServer) -> None:
    seen = store.events(None).cursor
    (stream,) = server.names("*:events")
    for fields in (["what", "ever"], ["kind", "stored"], ["kind", "cleared", "generation", "many"], ["kind", b"\xff"]):
        server.do("XADD", stream, "*", *fields)
    put(store, "a")
    wait_until(lambda: store.events(seen).found)
    assert [event.key for event in store.events(seen).found] == [key("a")]


# -- the server is away ------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_begins_empty_and_is_found_again(
    open_store: Callable[..., RedisStore], server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    seen, generation = store.events(None).cursor, store.generation("a")
    server.kill()
    for ask in (lambda: held(store, "a"), lambda: put(store, "b"), lambda: store.remove("a"), store.ping, store.stats):
        with pytest.raises(StoreError):
            ask()
    server.start()
    for one in (store, other):
        wait_until(lambda one=one: answers(one))
    wait_until(lambda: not store.events(seen).is_complete)
    assert store.generation("a") == other.generation("a") != generation
    assert held(store, "a") == []
    put(store, "a")
    assert held(other, "a") == ["a"]
    said = [record.message for record in caplog.records]
    assert sum("is computed until it answers" in one for one in said) == 2
    assert sum("answers again" in one for one in said) == 2


def test_a_server_that_lost_a_purge_serves_nothing_from_before(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--dbfilename", "dump.rdb") as server:
        store = RedisStore(server.url, timeout_ms=PATIENT)
        put(store, "a")
        server.do("SAVE")
        store.remove("a")
        server.kill()
        server.start()
        assert any(name.count(":") == 4 for name in server.names())
        wait_until(lambda: answers(store))
        assert held(store, "a") == []
        store.close()


def test_a_server_that_does_not_answer_costs_an_error(
    open_store: Callable[..., RedisStore], server: RedisServer
) -> None:
    store = open_store(timeout_ms=5.0)
    wait_until(lambda: answers(store))
    put(store, "a")
    with server.paused():
        for _ in range(10):
            for ask in (lambda: held(store, "a"), lambda: store.contains_prefix([key("a")]), store.ping):
                with pytest.raises(StoreError):
                    ask()
        for ask in (lambda: put(store, "b"), lambda: store.remove("a"), store.stats):
            with pytest.raises(StoreError):
                ask()
    wait_until(lambda: answers(store))
    assert held(store, "a") in ([], ["a"])  # what was asked while it was paused may have been done later


def test_events_are_not_told_from_memory_when_the_server_is_away(store: RedisStore, server: RedisServer) -> None:
    seen = store.events(None).cursor
    with server.paused():
        wait_until(lambda: is_silent(store, seen))
    wait_until(lambda: answers(store))
    assert store.events(seen).is_complete  # nothing was lost


def test_what_was_heard_before_the_server_went_away_is_told(
    open_store: Callable[..., RedisStore], server: RedisServer
) -> None:
    store, other = open_store(), open_store()
    seen = store.events(None).cursor
    other.remove("a")  # which returns when all have heard of it
    now = store.events(None).cursor
    server.kill()
    wait_until(lambda: is_silent(store, now))
    events = store.events(seen)
    assert [event.kind for event in events.found] == ["cleared"] and events.cursor == now


def test_connections_that_are_reset_are_made_anew(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    seen = other.events(None).cursor
    for i in range(20):
        server.reset_connections()
        with suppress(StoreError):
            put(store, i)
        with suppress(StoreError):
            assert set(held(store, *range(i + 1))) <= {*range(20)}
    wait_until(lambda: answers(store) and answers(other))
    put(store, "last")
    assert held(store, "a", "last") == ["a", "last"]
    wait_until(lambda: any(event.key == key("last") for event in other.events(seen).found))
    assert other.events(seen).is_complete


def test_it_starts_before_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as server:
        server.kill()
        store = RedisStore(f"redis://user:secret@127.0.0.1:{server.port}", timeout_ms=PATIENT)
        assert "Connection refused" in caplog.text and "is computed until it answers" in caplog.text
        assert "secret" not in caplog.text
        store.close()
        store = RedisStore(server.url, timeout_ms=PATIENT)
        for ask in (lambda: held(store, "a"), lambda: put(store, "a"), lambda: store.events(None), store.ping):
            with pytest.raises(StoreError):
                ask()
        server.start()
        wait_until(lambda: answers(store))
        put(store, "a")
        assert held(store, "a") == ["a"]
        store.close()


def test_numbers_that_were_lost_are_given_anew(open_store: Callable[..., RedisStore], server: RedisServer) -> None:
    store, other = open_store(), open_store()
    put(store, "a")
    before, seen = store.generation("a"), other.events(None).cursor
    server.do("DEL", *server.names("*:generations"))
    assert held(store, "a") == []
    store.put_many([Put(key("b"), value("b"), before)])
    assert store.generation("a") == other.generation("a") != before
    assert held(store, "a", "b") == held(other, "a", "b") == []
    wait_until(lambda: not other.events(seen).is_complete)


# -- what is not ours --------------------------------------------------------------------------------------------------


def test_values_of_others_under_our_names_are_returned_to_be_refused(store: RedisStore, server: RedisServer) -> None:
    put(store, "a", "b")
    first, second = server.names("llmcache:*:*:*")
    server.do("SET", first, b"theirs")
    server.do("DEL", second)
    server.do("RPUSH", second, b"theirs")
    found = store.get_many([key("a"), key("b")], time.monotonic() + 60)
    assert sorted(found, key=str) == [None, b"theirs"] or sorted(found, key=str) == [b"theirs", None]


def test_prefixes_share_nothing(open_store: Callable[..., RedisStore]) -> None:
    store, other = open_store(), open_store(prefix="other")
    put(store, "a")
    assert held(other, "a") == []
    put(other, "a")
    store.remove(None)
    assert (held(store, "a"), held(other, "a")) == ([], ["a"])


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


@pytest.mark.parametrize("user", ["", ":wrong@", "nobody:secret@"])
def test_a_wrong_password_is_refused(tmp_path: Path, user: str) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as server:
        with pytest.raises(ConfigError, match=r"(?i)auth|password") as refused:
            made(url=f"redis://{user}127.0.0.1:{server.port}")
        assert "secret" not in str(refused.value) and "wrong@" not in str(refused.value)


def test_a_password_may_be_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as server:
        monkeypatch.setenv("LLMCACHE_REDIS_PASSWORD", "secret")
        store = RedisStore(server.url, timeout_ms=PATIENT)
        put(store, "a")
        assert held(store, "a") == ["a"]
        store.close()


def test_a_name_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")

    def look_up(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ConfigError, match="not known"):
        made(url="redis://nowhere.invalid")


def test_what_is_no_redis_is_refused() -> None:
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            one, _ = web.accept()
            with one:
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                one.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError, match="HTTP"):
            made(url=f"redis://127.0.0.1:{web.getsockname()[1]}")


def test_a_replica_is_refused(server: RedisServer) -> None:
    server.do("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ConfigError, match="read only"):
        made(url=server.url)


def test_part_of_a_cluster_is_refused(tmp_path: Path) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))  # its own default may be over 65535
    with redis_server(tmp_path, *options) as server, pytest.raises(ConfigError, match="cluster"):
        made(url=server.url)


@pytest.mark.parametrize("name", ["generations", "events"])
def test_something_else_under_our_names_is_refused(server: RedisServer, name: str) -> None:
    run = server.do("INFO", "server")["run_id"]
    server.do("SET", f"llmcache:{run}:{name}", b"theirs")
    with pytest.raises(ConfigError, match="wrong kind of value"):
        made(url=server.url)
    assert server.do("GET", f"llmcache:{run}:{name}") == b"theirs"


def test_without_redis_py_it_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis.connection", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[redis\]'"):
        made(url="redis://127.0.0.1:1")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_opens_it_anew(store: RedisStore) -> None:
    put(store, "a")
    listen, say = os.pipe()
    if (child := os.fork()) == 0:
        try:
            put(store, "b")
            store.events(None)
            os.write(say, repr(held(store, "a", "b")).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(say)
    assert os.read(listen, 100) == b"['a', 'b']"
    assert held(store, "a", "b") == ["a", "b"]
    os.close(listen)
