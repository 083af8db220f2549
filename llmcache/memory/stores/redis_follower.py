"""A thread that reads the stream of purges of a shared Redis and keeps the latest in memory.

Before a cache serves from memory, it asks the follower for purges and gets all that are at least `LEASE_S` old. A purge
returns after `LEASE_S`. So no request waits for the server, and no process that reaches it serves a purged value.
"""

import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from time import monotonic
from typing import Any

from llmcache.errors import StoreError
from llmcache.memory.stores.base import Purge, Purges
from llmcache.memory.stores.redis_server import Command, Run, Server
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

AWAY = "llmcache: %s; what is not in memory is computed until it answers"
LEASE_S = 1.0
_MOST_PURGES = 1_000  # purges kept by the server and by the follower
_BLOCK_S = 0.2  # how long XREAD waits for a purge
PATIENCE_S = _BLOCK_S + 0.5  # timeout of a reply: under the lease, so that a lost server is noticed within the lease
_RETRY_S = 0.1
_AT_ONCE = 1_000  # stream entries per read


def purge_command(at: Run, namespace: str | None, names: Sequence[str] = ()) -> Command:
    return _add(at, "purged", json.dumps([namespace, *names]))


class Follower:
    """The thread and the purges it has read. Thread-safe."""

    def __init__(self, server: Server, ttl_s: int, is_away: bool) -> None:
        """Start the thread. While the server is unreachable, it keeps trying."""
        self._server, self._ttl_s = server, ttl_s
        self._client = server.client(PATIENCE_S)
        self._log: deque[tuple[str, Purge | None]] = deque(maxlen=_MOST_PURGES)  # with cursors; None: no purge
        self._root = ""  # name prefix of the server's run
        self._entry: bytes = b""  # id of the last stream entry read
        self._current_until = 0.0
        self._is_away = is_away
        self._changed = forkable(threading.Condition())
        self._closing = forkable(threading.Event())
        self._thread = threading.Thread(target=self._run, name="llmcache-redis", daemon=True)
        self._thread.start()

    def purges(self, since: str | None) -> Purges:
        """Return the purges after a cursor, all that are at least `LEASE_S` old; see `Store.purges`.

        Raise `StoreError` if the server has not answered for `LEASE_S`, and no earlier purge is new to the caller.
        """
        with self._changed:
            # Waits only if the thread was kept from running: a lost server is marked away within the lease.
            self._changed.wait_for(lambda: self._is_away or self._is_current, LEASE_S)
            cursor = self._log[-1][0] if self._log else ""
            if not self._is_current and (not self._root or since in (None, cursor)):
                raise StoreError("Redis: no answer for a while")
            if since == cursor:
                return Purges((), cursor)
            later = [*takewhile(lambda one: one[0] != since, reversed(self._log))]
            if len(later) == len(self._log):
                return Purges((), cursor, is_complete=since is None)
            return Purges([purge for _, purge in reversed(later) if purge is not None], cursor)

    def wait_for(self, entry: bytes) -> None:
        """Wait until an entry of the stream has been read; raise `StoreError` if it takes longer than `LEASE_S`."""
        with self._changed:
            if not self._changed.wait_for(lambda: _order(entry) <= _order(self._entry), LEASE_S):
                raise StoreError("Redis: its purges could not be read in time")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(PATIENCE_S)
        self._client.connection_pool.disconnect()

    @property
    def _is_current(self) -> bool:
        return monotonic() < self._current_until and not self._closing.is_set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self._server.exchange(self._client) as at:
                    self._read(at)
            except Exception as error:  # any error: only this thread can reconnect to the server
                with self._changed:
                    if not self._is_away:
                        logger.warning(AWAY, error)
                    self._is_away = True
                    self._changed.notify_all()
                self._closing.wait(_RETRY_S)

    def _read(self, at: Run) -> None:
        """Read the entries after the last one, and check that none is missing."""
        if at.root != self._root or not self._entry:
            self._begin(at)
            if not self._entry:
                self._closing.wait(_BLOCK_S)
                return
        began = monotonic()
        block = ("BLOCK", int(1e3 * _BLOCK_S)) if self._is_current else ()
        *_, found, last = at.ask(
            *at.expire_commands(self._ttl_s),
            ("XREAD", "COUNT", _AT_ONCE, *block, "STREAMS", at.purges, self._entry),
            ("XRANGE", at.purges, self._entry, self._entry),
        )
        entries = found[0][1] if found else []
        with self._changed:
            for self._entry, fields in entries:
                self._log.append((self._cursor(), _read_purge(fields)))
            self._changed.notify_all()
            if not last:  # streams are trimmed at the start: later entries may be gone as well
                self._entry = b""
            elif len(entries) < _AT_ONCE:
                self._mark_current(began)

    def _begin(self, at: Run) -> None:
        """Read the stream anew; add an entry if it is empty.

        A server that is out of memory accepts no entry, but may have been purged. Until it accepts one, every read
        starts a new log, so that purges count as missing.
        """
        from redis.exceptions import OutOfMemoryError

        began = monotonic()
        (entries,) = at.ask(("XRANGE", at.purges, "-", "+"))
        if not entries:
            try:
                entries = [(*at.ask(_add(at, "begun", "")), {b"begun": b""})]
            except StoreError as error:
                if not isinstance(error.__cause__, OutOfMemoryError):
                    raise
        with self._changed:
            self._root, self._entry = at.root, b""
            self._log.clear()
            for self._entry, fields in entries:
                self._log.append((self._cursor(), _read_purge(fields)))
            if not entries:
                self._log.append((self._cursor(), None))
            self._mark_current(began)

    def _cursor(self) -> str:
        """Return the cursor at the last entry; without one, a new cursor that no server knows."""
        return f"{self._root}@{self._entry.decode() or secrets.token_hex(8)}"

    def _mark_current(self, began: float) -> None:
        """Note that all purges up to the time `began` are known."""
        if self._is_away:
            logger.warning("llmcache: Redis answers again")
        self._current_until, self._is_away = began + LEASE_S, False
        self._changed.notify_all()


def _add(at: Run, kind: str, what: str) -> Command:
    return ("XADD", at.purges, "MAXLEN", "~", _MOST_PURGES, "*", kind, what)


def _read_purge(fields: Mapping[bytes, Any]) -> Purge | None:
    """Return the purge in a stream entry; None for the first entry. An unreadable entry purges everything."""
    if b"begun" in fields:
        return None
    try:
        namespace, *names = json.loads(fields[b"purged"])
        return Purge(namespace, tuple(names))
    except (KeyError, ValueError, TypeError):
        return Purge(None)


def _order(entry: bytes) -> list[int]:
    return [int(part) for part in entry.split(b"-") if part]
