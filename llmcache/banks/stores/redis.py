"""A store on a Redis or Valkey server, for all machines that reach it: see `docs/stores.md`.

    redis_wire        connections, and answers in time or not at all
    redis_keys        how values, numbers of namespaces and the stream of events are called
    redis_follower    the thread that reads this stream

A value's name has the number of its namespace, so a purge is one change of that number. Whoever reads asks for it with
the values, in one exchange. The server evicts as it is configured to; whatever it lost is a miss.
"""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from llmcache.banks.stores.base import Bytes, Events, Put, Store, StoreKey, StoreStats
from llmcache.banks.stores.redis_follower import AWAY, LEASE_S, PATIENCE_S, Follower, tell_cleared, tell_stored
from llmcache.banks.stores.redis_keys import (
    ALL,
    Keys,
    field_of,
    generation_of,
    is_ours,
    new_generation,
    pattern,
    read_note,
    told,
    write_note,
)
from llmcache.banks.stores.redis_wire import Ask, Command, Ready, Server, UnusableError
from llmcache.errors import StoreError
from llmcache.threads import at_fork, forkable

logger = logging.getLogger("llmcache")

_READY = 4  # connections for requests
_NUMBER_S = 0.1  # for the number of a namespace that is new to this process
_LARGEST = 512 << 20  # bytes of a value that Redis takes
_MOST_NAMESPACES = 10_000  # with a number of their own; beyond, all get a new one
_SCANNED = 1_000  # names looked at in one step of a search
_COUNTED = 20_000  # names looked at for the stats
_LOOKED_AT = 100_000  # at the start, for those of others


class _Links(NamedTuple):
    """What one process has open."""

    client: Any  # for what may take its time
    ready: Ready  # for requests
    follower: Follower


class RedisStore(Store):
    """`redis`: a Redis or Valkey server that many machines share."""

    def __init__(self, url: str, prefix: str = "llmcache", ttl_s: int = 86_400, timeout_ms: float = 5.0) -> None:
        """Open the store; a server that is not there yet is looked for, and nothing is served from it meanwhile.

        Args:
            url: `redis://[[user]:password@]host[:port][/database]`, `rediss://` with TLS, or `unix://`.
            prefix: Of all names in the database: letters, digits, `_`, `.` and `-`.
            ttl_s: Seconds after which a value leaves, used or not.
            timeout_ms: Milliseconds for which the server may be silent before a request is computed instead.

        Raises:
            ValueError: The server cannot be used as it was named: a wrong address or password, a replica, part of a
                cluster, no Redis, or one that has something else under these names; or an option is out of range.
        """
        if not re.fullmatch(r"[\w.-]{1,64}", prefix, re.ASCII):
            raise ValueError(f"prefix: give 1 to 64 letters, digits, '_', '.' or '-' (got {prefix!r})")
        if ttl_s < 1 or not timeout_ms > 0:
            raise ValueError(f"ttl_s, timeout_ms: give more than 0 (got {ttl_s}, {timeout_ms})")
        self._server = Server(url)
        self._prefix, self._ttl_s, self._timeout_s = prefix, ttl_s, timeout_ms / 1e3
        self._generations: dict[str, int] = {}  # as they were when last asked for
        self._n_evicted_before = 0
        self._closing = forkable(threading.Event())
        self._opening = forkable(threading.Lock(), is_waited_for=False)
        self._opened: _Links | None = self._open()
        at_fork(self._begin_anew)

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        if monotonic() >= deadline or not keys:
            self._check_open()
            return [None] * len(keys)
        return [answer if isinstance(answer, bytes) else None for answer in self._look("GET", keys, deadline)]

    def put_many(self, puts: Sequence[Put]) -> None:
        names = list(dict.fromkeys(put.key.namespace for put in puts))
        if not names:
            return
        with self._patient() as (at, ask):
            now = self._now(at, ask, names)
            kept = [p for p in puts if p.generation == now[p.key.namespace] and len(p.value) <= _LARGEST]
            commands: list[Command] = []
            for put in kept:
                name = at.value(put.key, put.generation)
                commands.append(("SET", name, memoryview(put.value), "EX", self._ttl_s))
                if put.note:
                    commands.append(("SET", at.note(put.key, put.generation), write_note(put), "EX", self._ttl_s))
                commands.append(tell_stored(at, put))
            ask([*commands, *at.live_on(self._ttl_s)])
            after = self._now(at, ask, names)
            gone = [(put.key, put.generation) for put in kept if put.generation != after[put.key.namespace]]
            if gone:  # a purge came between, which may have looked for what to remove before
                ask([("UNLINK", *(name(*one) for one in gone for name in (at.value, at.note)))])

    def contains_prefix(self, keys: Sequence[StoreKey]) -> int:
        if not keys:
            self._check_open()
            return 0
        found = self._look("TOUCH", keys, monotonic() + self._timeout_s)
        return next((i for i, answer in enumerate(found) if answer != 1), len(keys))

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        names = list(dict.fromkeys(key.namespace for key in keys))
        with self._patient() as (at, ask):
            now = self._now(at, ask, names)
            found = ask([("TOUCH", at.value(key, now[key.namespace])) for key in keys])
        return [key for key, n in zip(keys, found, strict=True) if n != 1]

    def generation(self, namespace: str) -> int:
        """Likewise; the server may be silent for longer than in a read, since nothing is written without the number."""
        return self._numbers([namespace], max(self._timeout_s, _NUMBER_S))[0]

    def generations(self, namespaces: Sequence[str]) -> list[int]:
        """Likewise, in one exchange, for which the server may take its time."""
        return self._numbers(namespaces, PATIENCE_S)

    def remove(self, namespace: str | None) -> int:
        """Likewise; a server that is out of memory gives all namespaces another number.

        Waits for a second, after which no process serves from its memory what was removed.
        """
        return self._remove(namespace, LEASE_S)

    def discard(self, namespace: str) -> None:
        """Likewise, without a wait."""
        self._remove(namespace, 0.0)

    def events(self, since: str | None) -> Events:
        return self._links.follower.events(since)

    def notes(self, namespace: str) -> Iterator[tuple[StoreKey, Bytes]]:
        cursor: int | None = 0
        while cursor is not None:
            with self._patient() as (at, ask):
                number = self._now(at, ask, [namespace])[namespace]
                cursor, names = _step(ask, cursor, at.notes(namespace, number))
                found = ask([("MGET", *names)])[0] if names else []
            yield from (note for value in found if value is not None and (note := read_note(namespace, value)))

    def stats(self) -> StoreStats:
        """Likewise, of values under this prefix; in a large database estimated from a part of it."""
        with self._patient() as (at, ask):
            n_names, memory, counts = ask([("DBSIZE",), ("INFO", "memory"), ("INFO", "stats")])
            found, n_seen = _names(ask, at.values, _COUNTED)
            values = [n for n in found if generation_of(self._prefix, n) is not None and not n.endswith(b":note")]
            sizes = ask([("STRLEN", name) for name in values[:_SCANNED]])
        n_values = len(values) if n_seen is None else round(len(values) * max(1.0, n_names / n_seen))
        return StoreStats(
            n_values,
            round(sum(sizes) * n_values / max(1, len(sizes))),
            memory.get("maxmemory") or None,
            max(0, counts.get("evicted_keys", 0) - self._n_evicted_before),
        )

    def ping(self) -> None:
        self._numbers([], self._timeout_s)

    def close(self) -> None:
        self._closing.set()
        with self._opening:
            if self._opened is not None:
                self._opened.follower.close()
                self._opened.ready.close()
                self._opened.client.connection_pool.disconnect()

    @property
    def _links(self) -> _Links:
        """What is open; a forked process opens its own when it first needs it."""
        self._check_open()
        if (links := self._opened) is None:
            with self._opening:
                links = self._opened = self._opened or self._open()
        return links

    def _begin_anew(self) -> None:
        """In a forked process: what the parent has open is closed here, which it does not notice."""
        if self._opened is not None:
            self._opened = None
            self._server.disconnect()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StoreError(f"{self._server.name}: the store is closed")

    def _open(self) -> _Links:
        client, ready, is_away = self._server.client(PATIENCE_S), Ready(self._server, _READY, self._timeout_s), False
        try:
            with self._server.exchanges(client) as (run, ask):
                self._refuse_others(ask)
                at = Keys(self._prefix, run)
                self._now(at, ask, [])
                self._n_evicted_before = ask([("XLEN", at.events), ("INFO", "stats")])[1].get("evicted_keys", 0)
            ready.fill()
        except UnusableError as error:
            raise ValueError(f"{error}") from error
        except StoreError as error:
            is_away = True
            logger.warning(AWAY, error)
        return _Links(client, ready, Follower(self._server, ready, self._prefix, self._ttl_s, is_away))

    def _refuse_others(self, ask: Ask) -> None:
        """Refuse a prefix under which something else is kept, as far as a look at part of a large database tells."""
        found, _ = _names(ask, pattern(self._prefix, None), _LOOKED_AT)
        if others := [name for name in found if not is_ours(self._prefix, name)]:
            raise UnusableError(
                f"{self._server.name}: something else is kept under the prefix {self._prefix!r} "
                f"({min(others).decode(errors='replace')!r}): name another prefix"
            )

    @contextmanager
    def _patient(self) -> Iterator[tuple[Keys, Ask]]:
        """Within: names, and what asks the server, which may take its time."""
        with self._server.exchanges(self._links.client) as (run, ask):
            yield Keys(self._prefix, run), ask

    def _look(self, command: str, keys: Sequence[StoreKey], deadline: float) -> list[Any]:
        """What the server answers about each value; None where it had lost all, or the answer was late."""
        names, ready = list(dict.fromkeys(key.namespace for key in keys)), self._links.ready
        with ready.one(deadline) as connection:
            at = Keys(self._prefix, connection.run)
            while True:
                known = {name: self._generations[name] for name in names if name in self._generations}
                commands = [at.ask_generations(names)]
                if len(known) == len(names):
                    commands += [(command, at.value(key, known[key.namespace])) for key in keys]
                first, *answers = ready.ask(connection, commands, deadline)
                now = told(names, self._server.checked(first))
                if not now or now == known:
                    return [*answers, *[None] * len(keys)][: len(keys)] if now else [None] * len(keys)
                if len(self._generations) > _MOST_NAMESPACES:
                    self._generations.clear()
                self._generations |= now

    def _numbers(self, namespaces: Sequence[str], silence_s: float) -> list[int]:
        deadline, ready = monotonic() + silence_s, self._links.ready
        with ready.one(deadline) as connection:
            ask = partial(ready.ask_all, connection, deadline=deadline, silence_s=silence_s)
            now = self._now(Keys(self._prefix, connection.run), ask, namespaces)
        return [now[namespace] for namespace in namespaces]

    def _now(self, at: Keys, ask: Ask, names: Sequence[str]) -> dict[str, int]:
        """The number of each namespace; where the server lost them, all get one anew."""
        numbers = at.ask_generations(names)
        (answer,) = ask([numbers])
        if answer[0] is None:
            begin: list[Command] = [
                ("HSETNX", at.generations, ALL, new_generation()),
                ("XTRIM", at.events, "MAXLEN", 0),  # so that all who follow it ask for the numbers again
                *at.live_on(self._ttl_s),
            ]
            *_, answer = ask([*begin, numbers])
        return told(names, answer)

    def _remove(self, namespace: str | None, lease_s: float) -> int:
        with self._patient() as (at, ask):
            which, number = self._renew(at, ask, namespace)
        self._closing.wait(lease_s)
        with suppress(StoreError):  # what is left leaves at the end of its time
            return self._sweep(which, number)
        return 0

    def _renew(self, at: Keys, ask: Ask, namespace: str | None) -> tuple[str | None, int]:
        """Give a namespace another number, or all of them where that is not possible; returns which, and the number."""
        from redis.exceptions import OutOfMemoryError

        number = new_generation()
        try:
            self._now(at, ask, [])
            if ask([("HLEN", at.generations)])[0] > _MOST_NAMESPACES:
                namespace = None
            field = ALL if namespace is None else field_of(namespace)
            changes: list[Command] = [("DEL", at.generations)] * (namespace is None)
            changes += [("HSET", at.generations, field, number), tell_cleared(at, namespace, number)]
            ask([("MULTI",), *changes, *at.live_on(self._ttl_s), ("EXEC",)])
        except StoreError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            namespace = None
            ask([("DEL", at.generations), ("XTRIM", at.events, "MAXLEN", 0)])
        return namespace, number

    def _sweep(self, namespace: str | None, number: int) -> int:
        """Remove the values of a namespace that have another number; returns how many."""
        cursor: int | None = 0
        n_removed = 0
        while cursor is not None:
            with self._patient() as (_, ask):
                cursor, names = _step(ask, cursor, pattern(self._prefix, namespace))
                if stale := [name for name in names if generation_of(self._prefix, name) not in (None, number)]:
                    n_removed += ask([("UNLINK", *stale)])[0]
        return n_removed


def _step(ask: Ask, cursor: int, matching: str) -> tuple[int | None, list[bytes]]:
    """A step of a search for names: where to go on, None at the end, and names that it found."""
    ((after, names),) = ask([("SCAN", cursor, "MATCH", matching, "COUNT", _SCANNED)])
    return after or None, names


def _names(ask: Ask, matching: str, most: int) -> tuple[set[bytes], int | None]:
    """Names in the database; and among how many they were found, None if that were all, `most` being enough."""
    cursor, found, n_seen = 0, set[bytes](), 0
    while n_seen < most:
        after, names = _step(ask, cursor, matching)
        found.update(names)
        if after is None:
            return found, None
        cursor, n_seen = after, n_seen + _SCANNED
    return found, n_seen
