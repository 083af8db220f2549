"""An HTTP/1.1 client that uses little CPU time, since it shares the machine with the server under test.

The bytes of requests are made beforehand. Connections are kept alive, as many as there were concurrent requests.
"""

import asyncio
import json
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
RUNG = b"x-cache-rung"  # header of `llmcache serve --reveal-hits`
OK = 200
#: In place of a status: not sent or abandoned when a loop was cut; no answer in time; no connection.
CUT, TIMED_OUT, NO_CONNECTION = 0, 1, 2

Connection = tuple[StreamReader, StreamWriter]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int  # HTTP status, or `TIMED_OUT` or `NO_CONNECTION`
    body: bytes
    rung: str = ""  # rung that served the request, if the server reports it


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    headers: Mapping[bytes, bytes]  # names in lower case

    @property
    def is_chunked(self) -> bool:
        return self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"

    @property
    def is_kept(self) -> bool:
        """Whether the connection may be reused."""
        return self.headers.get(b"connection", b"").lower() != b"close" and (
            self.is_chunked or b"content-length" in self.headers
        )


def post(path: str, values: Any, session: str | None = None, key: str | None = None) -> bytes:
    """Return the bytes of a JSON request; with replicas, `session`, or else `key`, selects the replica."""
    body = json.dumps(values).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [] if session is None else [f"X-Session-Id: {session}"]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Client:
    """Connections to one server, for one event loop."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def attempt(self, request: bytes, timeout_s: float) -> Reply:
        """Send a request as `ask` does; a timeout or a failed connection gives a reply with that status."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.ask(request)
        except TimeoutError:
            return Reply(TIMED_OUT, b"")
        except OSError:
            return Reply(NO_CONNECTION, b"")

    async def ask(self, request: bytes) -> Reply:
        """Send a request and read the whole reply.

        Raises:
            OSError: There is no connection, or it broke.
        """
        connection, head = await self._begin(request)
        try:
            reply = Reply(head.status, await _body(connection[0], head), head.headers.get(RUNG, b"").decode())
        except BaseException as error:
            connection[1].close()
            if isinstance(error, IncompleteReadError):
                raise ConnectionResetError("the answer broke off") from error
            raise
        if head.is_kept:
            self._idle.append(connection)
        else:
            connection[1].close()
        return reply

    async def events(self, request: bytes) -> AsyncIterator[Any]:
        """Send a request and yield the JSON values of its server-sent events as they arrive, up to `[DONE]`.

        Raises:
            OSError: There is no connection, it broke, or the status is not 200.
        """
        (reader, writer), head = await self._begin(request)
        try:
            if head.status != OK or not head.is_chunked:
                raise ConnectionError(f"status {head.status}: {(await _body(reader, head))[:300]!r}")
            rest = b""
            async for chunk in _chunks(reader):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:")
                    if data != line.strip() and data.strip() != b"[DONE]":
                        yield json.loads(data)
        except IncompleteReadError as error:
            raise ConnectionResetError("the answer broke off") from error
        finally:
            writer.close()

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _begin(self, request: bytes) -> tuple[Connection, _Head]:
        """Send a request and read the reply's head. A kept connection that the server has closed is replaced."""
        while self._idle:
            with suppress(OSError, IncompleteReadError):
                return await _exchange(self._idle.pop(), request)
        try:
            return await _exchange(await asyncio.open_connection(HOST, self._port, limit=2**20), request)
        except IncompleteReadError as error:
            raise ConnectionResetError("closed without an answer") from error


async def _exchange(connection: Connection, request: bytes) -> tuple[Connection, _Head]:
    reader, writer = connection
    try:
        writer.write(request)
        first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    except BaseException:
        writer.close()
        raise
    pairs = (line.partition(b":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return connection, _Head(int(first.split(b" ", 2)[1]), headers)


async def _body(reader: StreamReader, head: _Head) -> bytes:
    if head.is_chunked:
        return b"".join([chunk async for chunk in _chunks(reader)])
    if (length := head.headers.get(b"content-length")) is not None:
        return await reader.readexactly(int(length))
    return await reader.read()


async def _chunks(reader: StreamReader) -> AsyncIterator[bytes]:
    while n := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(n + 2))[:-2]
    await reader.readuntil(b"\r\n")
