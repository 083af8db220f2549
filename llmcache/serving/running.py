"""Runs an application under uvicorn until it is told to stop, and then exits with 0."""

import asyncio
import ipaddress
import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from llmcache.serving.app import create_app
from llmcache.serving.server import Server

logger = logging.getLogger("llmcache.serving")

_KEEP_ALIVE_S = 30
_LAST_S = 2  # in which those that were refused at the end of the grace may read why


class Uvicorn(uvicorn.Server):
    """Stops at SIGTERM and SIGINT without raising them again: a stop that was asked for is no failure."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        """Prepare to listen; port 0 takes a free one."""
        if server.settings.keys is None and not _is_own(host):
            logger.warning(
                "it listens on %s without keys: whoever reaches it may ask, and purge, disable and drain below /admin; "
                "give --keys FILE (llmcache keys add)",
                host,
            )
        super().__init__(
            uvicorn.Config(
                create_app(server),
                host=host,
                port=port,
                loop="asyncio",  # not another one because something else brought it
                log_level="warning",
                access_log=False,  # it would tell who asked what, and take a part of each request
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(server.settings.grace_s) + _LAST_S,
                server_header=False,
            )
        )
        self._server = server

    async def startup(self, sockets: Any = None) -> None:
        """Warm up, listen, and say where."""
        await super().startup(sockets)
        for listening in self.servers:
            for socket in listening.sockets:
                host, port = socket.getsockname()[:2]
                logger.info("%s is served on http://%s:%d", self._server.name, host, port)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have signals handled, where that is possible."""
        try:
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        except ValueError:  # not in the main thread
            pass
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests, finish what runs; a second Ctrl-C does not wait for that."""
        self._server.phase = "stopping"
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        """Wait for what runs, for as long as there is grace; then stop the server."""
        self._server.refuse_waiting()
        loop, grace_s = asyncio.get_running_loop(), self._server.settings.grace_s
        cut = loop.call_later(grace_s, self._server.refuse_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def _is_own(host: str) -> bool:
    """Whether only this machine reaches an address; of a name that it has, nothing is known."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
