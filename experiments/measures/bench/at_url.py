"""A server that runs already, loaded in an open loop with texts of a stream; it is nobody's to start or stop.

Texts go on where the load before ended, and begin anew at their end: from then on they are repeats.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from experiments.data.labelled import Data, read_requests
from experiments.data.streams.arrivals import ARRIVALS
from experiments.measures.over_http.capacity import largest_rate
from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.loops import Limit, open_loop, run_loop
from experiments.measures.serve_load import PREDICT
from experiments.support.folders import Folders
from llmcache import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked, and how. Without `rates` the largest one that is held is searched."""

    url: str
    route: str = PREDICT  # of text-embeddings-inference: takes `{"inputs": text}`
    stream: str = "banking77"
    arrivals: str = "poisson"
    rates: Sequence[float] = ()
    first_rate: float = 40.0
    precision: float = 0.05
    slo_ms: float = 100.0
    hold_s: float = 15.0
    seed: int = 0


def measure(settings: Settings, folders: Folders, key: str | None = None) -> dict[str, Any]:
    """Figures of every rate; `goodput` is None where none was searched."""
    where = urlsplit(settings.url)
    if where.scheme != "http" or where.hostname is None or where.path.strip("/"):
        raise ConfigError(f"url: give http://HOST:PORT (got {settings.url!r})")
    if settings.arrivals not in ARRIVALS:
        raise ConfigError(f"arrivals: {settings.arrivals!r} is not known; known: {', '.join(ARRIVALS)}")
    host, port = where.hostname, where.port or 80
    data = read_requests(Data.make({"path": settings.stream, "order": "shuffled"}, "data"), folders.data, settings.seed)
    texts = itertools.cycle([request.text for request in data])
    limit, loads = Limit(settings.slo_ms), []

    def hold(rate: float) -> bool:
        n = max(2, math.ceil(rate * settings.hold_s))
        due_s = ARRIVALS[settings.arrivals](n, folders.data, np.random.default_rng(settings.seed)) / rate
        requests = [post(settings.route, {"inputs": next(texts)}, key) for _ in range(n)]
        client = Client(port, host)
        load = run_loop(open_loop(client, requests, due_s, limit=None if settings.rates else limit, keep=0), client)
        told = {"rate": rate, "is_held": load.keeps(limit), "kept": load.n_kept(limit) / n, **load.figures()}
        loads.append(told)
        return bool(told["is_held"])

    if settings.rates:
        for rate in settings.rates:
            hold(rate)
        return {"goodput": None, "loads": loads}
    return {"goodput": largest_rate(hold, settings.first_rate, settings.precision).held, "loads": loads}
