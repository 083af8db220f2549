"""Servers as separate processes: started on a free port, awaited until ready, and stopped."""

import http.client
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import psutil

import experiments
from experiments.measures.over_http.client import HOST
from llmcache import LLMCacheError

#: Servers to compare, by name. `{python}`, `{model}`, `{save}` (a copy of the calibrated cache's folder) and `{port}`
#: are filled in.
SERVERS: Mapping[str, str] = {
    "cache": "{python} -m llmcache serve --model {model} --save {save} --port {port}",
    "no_cache": "{python} -m llmcache serve --model {model} --no-cache --port {port}",
    "baseline": "{python} -m experiments.baseline_server {model} --port {port}",
}
_STOP_S = 60.0
_TOLD = 2000  # characters of a server's log in an error


class ServerError(LLMCacheError):
    """A server did not start, or exited by itself."""


class Running:
    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.port = port
        self._process = process
        self._log = log
        self._seen = psutil.Process(process.pid)

    @property
    def cpu_s(self) -> float:
        """CPU time that the server and its children have used."""
        return sum(sum(one.cpu_times()[:2]) for one in self._family())

    @property
    def rss(self) -> int:
        return sum(one.memory_info().rss for one in self._family())

    def wait(self, start_s: float) -> None:
        """Wait until `GET /health` returns 200.

        Raises:
            ServerError: The server exited, or was not ready in time; the end of its log is quoted.
        """
        until = monotonic() + start_s
        while not _is_ready(self.port):
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server ended with {code} before it was ready: {self._told()}")
            if monotonic() > until:
                raise ServerError(f"the server was not ready after {start_s:g} s: {self._told()}")
            sleep(0.1)

    def stop(self) -> int:
        """Stop the server, by force if it does not exit in time; return its exit status."""
        self._process.terminate()
        try:
            return self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _family(self) -> list[psutil.Process]:
        return [self._seen, *self._seen.children(recursive=True)]

    def _told(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_TOLD:].strip() or "it logged nothing"


@contextmanager
def running(command: str, values: Mapping[str, str], *, start_s: float = 120.0) -> Iterator[Running]:
    """Start a server and yield it once ready; stop it afterwards."""
    port = free_port()
    words = [word.format(python=sys.executable, port=port, **values) for word in shlex.split(command)]
    here = str(Path(experiments.__file__).parents[1])
    paths = os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH")) if path)
    with TemporaryDirectory() as folder, (log := Path(folder, "log")).open("wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": paths}
        )
        server = Running(process, port, log)
        try:
            server.wait(start_s)
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def _is_ready(port: int) -> bool:
    with (
        closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection,
        suppress(OSError, http.client.HTTPException),
    ):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False
