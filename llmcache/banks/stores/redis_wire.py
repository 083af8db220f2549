"""Connections to one Redis server, on which commands are answered in time or not at all.

What a request waits for takes a connection that is open already (`Wires`). None is opened meanwhile: looking up a name,
TLS and a password take as long as they take.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from llmcache.errors import StoreError
from llmcache.threads import forkable

#: Name and arguments.
Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]

PASSWORD = "LLMCACHE_REDIS_PASSWORD"  # environment variable
_CONNECT_S = 1.0
_NAP_S = 1e-4
_GIVING_UP_S = 4e-4  # a connection whose answer is late has to be closed, too
_STALL_S = 0.1  # that an answer which has begun may stop; also in the exchange that begins a connection
_RUN = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_MODE = re.compile(rb"^redis_mode:(\w+)", re.MULTILINE)


_DATABASE = "name a database that the server has by its number, as in redis://localhost:6379/0"


class UnusableError(StoreError):
    """The server cannot be used as it was named, and waiting does not help; the text says what does."""


class Server:
    """Where a server is, and how one connects to it."""

    def __init__(self, url: str) -> None:
        """Take `redis://`, `rediss://` (TLS) or `unix://`; its password may be in `LLMCACHE_REDIS_PASSWORD` instead.

        Raises:
            ValueError: It is no such address, or redis-py is not installed.
        """
        try:
            from redis.connection import Connection, parse_url
        except ImportError as error:
            raise ValueError("redis-py is not installed: pip install 'llmcache-torch[redis]'") from error
        self._settings: dict[str, Any] = {"host": "localhost", "port": 6379, "db": 0, **parse_url(url)}  # type: ignore[no-untyped-call]
        parts = urlsplit(url)
        if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
            raise ValueError(f"url: {parts.path!r} names no database: {_DATABASE}")
        self._settings.setdefault("password", os.environ.get(PASSWORD) or None)
        self._make: Callable[..., Any] = self._settings.pop("connection_class", Connection)
        at = self._settings.get("path") or f"{self._settings['host']}:{self._settings['port']}"
        self.name = f"Redis at {at}, database {self._settings['db']}"  # without the password

    def open(self, silence_s: float) -> "Wire":
        """Connect; later on, the server may be silent for `silence_s` at most.

        Raises:
            UnusableError: Nobody has its name; or it refuses the password, is no Redis server, or part of a cluster.
            StoreError: It does not answer.
        """
        times = {"socket_connect_timeout": _CONNECT_S, "socket_timeout": max(silence_s, _STALL_S), "protocol": 2}
        connection = self._make(**{**self._settings, **times})
        with self.failing():
            connection.connect()
        wire = Wire(self, connection, silence_s)
        with wire.patient(max(silence_s, _STALL_S)):
            (about,) = wire.ask_all([("INFO", "server")], monotonic() + max(silence_s, _STALL_S))
        run, mode = _RUN.search(about), _MODE.search(about)
        if run is None or (mode is not None and mode[1] == b"cluster"):
            wire.close()
            what = "no Redis" if run is None else "part of a cluster"
            raise UnusableError(f"{self.name}: {what}: name a Redis or Valkey server of its own")
        wire.run = run[1].decode()
        return wire

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within: errors of redis-py are `StoreError`."""
        from redis.exceptions import RedisError

        try:
            yield
        except RedisError as error:
            if cure := _cure(error):
                raise UnusableError(f"{self.name}: {error}: {cure}") from error
            raise StoreError(f"{self.name}: {error}") from error


class Wire:
    """One open connection. For one thread at a time.

    Attributes:
        run: Of the server: it has another one each time that it starts.
        is_open: False once something failed, or an answer was late.
    """

    def __init__(self, server: Server, connection: Any, silence_s: float) -> None:
        """Take a connection that is open."""
        self.run = ""
        self.is_open = True
        self._server = server
        self._connection = connection
        self._silence_s = silence_s

    def ask(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Send commands together, and return their answers in order; those that came too late are left out.

        An error that the server answers to a command is in its place.

        Args:
            commands: At least one.
            deadline: On the clock of `time.monotonic`.

        Raises:
            StoreError: The connection failed, or nothing came in time.
        """
        answers: list[Any] = []
        try:
            with self._server.failing():
                self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
                while len(answers) < len(commands) and self._has_answer(deadline):
                    answers.append(self._answer())
        finally:
            if len(answers) < len(commands):
                self.close()  # what comes later would be taken for the answer to another command
        if not answers:
            raise StoreError(f"{self._server.name}: no answer in time")
        return answers

    def ask_all(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """Send commands together, and return all answers.

        Raises:
            UnusableError: The server refuses one, and always will.
            StoreError: One is an error, or did not come in time.
        """
        answers = self.ask(commands, deadline)
        if len(answers) < len(commands):
            raise StoreError(f"{self._server.name}: not all answers in time")
        for answer in answers:
            self.check(answer)
        return answers

    @contextmanager
    def patient(self, silence_s: float) -> Iterator[None]:
        """Within: the server may be silent for so long."""
        before, self._silence_s = self._silence_s, silence_s
        try:
            yield
        finally:
            self._silence_s = before

    def check(self, answer: Any) -> Any:
        """An answer that is no error; one that is raises `StoreError`."""
        if isinstance(answer, Exception):
            with self._server.failing():
                raise answer
        return answer

    @property
    def is_quiet(self) -> bool:
        """Whether it can be used: not if the server closed it meanwhile."""
        try:
            return self.is_open and not self._connection.can_read(0)
        except Exception:
            return False

    def close(self) -> None:
        """Close the connection; again does nothing."""
        self.is_open = False
        self._connection.disconnect()

    def _has_answer(self, deadline: float) -> bool:
        """Whether one comes in time. The system waits for whole milliseconds; what is left of one is slept through."""
        until = min(deadline - _GIVING_UP_S, monotonic() + self._silence_s)
        has_come = self._connection.can_read(max(0, int((until - monotonic()) * 1e3)) / 1e3)
        while not has_come and (left_s := until - monotonic()) > 0:
            sleep(min(left_s, _NAP_S))
            has_come = self._connection.can_read(0)
        return bool(has_come)

    def _answer(self) -> Any:
        from redis.exceptions import ResponseError

        try:
            return self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error


class Wires:
    """Some open connections that threads take turns with. Thread-safe."""

    def __init__(self, open_one: Callable[[], Wire], size: int) -> None:
        """Begin without any; `fill` opens as many as are missing."""
        self._open_one = open_one
        self._size = size
        self._free: list[Wire] = []
        self._open: set[Wire] = set()  # those that are taken included
        self._is_closed = False
        self._changed = forkable(threading.Condition())

    @contextmanager
    def one(self, deadline: float) -> Iterator[Wire]:
        """Within: a connection that is nobody else's.

        Raises:
            StoreError: There is none, or none is free by the deadline, on the clock of `time.monotonic`.
        """
        wire = self._take(deadline)
        try:
            yield wire
        finally:
            self._give_back(wire)

    def fill(self) -> None:
        """Open those that are missing. Called by one thread at a time.

        Raises:
            StoreError: See `Server.open`.
        """
        while len(self._open) < self._size and not self._is_closed:
            wire = self._open_one()
            with self._changed:
                self._open.add(wire)
            self._give_back(wire)

    def close(self, is_parents: bool = False) -> None:
        """Close all; those that are taken when they come back, unless those who took them are threads of a parent."""
        self._is_closed = True
        with self._changed:
            for wire in [*self._open] if is_parents else self._free:
                self._close(wire)
            self._free.clear()

    def _take(self, deadline: float) -> Wire:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._free or not self._open, max(0.0, deadline - monotonic()))
                if not self._free:
                    raise StoreError("Redis: no connection is free" if self._open else "Redis: not connected")
                wire = self._free.pop()
                if wire.is_quiet:
                    return wire
                self._close(wire)

    def _give_back(self, wire: Wire) -> None:
        with self._changed:
            if wire.is_open and not self._is_closed:
                self._free.append(wire)
            else:
                self._close(wire)
            self._changed.notify_all()

    def _close(self, wire: Wire) -> None:
        wire.close()
        self._open.discard(wire)


class PatientWire:
    """A connection that is opened when it is needed, for what may take its time. Thread-safe."""

    def __init__(self, open_one: Callable[[], Wire]) -> None:
        """Open nothing yet."""
        self._open_one = open_one
        self._wire: Wire | None = None
        self._is_closed = False
        self._lock = forkable(threading.Lock(), is_waited_for=False)

    @contextmanager
    def taken(self) -> Iterator[Wire]:
        """Within: the connection.

        Raises:
            StoreError: See `Server.open`; or it is closed for good.
        """
        with self._lock:
            if self._is_closed:
                raise StoreError("Redis: the store is closed")
            if self._wire is None or not self._wire.is_quiet:
                self._wire = self._open_one()
            yield self._wire

    def close(self) -> None:
        """Close it for good."""
        with self._lock:
            self._is_closed = True
            if self._wire is not None:
                self._wire.close()


def _cure(error: Exception) -> str | None:
    """What to do about an error of redis-py that would come again; None of others."""
    from redis.exceptions import (
        AuthenticationError,
        AuthenticationWrongNumberOfArgsError,
        AuthorizationError,
        InvalidResponse,
        NoPermissionError,
        ReadOnlyError,
    )

    said, cause = str(error), error.__context__
    if isinstance(error, AuthenticationError | AuthenticationWrongNumberOfArgsError):
        return f"give the password that the server asks for in {PASSWORD}, or in the url, and a user in the url"
    if isinstance(error, AuthorizationError | NoPermissionError):
        return "let its user run all commands on names with this prefix, or name another user in the url"
    if isinstance(error, ReadOnlyError):
        return "name the server that this one is a replica of"
    if isinstance(error, InvalidResponse) or said.startswith("unknown command"):
        return "name a Redis 7 or Valkey server"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "check the name of its host"
    if said.startswith("WRONGTYPE"):
        return "something else is kept under these names: name another prefix"
    if "DB index" in said or said.startswith("SELECT"):
        return _DATABASE
    return None
