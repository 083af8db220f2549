"""What happens in a Redis that is shared: a thread reads its stream of events, and has the latest of them at hand.

Whoever serves from memory asks for these events before, and is told all but what is less than `LEASE_S` old; whoever
purges waits for that long. So no request waits for the server, and what was purged is served by nobody who reaches it.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Mapping
from time import monotonic

from llmcache.banks.stores.base import Event, Events, Put, StoreKey
from llmcache.banks.stores.redis_keys import Keys
from llmcache.banks.stores.redis_wire import Ask, Command, Ready, Server
from llmcache.errors import StoreError
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

AWAY = "llmcache: %s; what is not in memory is computed until it answers"
LEASE_S = 1.0
_MOST_EVENTS = 10_000  # that the server keeps, and that are kept here
_BLOCK_S = 0.2  # for which the server waits for an event before it tells that there is none
PATIENCE_S = _BLOCK_S + 0.5  # for an answer: less than the lease, so that a lost server is known to be lost by then
_RETRY_S = 0.1
_AT_ONCE = 1_000  # events that are read together


def tell_stored(keys: Keys, put: Put) -> Command:
    """Add an event to the stream."""
    named = "namespace", put.key.namespace, "scope", put.key.scope, "name", put.key.name
    return _tell(keys, "kind", "stored", *named, "note", put.note)


def tell_cleared(keys: Keys, namespace: str | None, generation: int) -> Command:
    """Likewise."""
    named = () if namespace is None else ("namespace", namespace)
    return _tell(keys, "kind", "cleared", *named, "generation", generation)


class Log:
    """The latest events in their order. A cursor is the number of an event, and of the log since it began anew."""

    def __init__(self) -> None:
        """Begin."""
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self.restart()

    def restart(self) -> None:
        """Begin anew: something may be missing."""
        self._name = secrets.token_hex(8)
        self._n = 0
        self._events.clear()

    def add(self, fields: Mapping[bytes, bytes]) -> None:
        """Note an entry of the stream, if it is an event."""
        if (event := _event(fields, f"{self._name}:{self._n + 1}")) is not None:
            self._n += 1
            self._events.append(event)

    def since(self, cursor: str | None) -> Events:
        """See `Store.events`."""
        name, _, number = (cursor or "").partition(":")
        n_after = self._n - int(number) if name == self._name and number.isdigit() else -1
        now = f"{self._name}:{self._n}"
        if not 0 <= n_after <= len(self._events):
            return Events((), now, is_complete=cursor is None)
        return Events([self._events[i] for i in range(-n_after, 0)], now)


class Follower:
    """The thread, and what it heard. Thread-safe."""

    def __init__(self, server: Server, ready: Ready, prefix: str, ttl_s: int, is_away: bool) -> None:
        """Begin to follow, and to keep `ready` filled. While the server is away, it is looked for."""
        self._server = server
        self._client = server.client(PATIENCE_S)
        self._ready = ready
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._log = Log()
        self._run_of_server = ""
        self._entry: bytes = b""  # of the stream, the last that was read
        self._current_until = 0.0
        self._is_away = is_away
        self._changed = forkable(threading.Condition())
        self._closing = forkable(threading.Event())
        self._thread = threading.Thread(target=self._run, name="llmcache-redis", daemon=True)
        self._thread.start()

    def events(self, since: str | None) -> Events:
        """What happened after a cursor, but for what is less than `LEASE_S` old; see `Store.events`.

        Raises:
            StoreError: The server has not been heard for longer, or never, and nothing before that is new.
        """
        with self._changed:
            # It waits only where the thread was kept from running: a server that is lost is away by then.
            self._changed.wait_for(lambda: self._is_away or self._is_current, LEASE_S)
            events = self._log.since(since)
            is_new = bool(self._run_of_server) and since not in (None, events.cursor)
            if not (self._is_current or is_new):  # what was heard before is told all the same
                raise StoreError("Redis: it has not been heard for a while")
            return events

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
                with self._server.exchanges(self._client) as (run, ask):
                    self._ready.fill()
                    self._read(run, Keys(self._prefix, run), ask)
            except Exception as error:  # whatever it is: without this thread the server would not be found again
                self._lose(error)
                self._closing.wait(_RETRY_S)

    def _lose(self, error: Exception) -> None:
        with self._changed:
            if not self._is_away:
                logger.warning(AWAY, error)
            self._is_away = True
            self._changed.notify_all()

    def _read(self, run: str, keys: Keys, ask: Ask) -> None:
        """Read what came after the last entry, and see that nothing is missing."""
        if run != self._run_of_server or not self._entry:
            self._begin(run, keys, ask)
            if not self._entry:
                self._closing.wait(_BLOCK_S)
                return
        began = monotonic()
        block = ("BLOCK", int(1e3 * _BLOCK_S)) if self._is_current else ()
        commands: list[Command] = [
            *keys.live_on(self._ttl_s),
            ("XREAD", "COUNT", _AT_ONCE, *block, "STREAMS", keys.events, self._entry),
            ("XRANGE", keys.events, self._entry, self._entry),
        ]
        *_, found, last = ask(commands)
        entries = found[0][1] if found else []
        with self._changed:
            for self._entry, fields in entries:
                self._log.add(fields)
            if not last:  # streams are cut at their beginning: what followed it may be gone as well
                self._entry = b""
            elif len(entries) < _AT_ONCE:
                self._hear(began)

    def _begin(self, run: str, keys: Keys, ask: Ask) -> None:
        """Go on from the last entry that there is, and make one where there is none.

        A server without memory takes none, and may have been purged all the same. Until it does, something is taken to
        be missing at each look.
        """
        from redis.exceptions import OutOfMemoryError

        began = monotonic()
        (last,) = ask([("XREVRANGE", keys.events, "+", "-", "COUNT", 1)])
        if not last:
            try:
                last = [ask([_tell(keys, "kind", "begun")])]
            except StoreError as error:
                if not isinstance(error.__cause__, OutOfMemoryError):
                    raise
        with self._changed:
            self._run_of_server, self._entry = run, last[0][0] if last else b""
            self._log.restart()
            self._hear(began)

    def _hear(self, began: float) -> None:
        """All events are known that were there when an answer was asked for."""
        if self._is_away:
            logger.warning("llmcache: Redis answers again")
        self._current_until, self._is_away = began + LEASE_S, False
        self._changed.notify_all()


def _tell(keys: Keys, *fields: str | bytes | memoryview | int) -> Command:
    return ("XADD", keys.events, "MAXLEN", "~", _MOST_EVENTS, "*", *fields)


def _event(fields: Mapping[bytes, bytes], cursor: str) -> Event | None:
    """What an entry of the stream says, if it is one of ours."""
    try:
        kind, named = fields[b"kind"], fields.get(b"namespace")
        namespace = None if named is None else named.decode()
        if kind == b"cleared":
            return Event(cursor, "cleared", namespace, generation=int(fields[b"generation"]))
        if kind == b"stored" and namespace is not None:
            key = StoreKey(namespace, fields[b"scope"].decode(), fields[b"name"].decode())
            return Event(cursor, "stored", namespace, key, note=fields[b"note"])
    except (KeyError, ValueError):
        pass
    return None
