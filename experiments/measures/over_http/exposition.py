"""What a server tells of itself at `/metrics`, in Prometheus' text format."""

import http.client
import re
from collections.abc import Mapping
from contextlib import closing

from experiments.measures.over_http.client import HOST

Samples = Mapping[str, float]  # by name and labels, as they stand there

_RUNG = re.compile(r'llmcache_requests_total\{.*?rung="(\w+)"')


def scrape(port: int) -> Samples:
    """All that a server tells; nothing where it has no such route."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
    return parse(text) if answer.status == 200 else {}


def parse(text: str) -> Samples:
    """Every sample; comments are left out."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(samples: Samples, name: str) -> float | None:
    """The sum over all labels of one name; None where there is none."""
    found = [value for key, value in samples.items() if key.partition("{")[0] == name]
    return sum(found) if found else None


def rungs(samples: Samples) -> dict[str, float]:
    """Requests by the rung that served them, `computed` among them; empty where the server tells of none."""
    found: dict[str, float] = {}
    for key, value in samples.items():
        if rung := _RUNG.match(key):
            found[rung[1]] = found.get(rung[1], 0.0) + value
    return found


def hits(before: Samples, after: Samples) -> dict[str, float | None]:
    """Share of requests between two looks that something stored served; None where the server tells of none."""
    first, last = rungs(before), rungs(after)
    by_rung = {rung: n - first.get(rung, 0.0) for rung, n in last.items()}
    n = sum(by_rung.values())
    return {"hit_rate": 1 - by_rung.get("computed", 0.0) / n if n else None}
