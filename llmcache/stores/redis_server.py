"""A Redis server: clients of redis-py, names in the database, and the run that the server is in.

    PREFIX:FORMAT:RUN:numbers                     hash: a number for all namespaces, and one for each that was purged
    PREFIX:FORMAT:RUN:purges                      stream of what was purged
    PREFIX:FORMAT:RUN:NAMESPACE:NUMBER:KEY        a value; NAMESPACE and KEY are hashes

A server that starts again has another run. It may have lost the last of what was written, a purge say, so nothing from
before is looked at again. All numbers are in one place, so none is lost alone; and they are drawn, so a lost one never
comes again.
"""

import hashlib
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from llmcache.errors import StoreError
from llmcache.stores.base import FORMAT, StoreKey
from llmcache.threads import forkable

#: Name and arguments.
Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]

PASSWORD = "LLMCACHE_REDIS_PASSWORD"  # environment variable
ALL = "all"  # field of the number of all namespaces
_CONNECT_S = 1.0
_MOST_CONNECTIONS = 8  # of one client
_NUMBERS_S = 30 * 86_400  # after which numbers leave that nobody asked for, and no save from before is served
_DATABASE = "name a database that the server has by its number, as in redis://localhost:6379/0"


class UnusableError(StoreError):
    """The server cannot be used as it was named, and waiting does not help; the text says what does."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a server: sends commands there, and knows what is called how."""

    server: "Server"
    client: Any
    root: str  # what all names begin with

    def ask(self, *commands: Command) -> list[Any]:
        """See `Server.ask`."""
        return self.server.ask(self.client, commands)

    @property
    def numbers(self) -> str:
        return f"{self.root}:numbers"

    @property
    def purges(self) -> str:
        return f"{self.root}:purges"

    def value(self, key: StoreKey, number: int) -> str:
        return f"{self.root}:{field_of(key.namespace)}:{number:x}:{key.digest.hex()}"

    def values(self, namespace: str | None = None) -> str:
        """Matches the values of a namespace, None: all; for SCAN."""
        return f"{self.root}:{'*' if namespace is None else field_of(namespace)}:*:*"

    def ask_numbers(self, namespaces: Sequence[str]) -> Command:
        """A command; `told` reads its answer."""
        return ("HMGET", self.numbers, ALL, *map(field_of, namespaces))

    def live_on(self, ttl_s: int) -> list[Command]:
        """Have purges outlive the values, and numbers what was saved to folders."""
        return [("EXPIRE", self.numbers, max(ttl_s, _NUMBERS_S)), ("EXPIRE", self.purges, ttl_s)]

    def number_of(self, name: bytes) -> int | None:
        """The number in the name of a value; None of other names."""
        found = re.fullmatch(rf"{re.escape(self.root)}:[0-9a-f]{{32}}:([0-9a-f]+):[0-9a-f]{{64}}".encode(), name)
        return None if found is None else int(found[1], 16)


def told(namespaces: Sequence[str], answer: Sequence[bytes | None]) -> dict[str, int]:
    """The number of each namespace; empty where the server has lost them."""
    every, *own = answer
    return {} if every is None else {n: int(one or every) for n, one in zip(namespaces, own, strict=True)}


def field_of(namespace: str) -> str:
    """A name of fixed length for any text."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


class Server:
    """The address of a server, and the run that it is in. Thread-safe."""

    def __init__(self, url: str, prefix: str) -> None:
        """Take `redis://`, `rediss://` (TLS) or `unix://`; its password may be in `LLMCACHE_REDIS_PASSWORD` instead.

        Raises:
            ValueError: It is no such address, or redis-py is not installed.
        """
        try:
            from redis.backoff import NoBackoff
            from redis.connection import parse_url
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
        self._prefix = prefix
        self._run = ""  # as the connection that was opened last has found it
        self._greeting = forkable(threading.Lock(), is_waited_for=False)
        self._settings = {
            **at,
            "decode_responses": False,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": _CONNECT_S,
            "redis_connect_func": self._greet,
        }

    def client(self, silence_s: float) -> Any:
        """A `redis.Redis`, whose server may be silent for so long before a command fails."""
        from redis import BlockingConnectionPool, Redis

        more: dict[str, Any] = {"max_connections": _MOST_CONNECTIONS, "timeout": silence_s, "socket_timeout": silence_s}
        return Redis(connection_pool=BlockingConnectionPool(**self._settings, **more))  # type: ignore[no-untyped-call]

    @contextmanager
    def exchange(self, client: Any) -> Iterator[Run]:
        """Within: the run that the server is in.

        Raises:
            UnusableError: The server cannot be used.
            StoreError: It cannot be reached, or has started again meanwhile: nothing that it answered counts.
        """
        if not self._run:
            self.ask(client, [("PING",)])
        run = self._run
        yield Run(self, client, f"{self._prefix}:{FORMAT}:{run}")
        if self._run != run:
            raise StoreError(f"{self.name}: it has started again")

    def ask(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        """Send commands together, and return all answers.

        Raises:
            UnusableError: The server refuses one, and always will.
            StoreError: One is an error, or did not come in time.
        """
        from redis.exceptions import RedisError

        try:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        except (RedisError, OSError, AttributeError, ValueError) as error:  # the last two: closed by another thread
            if cure := _cure(error):
                raise UnusableError(f"{self.name}: {error}: {cure}") from error
            raise StoreError(f"{self.name}: {error}") from error
        return answers

    def _greet(self, connection: Any) -> None:
        """Begin a connection. One at a time: an answer from before a restart is noted before one from after it."""
        from redis.exceptions import InvalidResponse

        with self._greeting:
            connection.on_connect()
            connection.send_command("INFO", "server")
            about = connection.read_response(disable_decoding=True)
            run, mode = (re.search(rb"^%s:(\w+)" % name, about, re.MULTILINE) for name in (b"run_id", b"redis_mode"))
            if run is None or (mode is not None and mode[1] == b"cluster"):
                raise InvalidResponse("it is no Redis, or part of a cluster")
            self._run = run[1].decode()


def _cure(error: Exception) -> str | None:
    """The cure of an error of redis-py that would come again; None of other errors."""
    from redis import exceptions as known

    said, cause = str(error), error.__context__
    if isinstance(error, known.AuthenticationError | known.AuthenticationWrongNumberOfArgsError):
        return f"give the password that the server asks for in {PASSWORD}, or in the url, and a user in the url"
    if isinstance(error, known.AuthorizationError | known.NoPermissionError):
        return "let its user run all commands on names with this prefix, or name another user in the url"
    if isinstance(error, known.ReadOnlyError):
        return "name the server that this one is a replica of"
    if isinstance(error, known.InvalidResponse) or said.startswith("unknown command"):
        return "name a Redis 7 or Valkey server of its own"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "check the name of its host"
    if said.startswith("WRONGTYPE"):
        return "something else is kept under these names: name another prefix"
    if "DB index" in said or said.startswith("SELECT"):
        return _DATABASE
    return None
