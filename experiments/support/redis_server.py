"""A private Redis server on a free port, and faults to inject into it."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmcache import ConfigError

_PATIENCE_S = 30.0


class RedisServer:
    """A server that can be killed, and restarted on the same port."""

    def __init__(self, folder: Path, *options: str) -> None:
        """Set up without starting; `options` are appended to the command line."""
        self._folder = folder
        self._options = options
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        base = ["redis-server", "--port", f"{self.port}", "--bind", "127.0.0.1", "--dir", str(self._folder)]
        self._process = subprocess.Popen([*base, "--save", "", *self._options], stdout=subprocess.DEVNULL)
        wait_until(self._is_there)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(_PATIENCE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process within the context; it answers nothing. Connections stay; the kernel accepts new ones."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    @contextmanager
    def disk_full(self) -> Iterator[None]:
        """Make saving fail within the context, so the server refuses writes."""
        assert self._process is not None
        self.do("CONFIG", "SET", "save", "1000000 1000000")  # a failed save only blocks writes if saving is configured
        soft, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            self._save("err")
            yield
        finally:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (soft, hard))
            self._save("ok")
            self.do("CONFIG", "SET", "save", "")

    def do(self, *command: str | bytes | int) -> Any:
        """Run a command and return the reply; values are bytes."""
        from redis import Redis

        with closing(Redis(port=self.port, protocol=2)) as client:
            return client.execute_command(*command)

    def names(self, pattern: str = "*") -> list[str]:
        return sorted(name.decode() for name in self.do("KEYS", pattern))

    def reset_connections(self) -> None:
        """Close the open connections of all clients."""
        self.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _save(self, status: str) -> None:
        """Save in the background, and wait for this status."""
        self.do("BGSAVE", "SCHEDULE")
        wait_until(lambda: self.do("INFO", "persistence")["rdb_last_bgsave_status"] == status)

    def _is_there(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """Run a server within the context; it keeps its files in `folder`.

    Raises:
        ConfigError: Redis is not installed; the error says how to get it.
    """
    check_installed()
    server = RedisServer(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def check_installed() -> None:
    """Raise `ConfigError` if the server or its Python client is missing."""
    if shutil.which("redis-server") is None:
        raise ConfigError("redis-server is not installed: apt-get install redis-server")
    if find_spec("redis") is None:
        raise ConfigError("redis-py is not installed: pip install 'llmcache-torch[redis]'")


def wait_until(holds: Any) -> None:
    """Wait until `holds()` is true; raise `TimeoutError` after half a minute."""
    end = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() >= end:
            raise TimeoutError(f"{holds} never came true")
        time.sleep(0.005)
