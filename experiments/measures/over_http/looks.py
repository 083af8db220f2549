"""Memory and queue of a server while it is loaded."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from experiments.measures.over_http.exposition import scrape, total
from experiments.measures.over_http.processes import Running

WAITING = "llmcache_num_requests_waiting"


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one time."""

    at_s: float
    rss: int
    waiting: float | None  # requests that wait to be computed; None where it does not tell


@contextmanager
def looking(process: Running, every_s: float = 1.0) -> Iterator[list[Look]]:
    """Within: the server is looked at every so often."""
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
    """Resident memory after a third of the time, when it is warm, and in the last tenth: medians, MB."""
    parts = {"rss_warm_mb": (0.3, 0.4), "rss_end_mb": (0.9, 1.01)}
    found = {name: [one.rss for one in looks if a <= one.at_s / seconds < b] for name, (a, b) in parts.items()}
    return {name: float(np.median(some)) / 1e6 if some else None for name, some in found.items()}
