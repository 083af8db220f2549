"""Measure `serve_soak`: `llmcache serve` under more than it can answer, for minutes.

Traffic of the support desk is mixed: single texts, longer ones, and several in one request. What the server answers a
second when many clients wait for it is its capacity; `load` times that arrives in an open loop. Of every hundredth
answer all texts are held against the model alone: those that no approximate rung served have to be equal, the others
may have another label as often as was allowed. Memory and queue are looked at while it runs.
"""

import math
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Self

import numpy as np
from pydantic import Field

from experiments.data.labelled import Labelled
from experiments.data.streams.arrivals import ARRIVALS
from experiments.data.streams.support_desk import support_desk
from experiments.measures.base import Outcome
from experiments.measures.over_http.answers import Best, best_of
from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.exposition import hits, scrape, total
from experiments.measures.over_http.loops import OK, Load, closed_loop, open_loop, run_loop
from experiments.measures.over_http.made import Made, ServingExperiment, labels_of, made, serving
from experiments.measures.over_http.processes import SERVERS as ALL_SERVERS
from experiments.measures.over_http.processes import Running
from experiments.measures.serve_load import CACHE, N_WARM, PREDICT
from experiments.support.folders import Folders
from llmcache.errors import ConfigError

STREAM = "support_desk"
WAITING = "llmcache_num_requests_waiting"
SERVERS: Mapping[str, str] = {CACHE: f"{ALL_SERVERS[CACHE]} --reveal-hits --max-queue {{max_queue}}"}
KEEP = 100  # of the answers every hundredth is held against the model
EQUAL = 1e-4  # of a probability: rows that are computed with others round otherwise
APPROXIMATE = ("semantic", "paper")  # rungs whose answers may differ

SHARE_LONG, TEXTS_LONG = 0.05, 4  # requests of several texts in one, and how many
SHARE_BATCH, TEXTS_BATCH = 0.1, 8  # requests of several inputs
#: Inputs that are several texts in one.
LONG_INPUTS = SHARE_LONG / (1 + SHARE_BATCH * (TEXTS_BATCH - 1))


class ServeSoak(ServingExperiment):
    """Settings of the measure. The task's data are `support_desk`; traffic is what follows there.

    Attributes:
        seconds: Of the open loop.
        load: Requests a second over what the server can answer.
        capacity_s: Seconds in which capacity is measured.
        at_once: Clients that measure it.
        max_queue_s: Longest wait before a request is refused, seconds; `{max_queue}` in the command.
    """

    seconds: float = Field(default=600.0, gt=0)
    load: float = Field(default=1.2, gt=0)
    capacity_s: float = Field(default=15.0, gt=0)
    at_once: int = Field(default=64, ge=1)
    max_queue_s: float = Field(default=1.0, gt=0)
    servers: dict[str, str] = Field(default_factory=lambda: dict(SERVERS), min_length=1, max_length=1)

    def learned_texts(self, requests: Sequence[Labelled]) -> list[str]:
        """Inputs as they are in the traffic: on others a calibration does not hold."""
        texts, rng = iter([one.text for one in requests]), random.Random(self.seed)
        return [
            " ".join([text, *islice(texts, TEXTS_LONG - 1)]) if rng.random() < LONG_INPUTS else text for text in texts
        ]

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings; see `Section.make`."""
        made = super().make(values, name)
        if made.task.data.path != (STREAM,):
            raise ConfigError(f"task.data.path: this measure needs a stream without an end; give {STREAM}")
        return made


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of one text or several."""

    texts: tuple[str, ...]

    @property
    def request(self) -> bytes:
        """As text-embeddings-inference takes it: a list of texts would be a pair."""
        return post(PREDICT, {"inputs": self.texts[0] if len(self.texts) == 1 else [[text] for text in self.texts]})


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one time."""

    at_s: float
    rss: int
    waiting: float | None  # requests that wait to be computed; None where it does not tell


def run(experiment: ServeSoak, folders: Folders) -> Outcome:
    """Load the server, and look at it."""
    with made(experiment, folders) as found:
        traffic = Traffic(experiment)
        (server,) = experiment.servers
        with serving(experiment, server, found, max_queue=str(experiment.max_queue_s)) as process:
            warm = [post(PREDICT, {"inputs": one.text}) for one in found.known[:N_WARM]]
            run_loop(closed_loop(client := Client(process.port), warm, 1), client)
            capacity = _capacity(experiment, process, traffic)
            rate = experiment.load * capacity
            n = math.ceil(rate * experiment.seconds)
            rng = np.random.default_rng(experiment.seed)
            due_s = ARRIVALS["poisson"](n, folders.data, rng) / rate
            asked = traffic.take(n)
            requests = [one.request for one in asked]
            before, cpu_s = scrape(process.port), process.cpu_s
            with looking(process) as looks:
                load = run_loop(open_loop(client := Client(process.port), requests, due_s, keep=KEEP), client)
            after, cpu_s = scrape(process.port), process.cpu_s - cpu_s
        checked = check(found, load, asked)
    figures = {
        "load": experiment.load,
        "capacity": capacity,
        "rate": rate,
        **load.figures(),
        "accepted": float((load.status == OK).mean()),
        "n_failed": int(((load.status >= 500) | (load.status < 100)).sum()),
        "max_queue_s": experiment.max_queue_s,
        "server_cpu_s": cpu_s,
        **hits(before, after),
        "alarms": total(after, "llmcache_alarms_total"),
        "bypassed": total(after, "llmcache_bypassed_total"),
        **memory(looks, load.wall_s),
        "waiting_max": max((one.waiting for one in looks if one.waiting is not None), default=None),
        **checked,
    }
    metrics = {
        "task": experiment.task.title,
        "model": experiment.task.model,
        "n": n,
        "max_drop": experiment.max_drops[0],
        **figures,
        "points": [figures],
        "summary": [{name: value for name, value in figures.items() if not isinstance(value, dict)}],
    }
    rows = [{"at_s": round(one.at_s, 1), "rss_mb": round(one.rss / 1e6, 2), "waiting": one.waiting} for one in looks]
    return Outcome(rows, metrics)


class Traffic:
    """What the support desk is asked after the requests that head and calibration know, mixed."""

    def __init__(self, experiment: ServeSoak) -> None:
        self._seed, self._taken = experiment.seed, experiment.task.data.limit or 0
        self._rng = random.Random(experiment.seed)

    def take(self, n: int) -> list[Asked]:
        """The next `n` requests."""
        sizes = [self._rng.random() for _ in range(n)]
        most = n * max(TEXTS_LONG, TEXTS_BATCH)
        mean = 1 + SHARE_LONG * (TEXTS_LONG - 1) + SHARE_BATCH * (TEXTS_BATCH - 1)
        texts = iter(self._texts(min(most, math.ceil(1.2 * mean * n) + 1000)))
        return [self._one(size, texts) for size in sizes]

    def _one(self, size: float, texts: Iterator[str]) -> Asked:
        if size < SHARE_LONG:
            return Asked((" ".join(next(texts) for _ in range(TEXTS_LONG)),))
        n = TEXTS_BATCH if size < SHARE_LONG + SHARE_BATCH else 1
        return Asked(tuple(next(texts) for _ in range(n)))

    def _texts(self, n: int) -> list[str]:
        stream = support_desk(self._taken + n, self._seed)[self._taken :]
        self._taken += n
        return [one.text for one in stream]


def _capacity(experiment: ServeSoak, process: Running, traffic: Traffic) -> float:
    """Requests a second that are answered while clients always wait."""
    asked = [one.request for one in traffic.take(math.ceil(2000 * experiment.capacity_s))]
    client = Client(process.port)
    load = run_loop(closed_loop(client, asked, experiment.at_once, seconds=experiment.capacity_s, keep=0), client)
    return int((load.status == OK).sum()) / load.wall_s


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


def check(made: Made, load: Load, asked: Sequence[Asked]) -> dict[str, Any]:
    """What the kept answers are beside the model's own."""
    kept = [(one, asked[i]) for i, one in enumerate(load.replies) if one is not None and one.status == OK]
    texts = list(dict.fromkeys(text for _, some in kept for text in some.texts))
    own = dict(zip(texts, labels_of(made.classifier(), texts), strict=True))
    n = n_approximate = n_unequal = n_changed = 0
    for reply, some in kept:
        is_approximate = any(rung in reply.rung.split(",") for rung in APPROXIMATE)
        for text, best in zip(some.texts, best_of(reply.body), strict=True):
            n += 1
            n_approximate += is_approximate
            n_unequal += not is_approximate and not _is_equal(best, own[text])
            n_changed += best[0] != own[text][0] and not _is_equal(best, own[text])
    return {
        "n_checked": n,
        "n_approximate": n_approximate,
        "n_unequal": n_unequal,  # of answers that no approximate rung served
        "n_changed": n_changed,
        "changed_answers": n_changed / n if n else None,
    }


def _is_equal(one: Best, other: Best) -> bool:
    """The same label; or, where two are as likely, the same probability."""
    return abs(one[1] - other[1]) <= EQUAL
