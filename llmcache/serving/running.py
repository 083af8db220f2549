"""Runs the server under uvicorn until SIGTERM or SIGINT, then exits with 0."""

import asyncio
import ipaddress
import logging
import math
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from llmcache.errors import ConfigError
from llmcache.serving import connections
from llmcache.serving.app import create_app
from llmcache.serving.server import Server

logger = logging.getLogger("llmcache.serving")

_KEEP_ALIVE_S = 30
_BACKLOG = 2048  # connections that the kernel holds
_ACCEPTED_AT_ONCE = 16  # each takes a file before the limit of connections is seen
_REFUSAL_S = 2  # time to send refusals to requests cut off at the end of the grace period


class Uvicorn(uvicorn.Server):
    """Stops at SIGTERM and SIGINT without raising them again: a requested stop is not a failure."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        """Prepare to listen; port 0 means any free port."""
        if server.settings.keys is None and not _is_loopback(host):
            logger.warning(
                "the server listens on %s without keys: anyone who reaches it may send requests, and purge, disable "
                "and drain below /admin; give --keys FILE (llmcache keys add)",
                host,
            )
        super().__init__(
            uvicorn.Config(
                create_app(server),
                host=host,
                port=port,
                loop="asyncio",  # not uvloop just because it happens to be installed
                http=connections.Connection,
                ws="none",
                backlog=_ACCEPTED_AT_ONCE,
                log_level="warning",
                access_log=False,  # it would log who requested what, and slow each request
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(server.settings.grace_s) + _REFUSAL_S,
                server_header=False,
            )
        )
        self._server = server
        logging.getLogger("uvicorn.error").addFilter(connections.is_due)

    async def startup(self, sockets: Any = None) -> None:
        """Warm up, listen, and log the address."""
        asyncio.get_running_loop().set_exception_handler(_log_error)
        await super().startup(sockets)
        for listening in self.servers:
            for one in listening.sockets:
                with one.dup() as same:
                    same.listen(_BACKLOG)  # asyncio has one number for both
                host, port = one.getsockname()[:2]
                logger.info("%s is served on http://%s:%d", self._server.name, host, port)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the signal handlers, which only the main thread can do."""
        with suppress(ValueError):  # not in the main thread
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests and finish running ones; a second Ctrl-C exits without waiting."""
        self._server.phase = "stopping"
        n_running, name = self._server.metrics.n_under_way, signal.Signals(sig).name
        logger.info("%s: new requests are refused, %d under way are finished", name, n_running)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        """Wait up to `grace_s` for running requests, then stop the server."""
        self._server.refuse_waiting()
        loop, grace_s = asyncio.get_running_loop(), self._server.settings.grace_s
        cut = loop.call_later(grace_s, self._server.refuse_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
        logger.info("stopped")


def check_address(host: str, port: int) -> None:
    """Raise `ConfigError` if no server can listen at this address, for instance because another one does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in found[:1]:  # the rest may be of a family that this machine lacks
            with socket.create_server(address, family=family):
                pass
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: no server can listen there ({error.strerror}); if the port is taken, stop "
            "what holds it, or give another --port (0: any free one)"
        ) from error


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop; those of `accept`, of which it makes thousands a second, once a minute."""
    if context["message"].startswith("socket.accept()"):
        connections.logger.warning("no connection can be accepted: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


def _is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only. Names other than localhost are not resolved: False."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
