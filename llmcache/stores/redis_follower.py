"""A thread reads the stream of what is purged in a shared Redis, and has the latest of it at hand.

Whoever serves from memory asks for purges before, and is told all but what is less than `LEASE_S` old; whoever purges
waits for that long. So no request waits for the server, and what was purged is served by nobody who reaches it.
"""

import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from llmcache.errors import StoreError
from llmcache.stores.base import Purge, Purges
from llmcache.stores.redis_server import Command, Run, Server
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

AWAY = "llmcache: %s; what is not in memory is computed until it answers"
LEASE_S = 1.0
_MOST_PURGES = 1_000  # that the server keeps, and that are kept here
_BLOCK_S = 0.2  # for which the server waits for a purge before it tells that there is none
PATIENCE_S = _BLOCK_S + 0.5  # for an answer: less than the lease, so that a lost server is known to be lost by then
_RETRY_S = 0.1
_AT_ONCE = 1_000  # entries of the stream that are read together


def tell(at: Run, namespace: str | None, names: Sequence[str] = ()) -> Command:
    """Add a purge to the stream."""
    return _add(at, "purged", json.dumps([namespace, *names]))


class Follower:
    """The thread, and what it heard. Thread-safe."""

    def __init__(self, server: Server, ttl_s: int, is_away: bool) -> None:
        """Begin to follow. While the server is away, it is looked for."""
        self._server, self._ttl_s = server, ttl_s
        self._client = server.client(PATIENCE_S)
        self._log: deque[Purge] = deque(maxlen=_MOST_PURGES)
        self._name, self._n = "", 0  # of the log since it began anew, and how many it has heard since
        self._root = ""  # of the run of the server
        self._entry: bytes = b""  # of the stream, the last that was read
        self._current_until = 0.0
        self._is_away = is_away
        self._changed = forkable(threading.Condition())
        self._closing = forkable(threading.Event())
        self._thread = threading.Thread(target=self._run, name="llmcache-redis", daemon=True)
        self._thread.start()

    def purges(self, since: str | None) -> Purges:
        """The purges after a cursor that are at least `LEASE_S` old, and maybe later ones; see `Store.purges`.

        Raises:
            StoreError: The server has not been heard for longer, or never, and nothing before that is new.
        """
        with self._changed:
            # It waits only where the thread was kept from running: a server that is lost is away by then.
            self._changed.wait_for(lambda: self._is_away or self._is_current, LEASE_S)
            cursor = f"{self._name}:{self._n}"
            if not self._is_current and (not self._root or since in (None, cursor)):
                raise StoreError("Redis: it has not been heard for a while")
            name, _, number = (since or "").partition(":")
            n_after = self._n - int(number) if name == self._name and number.isdigit() else -1
            if not 0 <= n_after <= len(self._log):
                return Purges((), cursor, is_complete=since is None)
            return Purges([self._log[i] for i in range(-n_after, 0)], cursor)

    def close(self) -> None:
        """End the thread."""
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
            except Exception as error:  # whatever it is: without this thread the server would not be found again
                with self._changed:
                    if not self._is_away:
                        logger.warning(AWAY, error)
                    self._is_away = True
                    self._changed.notify_all()
                self._closing.wait(_RETRY_S)

    def _read(self, at: Run) -> None:
        """Read what came after the last entry, and see that nothing is missing."""
        if at.root != self._root or not self._entry:
            self._begin(at)
            if not self._entry:
                self._closing.wait(_BLOCK_S)
                return
        began = monotonic()
        block = ("BLOCK", int(1e3 * _BLOCK_S)) if self._is_current else ()
        *_, found, last = at.ask(
            *at.live_on(self._ttl_s),
            ("XREAD", "COUNT", _AT_ONCE, *block, "STREAMS", at.purges, self._entry),
            ("XRANGE", at.purges, self._entry, self._entry),
        )
        entries = found[0][1] if found else []
        with self._changed:
            for self._entry, fields in entries:
                if (purge := _read_purge(fields)) is not None:
                    self._n += 1
                    self._log.append(purge)
            if not last:  # streams are cut at their beginning: what followed it may be gone as well
                self._entry = b""
            elif len(entries) < _AT_ONCE:
                self._hear(began)

    def _begin(self, at: Run) -> None:
        """Go on from the last entry that there is, and make one where there is none.

        A server without memory takes none, and may have been purged all the same. Until it does, something is taken to
        be missing at each look.
        """
        from redis.exceptions import OutOfMemoryError

        began = monotonic()
        (last,) = at.ask(("XREVRANGE", at.purges, "+", "-", "COUNT", 1))
        if not last:
            try:
                last = [at.ask(_add(at, "begun", ""))]
            except StoreError as error:
                if not isinstance(error.__cause__, OutOfMemoryError):
                    raise
        with self._changed:
            self._root, self._entry = at.root, last[0][0] if last else b""
            self._name, self._n = secrets.token_hex(8), 0
            self._log.clear()
            self._hear(began)

    def _hear(self, began: float) -> None:
        """Note that all purges from before an answer was asked for are known."""
        if self._is_away:
            logger.warning("llmcache: Redis answers again")
        self._current_until, self._is_away = began + LEASE_S, False
        self._changed.notify_all()


def _add(at: Run, kind: str, what: str) -> Command:
    return ("XADD", at.purges, "MAXLEN", "~", _MOST_PURGES, "*", kind, what)


def _read_purge(fields: Mapping[bytes, Any]) -> Purge | None:
    """Read a purge from an entry of the stream; None of its first entry. An unreadable entry purges everything."""
    if b"begun" in fields:
        return None
    try:
        namespace, *names = json.loads(fields[b"purged"])
        return Purge(namespace, tuple(names))
    except (KeyError, ValueError, TypeError):
        return Purge(None)
