"""Connections of redis-py: a client for what may take its time, and some for what is answered in time or not at all.

What a request waits for takes a connection that is open already (`Ready`). None is opened meanwhile: looking up a name,
TLS and a password take as long as they take.
"""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from llmcache.errors import StoreError
from llmcache.threads import forkable

#: Name and arguments.
Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]
#: Sends commands together, and returns all answers; what fails is a `StoreError`.
Ask: TypeAlias = Callable[[Sequence[Command]], list[Any]]

PASSWORD = "LLMCACHE_REDIS_PASSWORD"  # environment variable
_CONNECT_S = 1.0
_STALL_S = 0.1  # that an answer which has begun may stop; also in the exchange that begins a connection
_GIVING_UP_S = 4e-4  # a connection whose answer is late has to be closed, too
_DATABASE = "name a database that the server has by its number, as in redis://localhost:6379/0"


class UnusableError(StoreError):
    """The server cannot be used as it was named, and waiting does not help; the text says what does."""


class Server:
    """Where a server is, and how one connects to it. Each connection has the `run` of the server."""

    def __init__(self, url: str) -> None:
        """Take `redis://`, `rediss://` (TLS) or `unix://`; its password may be in `LLMCACHE_REDIS_PASSWORD` instead.

        Raises:
            ValueError: It is no such address, or redis-py is not installed.
        """
        try:
            from redis.backoff import NoBackoff
            from redis.connection import Connection, parse_url
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError("redis-py is not installed: pip install 'llmcache-torch[redis]'") from error
        at: dict[str, Any] = {"host": "localhost", "port": 6379, "db": 0, **parse_url(url)}  # type: ignore[no-untyped-call]
        parts = urlsplit(url)
        if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
            raise ValueError(f"url: {parts.path!r} names no database: {_DATABASE}")
        at.setdefault("password", os.environ.get(PASSWORD) or None)
        where = at.get("path") or f"{at['host']}:{at['port']}"
        self.name = f"Redis at {where}, database {at['db']}"  # without the password
        self._made: list[Any] = []  # connections that were open lately
        self._settings = {
            "connection_class": Connection,
            **at,
            "decode_responses": False,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": _CONNECT_S,
            "redis_connect_func": self._greet,
        }

    def client(self, silence_s: float) -> Any:
        """A `redis.Redis` of one connection, on which the server may be silent for so long; see `ask_all`."""
        from redis import BlockingConnectionPool, Redis

        settings: dict[str, Any] = {**self._settings, "max_connections": 1, "timeout": None}
        return Redis(connection_pool=BlockingConnectionPool(socket_timeout=silence_s, **settings))  # type: ignore[no-untyped-call]

    def open(self, silence_s: float) -> Any:
        """One open connection, on which the server may be silent for so long."""
        settings = {**self._settings, "socket_timeout": max(silence_s, _STALL_S)}
        connection = settings.pop("connection_class")(**settings)
        with self.failing():
            connection.connect()
        return connection

    @contextmanager
    def exchanges(self, client: Any) -> Iterator[tuple[str, Ask]]:
        """Within: the run of the server, another one each time that it starts, and what asks it; see `ask_all`.

        Raises:
            UnusableError: The server cannot be used.
            StoreError: It cannot be reached, or has started again meanwhile.
        """
        run = self._run_of(client)
        yield run, partial(self.ask_all, client)
        if self._run_of(client) != run:
            raise StoreError(f"{self.name}: it has started again")

    def ask_all(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, and return all answers, as redis-py reads them.

        Raises:
            UnusableError: The server refuses one, and always will.
            StoreError: One is an error, or did not come in time.
        """
        with self.failing():
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return [self.checked(answer) for answer in answers]

    def checked(self, answer: Any) -> Any:
        """An answer that is no error; one that is raises `StoreError`."""
        if isinstance(answer, Exception):
            with self.failing():
                raise answer
        return answer

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Within: errors of redis-py are `StoreError`."""
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError, AttributeError, ValueError) as error:  # the last two: closed by another thread
            if cure := _cure(error):
                raise UnusableError(f"{self.name}: {error}: {cure}") from error
            raise StoreError(f"{self.name}: {error}") from error

    def disconnect(self) -> None:
        """Close all connections in a forked process, of which the parent notices nothing."""
        for connection in self._made:
            connection.disconnect()

    def _run_of(self, client: Any) -> str:
        with self.failing():
            connection = client.connection_pool.get_connection()
            client.connection_pool.release(connection)
        return str(connection.run)

    def _greet(self, connection: Any) -> None:
        """Begin a connection."""
        from redis.exceptions import InvalidResponse

        self._made = [*(one for one in self._made if one.is_connected), connection]
        connection.on_connect()
        connection.send_command("INFO", "server")
        about = connection.read_response(disable_decoding=True)
        run, mode = (re.search(rb"^%s:(\w+)" % name, about, re.MULTILINE) for name in (b"run_id", b"redis_mode"))
        if run is None or (mode is not None and mode[1] == b"cluster"):
            raise InvalidResponse("it is no Redis, or part of a cluster")
        connection.run = run[1].decode()


class Ready:
    """Some open connections that requests take turns with. Thread-safe."""

    def __init__(self, server: Server, size: int, silence_s: float) -> None:
        """Begin without any; `fill` opens as many as are missing. The server may be silent for so long."""
        self._server, self._silence_s = server, silence_s
        self._size = self._n_missing = size
        self._free: list[Any] = []
        self._is_closed = False
        self._changed = forkable(threading.Condition())

    def fill(self) -> None:
        """Open those that are missing. Called by one thread at a time.

        Raises:
            StoreError: The server cannot be reached, or used.
        """
        while self._n_missing and not self._is_closed:
            connection = self._server.open(self._silence_s)
            with self._changed:
                self._n_missing -= 1
            self._give_back(connection)

    @contextmanager
    def one(self, deadline: float) -> Iterator[Any]:
        """Within: a connection that is nobody else's.

        Raises:
            StoreError: There is none, or none is free by the deadline, on the clock of `time.monotonic`.
        """
        connection = self._take(deadline)
        try:
            yield connection
        finally:
            self._give_back(connection)

    def close(self) -> None:
        """Close all; those that are taken when they come back."""
        with self._changed:
            self._is_closed = True
            for connection in self._free:
                connection.disconnect()
            self._free.clear()

    def ask(self, connection: Any, commands: Sequence[Command], deadline: float, silence_s: float = 0) -> list[Any]:
        """Send commands together, and return their answers in order; those that came too late are left out.

        An error that the server answers to a command is in its place.

        Args:
            connection: One of these.
            commands: At least one.
            deadline: On the clock of `time.monotonic`.
            silence_s: For which the server may be silent, if that is longer than otherwise.

        Raises:
            StoreError: The connection failed, or nothing came in time.
        """
        from redis.exceptions import ResponseError

        answers: list[Any] = []
        try:
            with self._server.failing():
                connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                for _ in commands:
                    left_s = min(max(silence_s, self._silence_s), deadline - monotonic() - _GIVING_UP_S)
                    # The system waits for whole milliseconds, and rounds up.
                    if not connection.can_read(max(1, int(1e3 * left_s)) / 1e3 if left_s > 0 else 0):
                        break
                    try:
                        answers.append(connection.read_response(disable_decoding=True))
                    except ResponseError as error:
                        answers.append(error)
        finally:
            if len(answers) < len(commands):
                connection.disconnect()  # what comes later would be taken for the answer to another command
        if not answers:
            raise StoreError(f"{self._server.name}: no answer in time")
        return answers

    def ask_all(self, connection: Any, commands: Sequence[Command], deadline: float, silence_s: float) -> list[Any]:
        """Likewise; a `StoreError` too where one is an error, or did not come in time."""
        answers = self.ask(connection, commands, deadline, silence_s)
        if len(answers) < len(commands):
            raise StoreError(f"{self._server.name}: not all answers in time")
        return [self._server.checked(answer) for answer in answers]

    def _give_back(self, connection: Any) -> None:
        with self._changed:
            if connection.is_connected and not self._is_closed:
                self._free.append(connection)
            else:
                connection.disconnect()
                self._n_missing += 1
            self._changed.notify_all()

    def _take(self, deadline: float) -> Any:
        with self._changed:
            while True:
                self._changed.wait_for(
                    lambda: self._free or self._n_missing == self._size, max(0.0, deadline - monotonic())
                )
                if not self._free:
                    is_lost = self._n_missing == self._size
                    raise StoreError(f"{self._server.name}: {'not connected' if is_lost else 'no connection is free'}")
                connection = self._free.pop()
                if _is_quiet(connection):
                    return connection
                connection.disconnect()
                self._n_missing += 1


def _is_quiet(connection: Any) -> bool:
    """Whether a connection can be used: not if the server closed it meanwhile."""
    try:
        return connection.is_connected and not connection.can_read(0)
    except Exception:
        return False


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
        return "name a Redis 7 or Valkey server of its own"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "check the name of its host"
    if said.startswith("WRONGTYPE"):
        return "something else is kept under these names: name another prefix"
    if "DB index" in said or said.startswith("SELECT"):
        return _DATABASE
    return None
