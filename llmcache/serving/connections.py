"""Connections that are closed when the head of a request does not come: uvicorn alone waits for it for ever."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection of uvicorn, `Config(http=Connection)`. How long a body may take, `Limits` says."""

    #: Longest time in which the head of a request must have come, from its first byte or from the connection, seconds.
    head_timeout_s = 10.0

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Wait on, if that was not all of a head. Between requests uvicorn's own timeout holds."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_timeout_s, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
