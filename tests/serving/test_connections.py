"""Connections that clients hold open: half a request's head, or no request at all."""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llmcache.serving import connections
from llmcache.serving.running import _log_error
from tests.fixtures import Patch, Pool
from tests.redis_server import wait_until
from tests.serving.served import Dial, figure, listening, make_server, model_held, port_of, received

ASK = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
Connect = Callable[..., socket.socket]

pytestmark = pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")


@pytest.fixture(autouse=True)
def limits(monkeypatch: Patch) -> None:
    """A limit that is quickly reached, and a log without lines of earlier tests."""
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    connections._logged_at.clear()


@pytest.fixture
def patient(monkeypatch: Patch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 60)


@pytest.fixture(scope="module")
def at(models: Path) -> Iterator[tuple[Any, str]]:
    """The Uvicorn runner of a server, and its address."""
    with listening(make_server(models / "classifier", warmup_tokens=0)) as found:
        yield found


@pytest.fixture
def connect(at: tuple[Any, str], dial: Dial) -> Connect:
    """Opens a connection to the server, and sends bytes."""
    return lambda content=b"": dial(port_of(at[1]), content)


def is_answered(connection: socket.socket) -> bool:
    return b" 200 OK" in received(connection)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes the connection, without an answer."""
    try:
        return connection.recv(65_536) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ", b"\r\n", ASK[:-2]])
def test_half_a_head_is_not_waited_for(connect: Connect, sent: bytes) -> None:
    new, used = connect(sent), connect(ASK)
    assert is_answered(used)
    used.sendall(sent)
    assert is_closed(new)
    assert not sent or is_closed(used)  # else it may be kept for its next request


def test_a_head_that_comes_drop_by_drop_has_no_more_time(connect: Connect) -> None:
    connection = connect()

    def drip() -> bool:
        try:
            connection.sendall(b"\r")  # of lines before a request, which are allowed
            connection.sendall(b"\n")
        except ConnectionError:
            return True
        return False

    wait_until(drip)


def test_heads_have_a_size(connect: Connect, patient: None) -> None:
    line = b"X-A: " + b"a" * 1000 + b"\r\n"
    assert is_answered(connect(ASK[:-2] + line * 20 + b"\r\n"))
    connection = connect(ASK[:-2])
    try:
        for _ in range(2000):
            connection.sendall(line)
    except ConnectionError:
        return
    assert is_closed(connection)


def test_at_the_limit_idle_connections_make_way(
    at: tuple[Any, str], connect: Connect, patient: None, monkeypatch: Patch, caplog: Any
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 8)
    known = connect(ASK)
    assert is_answered(known)
    silent = [connect(ASK[:-2]) for _ in range(30)]
    assert is_closed(silent[0])
    wait_until(lambda: len(at[0].server_state.connections) <= 8)  # a new one is held before an idle one is closed
    for connection in (known, connect()):
        connection.sendall(ASK)
        assert is_answered(connection)
    assert caplog.text.count("connections are open") == 1


def test_requests_under_way_are_not_closed_for_new_connections(
    at: tuple[Any, str], connect: Connect, monkeypatch: Patch, pool: Pool
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 1)
    server = at[0].config.app.state.server
    with model_held(server):
        asked = pool.submit(httpx2.post, f"{at[1]}/predict", json={"inputs": "my card"}, timeout=20)
        wait_until(lambda: figure(server, "concurrent_requests") == 1)
        assert is_closed(connect(ASK))
    assert asked.result().status_code == 200


def test_the_limit_leaves_files_to_stores() -> None:
    resource = pytest.importorskip("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connections.max_connections() <= (soft if soft > 0 else 1e9) * 3 // 4


def test_what_strangers_cause_is_logged_once_a_minute(connect: Connect, caplog: Any) -> None:
    for _ in range(3):
        assert b" 400 " in received(connect(b"no request\r\n\r\n"))
    assert caplog.text.count("Invalid HTTP request") == 1
    loop = asyncio.new_event_loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "Too many")}
    for _ in range(3):
        _log_error(loop, context)
    _log_error(loop, {"message": "another error"})
    loop.close()
    assert caplog.text.count("Too many") == caplog.text.count("another error") == 1
