"""Raw bytes that no client should send: each gets an answer that is no 5xx, or the connection is closed."""

import contextlib
import gzip
import random
import re
import socket
from pathlib import Path

import pytest

from tests.fixtures import Log
from tests.serving.served import ask, unharmed

_SILENCE_S = 0.15  # after which the client ends its side of the connection
_CLOSING_S = 20.0

BODY = b'{"inputs": "lost my card"}'
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n"  # saves the wait for more answers
CHUNK = b"1a\r\n" + BODY + b"\r\n"
END = b"0\r\n\r\n"
SMUGGLED = b"GET /admin/stats HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: "


def sized(length: bytes, body: bytes = BODY, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: " + length + b"\r\n\r\n" + body


def chunked(chunks: bytes, header: bytes = b"Transfer-Encoding: chunked\r\n") -> bytes:
    return HEAD + header + b"\r\n" + chunks


def coded(header: bytes) -> bytes:
    return chunked(CHUNK + END, header + b"\r\n")


def json_of(body: bytes, more: bytes = CLOSE) -> bytes:
    return sized(str(len(body)).encode(), body, more)


def target(path: bytes, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> bytes:
    return method + b" " + path + b" " + version + b"\r\nHost: localhost\r\n" + CLOSE + b"\r\n"


def headed(line: bytes, more: bytes = CLOSE) -> bytes:
    return GET + more + line + b"\r\n\r\n"


LENGTHS = (
    *map(sized, (b"26, 26", b"-1", b"+26", b"0x1a", b"2_6", b"", "٢٦".encode(), b"9" * 40, b"0", b"5", b"100")),
    *(sized(b"26", more=b"Content-Length: %d\r\n" % more) for more in (5, 26)),
)
SMUGGLING = (
    chunked(END + SMUGGLED, b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
    chunked(CHUNK + END + SMUGGLED, b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"),
    coded(b"Transfer-Encoding: xchunked"),
    coded(b"Transfer-Encoding: chunked, identity"),
    coded(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
    coded(b"Transfer-Encoding : chunked"),
    coded(b"Transfer-Encoding:\x0bchunked"),
    coded(b"Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0"),
)
CHUNKS = (
    *(chunked(size + b"\r\n" + BODY) for size in (b"zz", b"-1", b"F" * 40)),
    chunked(b"0x1a\r\n" + BODY + b"\r\n" + END),
    chunked(b"1a\r\n" + BODY + END),  # a chunk without its end
    chunked(b"1a;" + b"a" * 200_000 + b"\r\n" + BODY + b"\r\n" + END),
    chunked(CHUNK + b"0\r\n" + b"Content-Length: 1\r\n" * 5_000 + b"\r\n"),  # trailers
    chunked(CHUNK),
    chunked(b"1\r\n \r\n" * 10_000 + CHUNK + END),
)
HEADERS = (
    json_of(BODY).replace(b"\r\n", b"\n"),
    json_of(BODY).replace(b"\r\n", b"\r"),
    b"\r\n" * 1_000,
    *map(headed, (b"X-A: a\x00b", b"X\x00A: a", b"X A: a", b"nothing", b": a", b"X-Request-Id: a\r\n b: c")),
    *map(headed, (b"X-A: " + b"a" * 1_000_000, b"a" * 1_000_000 + b": a", b"Authorization: Basic ====", b"Host: b")),
    headed(b"\r\n".join(b"X-%d: a" % i for i in range(10_000))),
    headed(b"X-Forwarded-For: ,,\x01\r\nX-Forwarded-Proto: javascript"),
    headed(b"Authorization: Bearer " + b"a" * 1_000_000).replace(b"/health", b"/info"),
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /info HTTP/1.1\r\nHost: [::1/@%zz\r\nOrigin: http://[\r\n\r\n",
    b"GET /info HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
)
TARGETS = (
    *map(target, (b"http://evil.example/admin/stats", b"file:///etc/passwd", b"a", b"?a", b"/health\x00/x")),
    *map(target, (b"/\xff\xfe/\xc3\x28", b"/%zz/%/%e2%82?%ff%fe=%c0%af", b"/v1/models/%ff%fe%c0%af%00%0d%0a")),
    *map(target, (b"/../../../etc/passwd", b"/v1/models/..%2f..%2f%2e%2e/etc/passwd")),
    *map(target, (b"/health?" + b"a=b&" * 250_000, b"/" * 1_000_000)),
    target(b"*", b"OPTIONS"),
    target(b"evil.example:443", b"CONNECT"),
    target(b"/predict", b"BREW"),
    *(target(b"/health", method) for method in (b"get", b"TRACE", b"A" * 1_000_000)),
)
PROTOCOLS = (
    b"GET /health\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    *(target(b"/health", version=one) for one in (b"HTTP/9.9", b"HTTP/1.10", b"ICY/1.1")),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,  # a TLS hello
    random.Random(0).randbytes(4_096),
    *(b"", b"G", GET),
    headed(b"websocket\r\nSec-WebSocket-Key: AA==\r\nSec-WebSocket-Version: 13", UPGRADE),
    headed(b"websocket", UPGRADE),
    headed(b"h2c\r\nHTTP2-Settings: AAMAAABk", UPGRADE),
    sized(b"26", b"", b"Expect: 100-continue\r\n"),
    json_of(BODY, CLOSE + b"Expect: the-unexpected\r\n"),
    (GET + b"\r\n") * 100,
    json_of(BODY, b"") + random.Random(1).randbytes(1_024),
    json_of(BODY, b"") + HEAD,
)
BODIES = (
    json_of(gzip.compress(bytes(20_000_000)), CLOSE + b"Content-Encoding: gzip\r\n"),
    json_of(BODY, CLOSE + b"Content-Encoding: " + b"gzip, " * 1_000 + b"gzip\r\n"),
    json_of(b'{"inputs": ' + b"9" * 100_000 + b"}"),
    json_of(b'{"inputs": 1e999999999}'),
    json_of(b'{"inputs": "a", "inputs": [[]]}'),
    json_of(b'{"inputs": "\\udfff\\ud800"}'),
    json_of(BODY.decode().encode("utf-16")),
    json_of(BODY.decode().encode("utf-32")[:-1]),
    json_of(b"[" * 100_000),
    json_of(b"--b\r\n\r\n", CLOSE + b"Content-Type: multipart/form-data; boundary=b\r\n"),
)
RAW = (*LENGTHS, *SMUGGLING, *CHUNKS, *HEADERS, *TARGETS, *PROTOCOLS, *BODIES)


def answers(place: tuple[str, int], content: bytes) -> list[int]:
    """Send bytes; return the statuses of what comes back until the server closes the connection.

    If nothing comes for a while, the client ends its side, and the server has to close its own.
    """
    found, has_ended = b"", False
    with socket.create_connection(place, timeout=_SILENCE_S) as connection, contextlib.suppress(ConnectionError):
        with contextlib.suppress(TimeoutError):
            connection.sendall(content)
        while True:
            try:
                if not (part := connection.recv(1 << 20)):
                    break
                found += part
            except TimeoutError:
                assert not has_ended, "the connection stays open"
                connection.settimeout(_CLOSING_S)
                connection.shutdown(socket.SHUT_WR)
                has_ended = True
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", found)]


@pytest.mark.slow
@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
def test_raw_attacks(models: Path, caplog: Log) -> None:
    with unharmed(models / "classifier", "/predict", {"inputs": "lost my card"}, caplog) as place:
        for content in RAW:
            found = answers(place, content)
            assert all(status < 500 for status in found), (content[:200], found)
            assert ask(place, "GET", "/health")[0] == 200, content[:200]
