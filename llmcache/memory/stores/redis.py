"""A store on a Redis or Valkey server, shared by all machines that reach it: see `docs/stores.md`.

    redis_server      clients, and the names of values, of namespace numbers and of the stream of purges
    redis_follower    the thread that reads this stream

A value's name contains the number of its namespace, so a purge only changes that number. Reads fetch the number and
the values in one round trip. The server evicts as configured; anything it lost is a miss.
"""

import json
import logging
import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from llmcache.errors import StoreError
from llmcache.memory.stores.base import FORMAT, Bytes, Purges, Put, Store, StoreKey, StoreStats, forgets_of
from llmcache.memory.stores.redis_follower import AWAY, LEASE_S, PATIENCE_S, Follower, purge_command
from llmcache.memory.stores.redis_server import ALL, Command, Run, Server, UnusableError, field_of, read_numbers
from llmcache.support.threads import at_fork, forkable

logger = logging.getLogger("llmcache")

_NUMBER_BITS = 62  # bits of a random namespace number, so that none repeats
_NUMBER_S = 0.1  # timeout for reading the number of a namespace
_LARGEST = 512 << 20  # largest value that Redis accepts, in bytes
_MOST_NAMESPACES = 10_000  # namespaces with a number of their own; beyond that, a purge renumbers all
_AT_ONCE = 64  # values read together; the deadline is checked in between
_SCANNED = 1_000  # names per SCAN
_COUNTED = 20_000  # names scanned for the statistics
_LOOKED_AT = 100_000  # names scanned at the start, to find foreign ones
#: Sets a value unless its number changed, or a purge after the entry `since` names it, or entries after it are gone.
#: In one step: a forgotten value that was visible for a moment could stay in the memory of a process that read it.
_PUT = """
local field, number, since, name, value, ttl_s = unpack(ARGV)
local now = redis.call('HMGET', KEYS[1], 'all', field)
local purges = redis.call('XRANGE', KEYS[2], since, '+')
if (now[2] or now[1]) ~= number or not purges[1] or purges[1][1] ~= since then return 0 end
for i = 2, #purges do
  if string.find(purges[i][2][2], name, 1, true) then return 0 end
end
redis.call('SET', KEYS[3], value, 'EX', ttl_s)
return 1
"""


class _Links(NamedTuple):
    """The clients of one process, for reads, for numbers and for slow commands, and its follower."""

    reading: Any
    numbering: Any
    patient: Any
    follower: Follower


class RedisStore(Store):
    """`redis`: a Redis or Valkey server that many machines share."""

    def __init__(self, url: str, prefix: str = "llmcache", ttl_s: int = 86_400, timeout_ms: float = 5.0) -> None:
        """Open the store. If the server is unreachable, keep trying in the background and serve nothing meanwhile.

        Args:
            url: `redis://[[user]:password@]host[:port][/database]`, `rediss://` with TLS, or `unix://`.
            prefix: Prefix of all names in the database: letters, digits, `_`, `.` and `-`.
            ttl_s: Seconds after which a value expires, used or not.
            timeout_ms: Milliseconds to wait for the server before a request is computed instead.

        Raises:
            ValueError: The server is unusable: wrong address or password, a replica, part of a cluster, not Redis, or
                it holds other data under these names, such as an older version's values; or an option is out of range.
        """
        if not re.fullmatch(r"[\w.-]{1,64}", prefix, re.ASCII):
            raise ValueError(f"prefix: give 1 to 64 letters, digits, '_', '.' or '-' (got {prefix!r})")
        if ttl_s < 1 or not timeout_ms > 0:
            raise ValueError(f"ttl_s, timeout_ms: give more than 0 (got {ttl_s}, {timeout_ms})")
        self._server = Server(url, prefix)
        self._prefix, self._ttl_s, self._timeout_s = prefix, ttl_s, timeout_ms / 1e3
        self._known: dict[str, int] = {}  # numbers of namespaces as last read
        self._n_evicted_before = 0
        self._closing = forkable(threading.Event())
        self._opening = forkable(threading.Lock(), is_waited_for=False)
        self._opened: _Links | None = self._open()
        at_fork(self._reset_after_fork)

    def get_many(self, keys: Sequence[StoreKey], deadline: float) -> list[Bytes | None]:
        client = self._links.reading
        found: list[Bytes | None] = []
        for begin in range(0, len(keys), _AT_ONCE):
            if monotonic() >= deadline:
                break
            with self._server.exchange(client) as at:
                found += self._get(at, keys[begin : begin + _AT_ONCE])
        return [*found, *[None] * (len(keys) - len(found))]

    def put_many(self, puts: Sequence[Put]) -> None:
        with self._server.exchange(self._links.patient) as at:
            sets = [
                self._put_command(at, put, since)
                for put in puts
                if len(put.value) <= _LARGEST and (since := at.entry_of(put.since))
            ]
            at.ask(*sets, *at.expire_commands(self._ttl_s))

    def _put_command(self, at: Run, put: Put, since: str) -> Command:
        names = at.numbers, at.purges, at.value(put.key, put.number)
        number, name = str(put.number), json.dumps(put.key.name)
        return (
            *("EVAL", _PUT, len(names), *names),
            *(field_of(put.key.namespace), number, since, name, memoryview(put.value), self._ttl_s),
        )

    def absent(self, keys: Sequence[StoreKey]) -> list[StoreKey]:
        with self._server.exchange(self._links.patient) as at:
            now = self._now(at, list(dict.fromkeys(key.namespace for key in keys)))
            found = at.ask(*(("TOUCH", at.value(key, now[key.namespace])) for key in keys))
        return [key for key, n in zip(keys, found, strict=True) if n != 1]

    def numbers(self, namespaces: Sequence[str]) -> list[int]:
        """As `Store.numbers`. Waits longer for the server than a read does: nothing is written without a number."""
        with self._server.exchange(self._links.numbering) as at:
            now = self._now(at, namespaces)
            (last,) = at.ask(("XREVRANGE", at.purges, "+", "-", "COUNT", 1))
        if namespaces and last:
            self._links.follower.wait_for(last[0][0])  # `purges` must know of every purge that the numbers do
        return [now[namespace] for namespace in namespaces]

    def purge(self, namespace: str | None) -> int:
        """As `Store.purge`, but if the server is out of memory all namespaces are renumbered.

        Waits one second, after which no process serves purged values from its memory.
        """
        client = self._links.patient
        with self._server.exchange(client) as at:
            namespace, number = self._renew(at, namespace)
        self._closing.wait(LEASE_S)
        n_removed, cursor = 0, "0"
        with suppress(StoreError), self._server.exchange(client) as at:  # values left over expire by themselves
            while cursor:
                cursor, names = _scan(at, cursor, at.values(namespace))
                if stale := [name for name in names if at.number_of(name) not in (None, number)]:
                    n_removed += at.ask(("UNLINK", *stale))[0]
        return n_removed

    def forget(self, keys: Sequence[StoreKey]) -> None:
        """As `Store.forget`. Waits one second, after which no process serves forgotten values from its memory."""
        namespace = keys[0].namespace
        with self._server.exchange(self._links.patient) as at:
            number = self._now(at, [namespace])[namespace]
            # Recorded first: what is put later is refused, and what was put before is removed.
            at.ask(
                ("HSET", at.numbers, field_of(forgets_of(namespace)), secrets.randbits(_NUMBER_BITS)),
                purge_command(at, namespace, [key.name for key in keys]),
                ("UNLINK", *(at.value(key, number) for key in keys)),
            )
        self._closing.wait(LEASE_S)

    def purges(self, since: str | None) -> Purges:
        return self._links.follower.purges(since)

    def stats(self) -> StoreStats:
        """As `Store.stats`, for values under this prefix; a large database is sampled."""
        with self._server.exchange(self._links.patient) as at:
            n_names, memory, counts = at.ask(("DBSIZE",), ("INFO", "memory"), ("INFO", "stats"))
            found, n_seen = _names(at, at.values(), _COUNTED)
            values = [name for name in found if at.number_of(name) is not None]
            sizes = at.ask(*(("STRLEN", name) for name in values[:_SCANNED]))
        n_values = len(values) if n_seen is None else round(len(values) * max(1.0, n_names / n_seen))
        return StoreStats(
            n_values,
            round(sum(sizes) * n_values / max(1, len(sizes))),
            memory.get("maxmemory") or None,
            max(0, counts.get("evicted_keys", 0) - self._n_evicted_before),
        )

    def close(self) -> None:
        self._closing.set()
        with self._opening:
            if self._opened is not None:
                self._opened.follower.close()
                for client in self._opened[:3]:
                    client.connection_pool.disconnect()

    @property
    def _links(self) -> _Links:
        """The open connections; a forked child opens its own on first use."""
        if self._closing.is_set():
            raise StoreError(f"{self._server.name}: the store is closed")
        if (links := self._opened) is None:
            with self._opening:
                links = self._opened = self._opened or self._open()
        return links

    def _reset_after_fork(self) -> None:
        self._opened = None

    def _open(self) -> _Links:
        reading, numbering, patient = map(
            self._server.client, (self._timeout_s, max(self._timeout_s, _NUMBER_S), PATIENCE_S)
        )
        is_away = False
        try:
            with self._server.exchange(patient) as at:
                self._refuse_others(at)
                self._now(at, [])
                (counts,) = at.ask(("INFO", "stats"))
                self._n_evicted_before = counts.get("evicted_keys", 0)
        except UnusableError as error:
            raise ValueError(f"{error}") from error
        except StoreError as error:
            is_away = True
            logger.warning(AWAY, error)
        return _Links(reading, numbering, patient, Follower(self._server, self._ttl_s, is_away))

    def _refuse_others(self, at: Run) -> None:
        """Raise if foreign names exist under the prefix; a large database is checked in part."""
        ours = rf"{re.escape(self._prefix)}:{FORMAT}:[0-9a-f]+:(numbers|purges|[0-9a-f]{{32}}:[0-9a-f]+:[0-9a-f]{{64}})"
        found, _ = _names(at, f"{self._prefix}:*", _LOOKED_AT)
        if others := [name for name in found if not re.fullmatch(ours.encode(), name)]:
            older = rf"{re.escape(self._prefix)}:(\d+:)?[0-9a-f]{{40}}:".encode()
            kind = "something else is" if not re.match(older, min(others)) else "values of another version are"
            raise UnusableError(
                f"{self._server.name}: {kind} kept under the prefix {self._prefix!r} "
                f"({min(others).decode(errors='replace')!r}): name another prefix"
            )

    def _get(self, at: Run, keys: Sequence[StoreKey]) -> list[Bytes | None]:
        """Return values whose number is their namespace's at the time of the read; all None if the server lost it."""
        names = list(dict.fromkeys(key.namespace for key in keys))
        while True:
            known = {name: self._known[name] for name in names if name in self._known}
            is_known = len(known) == len(names)
            gets: list[Command] = [("GET", at.value(key, known[key.namespace])) for key in keys] if is_known else []
            first, *answers = at.ask(at.numbers_command(names), *gets)
            now = read_numbers(names, first)
            if not now:
                return [None] * len(keys)
            if now == known:
                return answers
            if len(self._known) > _MOST_NAMESPACES:
                self._known.clear()
            self._known |= now

    def _now(self, at: Run, names: Sequence[str]) -> dict[str, int]:
        """Return the number of each namespace; if the server lost them, draw a new one for all."""
        asked = at.numbers_command(names)
        (answer,) = at.ask(asked)
        if answer[0] is None:
            *_, answer = at.ask(
                ("HSETNX", at.numbers, ALL, secrets.randbits(_NUMBER_BITS)),
                ("XTRIM", at.purges, "MAXLEN", 0),  # makes every follower compare numbers again
                *at.expire_commands(self._ttl_s),
                asked,
            )
        return read_numbers(names, answer)

    def _renew(self, at: Run, namespace: str | None) -> tuple[str | None, int]:
        """Draw a new number for a namespace, or for all if that fails; return the namespace (None: all) and number."""
        from redis.exceptions import OutOfMemoryError

        number = secrets.randbits(_NUMBER_BITS)
        try:
            self._now(at, [])
            if at.ask(("HLEN", at.numbers))[0] > _MOST_NAMESPACES:
                namespace = None
            field = ALL if namespace is None else field_of(namespace)
            changes: list[Command] = [("DEL", at.numbers)] * (namespace is None)
            changes += [("HSET", at.numbers, field, number), purge_command(at, namespace)]
            at.ask(("MULTI",), *changes, *at.expire_commands(self._ttl_s), ("EXEC",))
        except StoreError as error:
            if not isinstance(error.__cause__, OutOfMemoryError):
                raise
            namespace = None
            at.ask(("DEL", at.numbers), ("XTRIM", at.purges, "MAXLEN", 0))
        return namespace, number


def _scan(at: Run, cursor: str, matching: str) -> tuple[str, list[bytes]]:
    """Run one SCAN; return the next cursor, "" at the end, and the names found."""
    ((after, names),) = at.ask(("SCAN", cursor, "MATCH", matching, "COUNT", _SCANNED))
    return str(after or ""), names


def _names(at: Run, matching: str, most: int) -> tuple[set[bytes], int | None]:
    """Return matching names, and about how many names were scanned; None if all were, `most` at most."""
    cursor, found, n_seen = "0", set[bytes](), 0
    while cursor and n_seen < most:
        cursor, names = _scan(at, cursor, matching)
        found.update(names)
        n_seen += _SCANNED
    return found, n_seen if cursor else None
