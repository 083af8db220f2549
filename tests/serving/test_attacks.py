"""Raw bytes that no client should send: each gets an answer that is no 5xx, or the connection is closed."""

import contextlib
import gzip
import random
import re
import socket
from pathlib import Path

import pytest

from tests.serving.served import ask, unharmed

_SILENCE_S = 0.15  # after which the client ends its side of the connection
_CLOSING_S = 20.0

BODY = b'{"inputs": "lost my card"}'
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n"  # saves the wait for more answers
SMUGGLED = b"GET /admin/stats HTTP/1.1\r\nHost: localhost\r\n\r\n"


def sized(length: bytes, body: bytes = BODY, more: bytes = b"") -> bytes:
    return HEAD + more + b"Content-Length: " + length + b"\r\n\r\n" + body


def chunked(chunks: bytes, header: bytes = b"Transfer-Encoding: chunked\r\n", more: bytes = b"") -> bytes:
    return HEAD + more + header + b"\r\n" + chunks


def json_of(body: bytes, more: bytes = CLOSE) -> bytes:
    return sized(str(len(body)).encode(), body, more)


def target(path: bytes, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> bytes:
    return method + b" " + path + b" " + version + b"\r\nHost: localhost\r\n" + CLOSE + b"\r\n"


def header(line: bytes, more: bytes = CLOSE) -> bytes:
    return GET + more + line + b"\r\n\r\n"


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\n"
CHUNK = b"1a\r\n" + BODY + b"\r\n"
RAW: tuple[tuple[str, bytes], ...] = (
    # lengths
    ("two lengths", sized(b"26", more=b"Content-Length: 5\r\n")),
    ("the same length twice", sized(b"26", more=b"Content-Length: 26\r\n")),
    ("a list of lengths", sized(b"26, 26")),
    ("a negative length", sized(b"-1")),
    ("a signed length", sized(b"+26")),
    ("a hexadecimal length", sized(b"0x1a")),
    ("a length with underscores", sized(b"2_6")),
    ("an empty length", sized(b"")),
    ("a length in other digits", sized("٢٦".encode())),
    ("a huge length", sized(b"9" * 40)),
    ("a length of zero before a body", sized(b"0")),
    ("a length that is too short", sized(b"5")),
    ("a length that is too long", sized(b"100")),
    # smuggling
    ("a length and chunks", chunked(b"0\r\n\r\n" + SMUGGLED, more=b"Content-Length: 5\r\n")),
    (
        "chunks and a length",
        chunked(CHUNK + b"0\r\n\r\n" + SMUGGLED, b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"),
    ),
    ("an unknown coding", chunked(CHUNK + b"0\r\n\r\n", b"Transfer-Encoding: xchunked\r\n")),
    ("chunked is not last", chunked(CHUNK + b"0\r\n\r\n", b"Transfer-Encoding: chunked, identity\r\n")),
    ("chunked twice", chunked(CHUNK + b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n" * 2)),
    ("a space before the colon", chunked(CHUNK + b"0\r\n\r\n", b"Transfer-Encoding : chunked\r\n")),
    ("a vertical tab", chunked(CHUNK + b"0\r\n\r\n", b"Transfer-Encoding:\x0bchunked\r\n")),
    ("chunks in HTTP/1.0", chunked(CHUNK + b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")),
    # chunks
    ("a chunk size that is no number", chunked(b"zz\r\n" + BODY)),
    ("a negative chunk size", chunked(b"-1\r\n" + BODY)),
    ("a huge chunk size", chunked(b"F" * 40 + b"\r\n" + BODY)),
    ("a chunk size with 0x", chunked(b"0x1a\r\n" + BODY + b"\r\n0\r\n\r\n")),
    ("a chunk without its end", chunked(b"1a\r\n" + BODY + b"0\r\n\r\n")),
    ("a long chunk extension", chunked(b"1a;" + b"a" * 200_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    ("many trailers", chunked(CHUNK + b"0\r\n" + b"Content-Length: 1\r\n" * 5_000 + b"\r\n")),
    ("chunks without an end", chunked(CHUNK)),
    ("ten thousand chunks", chunked(b"1\r\n \r\n" * 10_000 + CHUNK + b"0\r\n\r\n")),
    # lines and headers
    ("bare line feeds", json_of(BODY).replace(b"\r\n", b"\n")),
    ("bare carriage returns", json_of(BODY).replace(b"\r\n", b"\r")),
    ("only line ends", b"\r\n" * 1_000),
    ("NUL in a header", header(b"X-A: a\x00b")),
    ("NUL in a header's name", header(b"X\x00A: a")),
    ("a space in a header's name", header(b"X A: a")),
    ("a header without a colon", header(b"nothing")),
    ("a header without a name", header(b": a")),
    ("a folded header", header(b"X-Request-Id: a\r\n b: c")),
    ("a header of a megabyte", header(b"X-A: " + b"a" * 1_000_000)),
    ("a header's name of a megabyte", header(b"a" * 1_000_000 + b": a")),
    ("ten thousand headers", header(b"\r\n".join(b"X-%d: a" % i for i in range(10_000)))),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n"),
    ("two hosts", header(b"Host: b")),
    ("a host that is no host", b"GET /info HTTP/1.1\r\nHost: [::1/@%zz\r\nOrigin: http://[\r\n\r\n"),
    ("bytes in the host", b"GET /info HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n"),
    ("a key that is no base64", header(b"Authorization: Basic ====")),
    (
        "a key of a megabyte",
        b"GET /info HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"a" * 1_000_000 + b"\r\n\r\n",
    ),
    ("wrong forwarding", header(b"X-Forwarded-For: ,,\x01\r\nX-Forwarded-Proto: javascript")),
    # targets and methods
    ("an absolute target", target(b"http://evil.example/admin/stats")),
    ("another scheme's target", target(b"file:///etc/passwd")),
    ("no path", target(b"a")),
    ("a query alone", target(b"?a")),
    ("all of it", target(b"*", b"OPTIONS")),
    ("a tunnel", target(b"evil.example:443", b"CONNECT")),
    ("NUL in the path", target(b"/health\x00/x")),
    ("bytes in the path", target(b"/\xff\xfe/\xc3\x28")),
    ("percent signs that encode nothing", target(b"/%zz/%/%e2%82?%ff%fe=%c0%af")),
    ("encoded bytes that are no UTF-8", target(b"/v1/models/%ff%fe%c0%af%00%0d%0a")),
    ("a path upwards", target(b"/../../../etc/passwd")),
    ("an encoded path upwards", target(b"/v1/models/..%2f..%2f%2e%2e/etc/passwd")),
    ("a query of a megabyte", target(b"/health?" + b"a=b&" * 250_000)),
    ("a path of a megabyte", target(b"/" * 1_000_000)),
    ("an unknown method", target(b"/predict", b"BREW")),
    ("a method in small letters", target(b"/health", b"get")),
    ("a method of a megabyte", target(b"/health", b"A" * 1_000_000)),
    ("a trace", target(b"/health", b"TRACE")),
    # versions and protocols
    ("HTTP/0.9", b"GET /health\r\n"),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
    ("HTTP/9.9", target(b"/health", version=b"HTTP/9.9")),
    ("HTTP/1.10", target(b"/health", version=b"HTTP/1.10")),
    ("no HTTP", target(b"/health", version=b"ICY/1.1")),
    ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2),
    ("noise", random.Random(0).randbytes(4_096)),
    ("nothing", b""),
    ("one letter", b"G"),
    ("half of the headers", GET),
    ("a websocket", header(b"Upgrade: websocket\r\nSec-WebSocket-Key: AA==\r\nSec-WebSocket-Version: 13", UPGRADE)),
    ("half a websocket", header(b"Upgrade: websocket", UPGRADE)),
    ("HTTP/2 by upgrade", header(b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk", UPGRADE)),
    ("a promise of a body", sized(b"26", b"", b"Expect: 100-continue\r\n")),
    ("an unknown expectation", json_of(BODY, CLOSE + b"Expect: the-unexpected\r\n")),
    # several requests
    ("a hundred requests at once", (GET + b"\r\n") * 100),
    ("noise after a request", json_of(BODY, b"") + random.Random(1).randbytes(1_024)),
    ("half a request after a request", json_of(BODY, b"") + HEAD),
    # bodies
    ("a bomb", json_of(gzip.compress(bytes(20_000_000)), CLOSE + b"Content-Encoding: gzip\r\n")),
    ("a thousand encodings", json_of(BODY, CLOSE + b"Content-Encoding: " + b"gzip, " * 1_000 + b"gzip\r\n")),
    ("an integer of 100,000 digits", json_of(b'{"inputs": ' + b"9" * 100_000 + b"}")),
    ("a number without end", json_of(b'{"inputs": 1e999999999}')),
    ("the same key twice", json_of(b'{"inputs": "a", "inputs": [[]]}')),
    ("a surrogate", json_of(b'{"inputs": "\\udfff\\ud800"}')),
    ("UTF-16", json_of(BODY.decode().encode("utf-16"))),
    ("UTF-32 without an end", json_of(BODY.decode().encode("utf-32")[:-1])),
    ("a hundred thousand brackets", json_of(b"[" * 100_000)),
    ("a form", json_of(b"--b\r\n\r\n", CLOSE + b"Content-Type: multipart/form-data; boundary=b\r\n")),
)


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
def test_raw_attacks(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(RAW) >= 50
    with unharmed(models / "classifier", "/predict", {"inputs": "lost my card"}, caplog) as place:
        for name, content in RAW:
            found = answers(place, content)
            assert all(status < 500 for status in found), (name, found)
            assert ask(place, "GET", "/health")[0] == 200, name
