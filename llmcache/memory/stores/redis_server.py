"""A Redis server: redis-py clients, names in the database, and the server's current run.

    PREFIX:FORMAT:RUN:numbers                     hash: one number for all namespaces, and one per purged namespace
    PREFIX:FORMAT:RUN:purges                      stream of purges
    PREFIX:FORMAT:RUN:NAMESPACE:NUMBER:KEY        a value; NAMESPACE and KEY are hashes

A restarted server has a new run id. It may have lost its last writes, such as a purge, so nothing from an earlier run
is read. All numbers are in one hash, so none is lost alone. They are random, so a lost number never repeats.
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
from llmcache.memory.stores.base import FORMAT, StoreKey
from llmcache.support.registry import SecretUrl
from llmcache.support.threads import forkable

#: Name and arguments of a Redis command.
Command: TypeAlias = tuple[str | bytes | memoryview | int, ...]

PASSWORD = "LLMCACHE_REDIS_PASSWORD"  # environment variable
ALL = "all"  # hash field of the number for all namespaces
_CONNECT_S = 1.0
_MOST_CONNECTIONS = 8  # per client
_NUMBERS_S = 30 * 86_400  # unused numbers expire after this, and older saves are then not served
_DATABASE = "name a database that the server has by its number, as in redis://localhost:6379/0"


class UnusableError(StoreError):
    """The server cannot be used with these settings, and waiting does not help. The message names the remedy."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a server: sends commands and makes names and keys."""

    server: "Server"
    client: Any
    root: str  # prefix of all names

    def ask(self, *commands: Command) -> list[Any]:
        return self.server.ask(self.client, commands)

    @property
    def numbers(self) -> str:
        return f"{self.root}:numbers"

    @property
    def purges(self) -> str:
        return f"{self.root}:purges"

    def entry_of(self, cursor: str) -> str | None:
        """Return the entry of the stream of purges that a cursor names; None if it names none of this run."""
        root, _, entry = cursor.rpartition("@")
        return entry if root == self.root and re.fullmatch(r"\d+-\d+", entry) else None

    def value(self, key: StoreKey, number: int) -> str:
        return f"{self.root}:{field_of(key.namespace)}:{number:x}:{key.digest.hex()}"

    def values(self, namespace: str | None = None) -> str:
        """Return a SCAN pattern for the values of a namespace, or of all (None)."""
        return f"{self.root}:{'*' if namespace is None else field_of(namespace)}:*:*"

    def numbers_command(self, namespaces: Sequence[str]) -> Command:
        """Return the command that reads namespace numbers; `read_numbers` parses its reply."""
        return ("HMGET", self.numbers, ALL, *map(field_of, namespaces))

    def expire_commands(self, ttl_s: int) -> list[Command]:
        """Return commands that renew expiry: numbers and purges outlive values, and saves in folders."""
        return [("EXPIRE", name, max(ttl_s, _NUMBERS_S)) for name in (self.numbers, self.purges)]

    def number_of(self, name: bytes) -> int | None:
        """Return the number in the name of a value; None for other names."""
        found = re.fullmatch(rf"{re.escape(self.root)}:[0-9a-f]{{32}}:([0-9a-f]+):[0-9a-f]{{64}}".encode(), name)
        return None if found is None else int(found[1], 16)


def read_numbers(namespaces: Sequence[str], answer: Sequence[bytes | None]) -> dict[str, int]:
    """Return the number of each namespace from the reply to `numbers_command`; empty if the server lost them."""
    every, *own = answer
    return {} if every is None else {n: int(one or every) for n, one in zip(namespaces, own, strict=True)}


def field_of(namespace: str) -> str:
    """Return a name of fixed length for a namespace: 32 hex digits."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


class Server:
    """The address of a server and its current run. Thread-safe."""

    def __init__(self, url: str, prefix: str) -> None:
        """Parse a URL: `redis://`, `rediss://` (TLS) or `unix://`; `LLMCACHE_REDIS_PASSWORD` is the default password.

        Raise `ValueError` if the URL is invalid, or redis-py is not installed.
        """
        try:
            from redis.backoff import NoBackoff
            from redis.connection import parse_url
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError("redis-py is not installed: pip install 'llmcache-torch[redis]'") from error
        public = SecretUrl(url)  # errors show parts of it
        at: dict[str, Any] = {"host": "localhost", "port": 6379, "db": 0}
        at |= parse_url(str(public))  # type: ignore[no-untyped-call]
        at |= public.secrets
        parts = urlsplit(str(public))
        if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
            raise ValueError(f"url: {parts.path!r} names no database: {_DATABASE}")
        at.setdefault("password", os.environ.get(PASSWORD) or None)
        where = at.get("path") or f"{at['host']}:{at['port']}"
        self.name = f"Redis at {where}, database {at['db']}"  # without the password
        self._prefix = prefix
        self._run = ""  # run id, as read by the latest connection
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
        """Return a `redis.Redis` whose commands fail after `silence_s` seconds without a reply."""
        from redis import BlockingConnectionPool, Redis

        more: dict[str, Any] = {"max_connections": _MOST_CONNECTIONS, "timeout": silence_s, "socket_timeout": silence_s}
        return Redis(connection_pool=BlockingConnectionPool(**self._settings, **more))  # type: ignore[no-untyped-call]

    @contextmanager
    def exchange(self, client: Any) -> Iterator[Run]:
        """Yield the server's current run; `StoreError` if it restarts within the block: its replies do not count."""
        if not self._run:
            self.ask(client, [("PING",)])
        run = self._run
        yield Run(self, client, f"{self._prefix}:{FORMAT}:{run}")
        if self._run != run:
            raise StoreError(f"{self.name}: it has started again")

    def ask(self, client: Any, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one pipeline and return their replies.

        `UnusableError`: the server refuses a command, and always will. `StoreError`: another error, or no reply.
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
        """Set up a connection and read the run id. Locked, so that the run of a restarted server is noted last."""
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
    """Return the remedy for a redis-py error that would recur; None for other errors."""
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
