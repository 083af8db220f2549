"""Connections that clients hold open: limits of their number, and of the time and bytes of a request's head."""

import asyncio
import logging
import sys
from time import monotonic
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S: Final = 10.0  # time for a request line and its headers, from the connection's or their own first byte
MAX_HEAD_BYTES: Final = 65_536
_MAX_CONNECTIONS: Final = 8_192
_LOG_EVERY_S: Final = 60.0

logger = logging.getLogger("llmcache.serving.connections")
_logged_at: Final[dict[str, float]] = {}  # by message without its values


def is_due(record: logging.LogRecord) -> bool:
    """Whether a line is logged: errors always, warnings, which strangers can cause, once a minute each."""
    if record.levelno <= logging.WARNING:
        if monotonic() < _logged_at.get(record.msg, -_LOG_EVERY_S) + _LOG_EVERY_S:
            return False
        _logged_at[record.msg] = monotonic()
    return True


logger.addFilter(is_due)


def max_connections() -> int:
    """Return the limit of open connections: three quarters of the process's open files, as stores need files too."""
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, most * 3 // 4)


class Connection(HttpToolsProtocol):
    """Closes itself if its client does not complete a request's head in time.

    At the limit of connections, a new one closes one without a request under way: the oldest that never sent one, else
    the one that is idle for longest, else itself.
    """

    _idle_since = 0.0
    _n_bytes = 0  # received since the last whole head or part of a body
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, transport.abort)
        if len(self.connections) > (most := max_connections()):
            idle = (one for one in self.connections if isinstance(one, Connection) and one._is_idle and one != self)
            victim = min(idle, key=lambda one: (one.cycle is not None, one._idle_since), default=self)
            self.connections.discard(victim)
            victim.transport.abort()
            logger.warning("%d connections are open, as many as may be: idle ones are closed for new ones", most)

    def data_received(self, data: bytes) -> None:
        self._n_bytes += len(data)
        super().data_received(data)
        if self._n_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        elif self._timer is None and self._is_idle:
            self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._n_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
