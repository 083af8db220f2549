"""A client of HTTP/1.1 that costs little CPU time: it shares the machine with the server that it measures.

Requests are bytes that were made beforehand. Connections are kept, as many as there were requests under way at once.
"""

import asyncio
import json
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
RUNG = b"x-cache-rung"  # of `llmcache serve --reveal-hits`

Connection = tuple[StreamReader, StreamWriter]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes
    rung: str = ""  # what served it, where the server tells that


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    headers: Mapping[bytes, bytes]  # names in lower case

    @property
    def is_chunked(self) -> bool:
        return self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"

    @property
    def is_kept(self) -> bool:
        """Whether the connection may be used again."""
        return self.headers.get(b"connection", b"").lower() != b"close" and (
            self.is_chunked or b"content-length" in self.headers
        )


def post(path: str, values: Any, key: str | None = None, session: str | None = None) -> bytes:
    """A request that sends JSON; those of one session go to one replica, where there are several."""
    body = json.dumps(values).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [] if session is None else [f"X-Session-Id: {session}"]
    return _lines(lines, key) + body


def get(path: str, key: str | None = None) -> bytes:
    """A request without a body."""
    return _lines([f"GET {path} HTTP/1.1", f"Host: {HOST}"], key)


def _lines(lines: list[str], key: str | None) -> bytes:
    named = [] if key is None else [f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, *named, "", ""]).encode()


class Client:
    """Connections to one server; for one event loop."""

    def __init__(self, port: int, host: str = HOST) -> None:
        self._address = (host, port)
        self._idle: list[Connection] = []

    async def ask(self, request: bytes) -> Reply:
        """Send a request, and read all of the answer.

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
        self._end(connection, head)
        return reply

    def close(self) -> None:
        """Close the connections that are idle."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _begin(self, request: bytes) -> tuple[Connection, _Head]:
        """Send, and read the head of the answer. A kept connection that the server closed meanwhile is replaced."""
        while self._idle:
            with suppress(OSError, IncompleteReadError):
                return await self._exchange(self._idle.pop(), request)
        try:
            return await self._exchange(await asyncio.open_connection(*self._address, limit=2**20), request)
        except IncompleteReadError as error:
            raise ConnectionResetError("closed without an answer") from error

    async def _exchange(self, connection: Connection, request: bytes) -> tuple[Connection, _Head]:
        reader, writer = connection
        try:
            writer.write(request)
            return connection, _parsed(await reader.readuntil(b"\r\n\r\n"))
        except BaseException:
            writer.close()
            raise

    def _end(self, connection: Connection, head: _Head) -> None:
        if head.is_kept:
            self._idle.append(connection)
        else:
            connection[1].close()


def _parsed(text: bytes) -> _Head:
    first, *lines = text[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return _Head(int(first.split(b" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs})


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
