"""A server's metrics at `/metrics`, in Prometheus' text format; its memory and queue under load."""

import http.client
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from experiments.measures.over_http.client import HOST
from experiments.measures.over_http.processes import Running

WAITING = "llmcache_num_requests_waiting"
Samples = Mapping[str, float]  # by name and labels, as in the text

_RUNG = re.compile(r'llmcache_requests_total\{.*?rung="(\w+)"')


def scrape(port: int) -> Samples:
    """Return all metrics of a server; empty if it has no such route."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
    return parse(text) if answer.status == 200 else {}


def parse(text: str) -> Samples:
    """Parse every sample; comments are skipped."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(samples: Samples, name: str) -> float | None:
    """Return the sum over all labels of a name; None without samples."""
    found = [value for key, value in samples.items() if key.partition("{")[0] == name]
    return sum(found) if found else None


def rungs(samples: Samples) -> dict[str, float]:
    """Return the number of requests by rung, including `computed`; empty if the server does not report them."""
    found: dict[str, float] = {}
    for key, value in samples.items():
        if rung := _RUNG.match(key):
            found[rung[1]] = found.get(rung[1], 0.0) + value
    return found


def hits(before: Samples, after: Samples) -> dict[str, float | None]:
    """Return the hit rate between two scrapes; None if the server does not report rungs."""
    first, last = rungs(before), rungs(after)
    by_rung = {rung: n - first.get(rung, 0.0) for rung, n in last.items()}
    n = sum(by_rung.values())
    return {"hit_rate": 1 - by_rung.get("computed", 0.0) / n if n else None}


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
