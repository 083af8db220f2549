"""Connections that are closed when the head of a request does not come, and that answer a client that sends no more.

uvicorn alone waits for a head for ever, and takes a client that has closed its half of a connection for gone.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_FIRST_PROBE_S = 0.05  # after it each comes twice as late as the one before


class Connection(H11Protocol):
    """A connection of uvicorn, `Config(http=Connection)`. How long a body may take, `Limits` says."""

    #: Longest time in which the head of a request must have come, from its first byte or from the connection, seconds.
    head_timeout_s = 10.0

    _waiting: asyncio.TimerHandle | None = None
    _probing: asyncio.TimerHandle | None = None
    _has_ended = False  # no more will come of the client

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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a whole request waits for its answer: its client may still read.

        One that ends its half once the answer has begun is taken to have gone, which ends a stream at once.
        """
        if not self._has_ended and self._is_waited_for and self.scheme == "http":
            self._has_ended = self.scope["http_version"] != "1.0"
            self._probe(_FIRST_PROBE_S)
        return self._has_ended

    def on_response_complete(self) -> None:
        """Close the connection once all is answered that came before its end."""
        super().on_response_complete()
        if self._has_ended and self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    @property
    def _is_waited_for(self) -> bool:
        """Whether a request has come as a whole, and its answer has not begun."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_started

    def _probe(self, pause_s: float) -> None:
        """Find out whether a client reads that sends no more.

        One that has gone ends its half just so. What is sent to it then comes back as an error, and that closes the
        connection. Before an answer this is `100 Continue`, which every client of HTTP/1.1 passes over; older ones do
        not know it, and are taken to have gone. Once the answer has begun, its next part does the same.
        """
        if not self._has_ended or not self._is_waited_for or self.transport.is_closing():
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        self._probing = self.loop.call_later(pause_s, self._probe, 2 * pause_s)

    def _wait_for_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_timeout_s, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
