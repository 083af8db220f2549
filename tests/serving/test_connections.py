"""Connections that clients hold open: half a request's head, or no request at all."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llmcache.serving import connections
from llmcache.serving.running import _log_error
from llmcache.serving.server import Server
from tests.redis_server import wait_until
from tests.serving.served import figure, listening, make_server, model_held

ASK = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

pytestmark = pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are quickly reached."""
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    connections._logged_at.clear()


@pytest.fixture(scope="module")
def server(models: Path) -> Server:
    return make_server(models / "classifier", warmup_tokens=0)


@pytest.fixture(scope="module")
def at(server: Server) -> Iterator[tuple[Any, int]]:
    """The Uvicorn runner, and its port."""
    with listening(server) as (uvicorn, url):
        yield uvicorn, int(url.rpartition(":")[2])


@pytest.fixture
def dial(at: tuple[Any, int]) -> Iterator[Callable[..., socket.socket]]:
    """Opens a connection, and sends bytes."""
    with ExitStack() as open_:

        def made(content: bytes = b"") -> socket.socket:
            connection = open_.enter_context(socket.create_connection(("127.0.0.1", at[1]), timeout=20))
            connection.sendall(content)
            return connection

        yield made


def is_answered(connection: socket.socket) -> bool:
    """Whether the server answers `ASK`."""
    found = b""
    while b"}" not in found and (part := connection.recv(65_536)):
        found += part
    return b" 200 OK" in found


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection, without an answer."""
    try:
        return connection.recv(65_536) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ", b"\r\n", ASK[:-2]],
    ids=range(6),
)
def test_half_a_head_is_not_waited_for(dial: Callable[..., socket.socket], sent: bytes) -> None:
    new, used = dial(sent), dial(ASK)
    assert is_answered(used)
    used.sendall(sent)
    assert is_closed(new)
    assert not sent or is_closed(used)  # else it may be kept for its next request


def test_a_head_that_comes_drop_by_drop_has_no_more_time(dial: Callable[..., socket.socket]) -> None:
    connection = dial()

    def drip() -> bool:
        try:
            connection.sendall(b"\r")  # of lines before a request, which are allowed
            connection.sendall(b"\n")
        except ConnectionError:
            return True
        return False

    wait_until(drip)


def test_heads_have_a_size(dial: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 60)
    line = b"X-A: " + b"a" * 1000 + b"\r\n"
    assert is_answered(dial(ASK[:-2] + line * 20 + b"\r\n"))
    connection = dial(ASK[:-2])
    try:
        for _ in range(2000):
            connection.sendall(line)
    except ConnectionError:
        return
    assert is_closed(connection)


def test_at_the_limit_idle_connections_make_way(
    at: tuple[Any, int], dial: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 8)
    monkeypatch.setattr(connections, "HEAD_S", 60)
    known = dial(ASK)
    assert is_answered(known)
    silent = [dial(ASK[:-2]) for _ in range(30)]
    assert is_closed(silent[0])
    assert len(at[0].server_state.connections) <= 8
    for connection in (known, dial()):
        connection.sendall(ASK)
        assert is_answered(connection)
    assert caplog.text.count("connections are open") == 1


def test_requests_under_way_are_not_closed_for_new_connections(
    server: Server,
    at: tuple[Any, int],
    dial: Callable[..., socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    pool: ThreadPoolExecutor,
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 1)
    with model_held(server):
        asked = pool.submit(httpx2.post, f"http://127.0.0.1:{at[1]}/predict", json={"inputs": "my card"}, timeout=20)
        wait_until(lambda: figure(server, "concurrent_requests") == 1)
        assert is_closed(dial(ASK))
    assert asked.result().status_code == 200


def test_the_limit_leaves_files_to_stores() -> None:
    resource = pytest.importorskip("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connections.max_connections() <= (soft if soft > 0 else 1e9) * 3 // 4


def test_what_strangers_cause_is_logged_once_a_minute(dial: Callable[..., socket.socket], caplog: Any) -> None:
    for _ in range(3):
        assert b" 400 " in dial(b"no request\r\n\r\n").recv(65_536)
    assert caplog.text.count("Invalid HTTP request") == 1
    loop = asyncio.new_event_loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "Too many")}
    for _ in range(3):
        _log_error(loop, context)
    _log_error(loop, {"message": "another error"})
    loop.close()
    assert caplog.text.count("Too many") == caplog.text.count("another error") == 1
