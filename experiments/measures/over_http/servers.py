"""Servers as separate processes: started on a free port, awaited until ready, watched by their metrics, and stopped."""

import http.client
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, sleep

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

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
        while not is_ready(self.port):
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
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


def is_ready(port: int) -> bool:
    with (
        closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection,
        suppress(OSError, http.client.HTTPException),
    ):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


REQUESTS, WAITING = "llmcache_requests_total", "llmcache_num_requests_waiting"
Samples = Sequence[Sample]


def scrape(port: int) -> Samples:
    """Return all metrics of a server; empty if it has no such route."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
    return parse(text) if answer.status == 200 else ()


def parse(text: str) -> Samples:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(samples: Samples, name: str, **labels: str) -> float | None:
    """Return the sum of the samples with a name and these labels; None without any."""
    found = [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]
    return sum(found) if found else None


def hits(before: Samples, after: Samples) -> dict[str, float | None]:
    """Return the hit rate between two scrapes; None if the server does not report rungs."""
    n, n_computed = (
        (total(after, REQUESTS, **rung) or 0) - (total(before, REQUESTS, **rung) or 0)
        for rung in ({}, {"rung": "computed"})
    )
    return {"hit_rate": 1 - n_computed / n if n else None}


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float
    rss: int
    waiting: float | None  # requests waiting to be computed; None if not reported


@contextmanager
def looking(process: Running, every_s: float = 1.0) -> Iterator[list[Look]]:
    """Sample the server every `every_s` seconds within the context; yields the growing list."""
    looks: list[Look] = []
    is_over, started = threading.Event(), perf_counter()

    def look() -> None:
        while not is_over.wait(every_s):
            waiting = total(scrape(process.port), WAITING)
            looks.append(Look(perf_counter() - started, process.rss, waiting))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def memory(looks: Sequence[Look], seconds: float) -> dict[str, float | None]:
    """Return the median resident memory, MB, after a third of the time (warm) and in the last tenth."""
    parts = {"rss_warm_mb": (0.3, 0.4), "rss_end_mb": (0.9, 1.01)}
    found = {name: [one.rss for one in looks if a <= one.at_s / seconds < b] for name, (a, b) in parts.items()}
    return {name: float(np.median(some)) / 1e6 if some else None for name, some in found.items()}
