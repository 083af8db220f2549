"""Measure `serve_soak`: `llmcache serve` under overload, for minutes.

Support desk traffic is mixed: single texts, longer ones, and several texts in one request. Capacity is the number of
requests per second answered while many clients wait; then `load` times the capacity arrives in an open loop. In every
hundredth answer, all texts are compared with the model alone: those not served by an approximate rung must be equal,
the others may have another label as often as `max_drops` allows. Memory and queue are sampled meanwhile.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from experiments.data.labelled import Labelled
from experiments.measures.base import Outcome
from experiments.measures.over_http.client import OK, post
from experiments.measures.over_http.loops import Load, closed_loop, open_loop, poisson
from experiments.measures.over_http.made import Made, ServingExperiment, labels_of, made, serving
from experiments.measures.over_http.servers import SERVERS as ALL_SERVERS
from experiments.measures.over_http.servers import Running, hits, looking, memory, scrape, total
from experiments.measures.over_http.traffic import PREDICT, Asked, Best, Traffic, best_of, mixed
from experiments.measures.serve_load import CACHE, N_WARM
from experiments.support.files import Folders
from llmcache import ConfigError

STREAM = "support_desk"
SERVERS: Mapping[str, str] = {CACHE: f"{ALL_SERVERS[CACHE]} --reveal-hits --max-queue {{max_queue}}"}
KEEP = 100  # every hundredth answer is compared with the model alone
EQUAL = 1e-4  # tolerance of probabilities: rows computed in other batches round differently
APPROXIMATE = ("semantic", "draft", "paper")  # rungs whose answers may differ


class ServeSoak(ServingExperiment):
    """Settings of the measure. The task's data are `support_desk`; the traffic is the stream after them."""

    seconds: float = Field(default=600.0, gt=0)  # duration of the open loop
    load: float = Field(default=1.2, gt=0)  # request rate over the server's capacity
    capacity_s: float = Field(default=15.0, gt=0)  # time to measure capacity
    at_once: int = Field(default=64, ge=1)  # clients to measure capacity with
    # Longest wait before a request is refused, in seconds; `{max_queue}` in the command.
    max_queue_s: float = Field(default=1.0, gt=0)
    servers: dict[str, str] = Field(default_factory=lambda: dict(SERVERS), min_length=1, max_length=1)

    def learned_texts(self, requests: Sequence[Labelled]) -> list[str]:
        """Mix inputs as in the traffic, since a calibration holds only for such inputs."""
        return mixed([one.text for one in requests], self.seed)

    def check(self) -> None:
        super().check()
        if self.task.data.path != (STREAM,):
            raise ConfigError(f"task.data.path: this measure needs a stream without an end; give {STREAM}")


def run(experiment: ServeSoak, folders: Folders) -> Outcome:
    with made(experiment, folders) as found:
        traffic = Traffic(experiment.task.data.limit or 0, experiment.seed)
        (server,) = experiment.servers
        with serving(experiment, server, found, max_queue=str(experiment.max_queue_s)) as process:
            warm = [post(PREDICT, {"inputs": one.text}) for one in found.known[:N_WARM]]
            closed_loop(process.port, warm, 1)
            capacity = _capacity(experiment, process, traffic)
            rate = experiment.load * capacity
            n = math.ceil(rate * experiment.seconds)
            rng = np.random.default_rng(experiment.seed)
            due_s = poisson(n, rng) / rate
            asked = traffic.take(n)
            requests = [one.request for one in asked]
            before, cpu_s = scrape(process.port), process.cpu_s
            with looking(process) as looks:
                load = open_loop(process.port, requests, due_s, keep=KEEP)
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


def _capacity(experiment: ServeSoak, process: Running, traffic: Traffic) -> float:
    """Return the requests per second answered while clients are always waiting."""
    asked = [one.request for one in traffic.take(math.ceil(2000 * experiment.capacity_s))]
    load = closed_loop(process.port, asked, experiment.at_once, seconds=experiment.capacity_s, keep=0)
    return int((load.status == OK).sum()) / load.wall_s


def check(made: Made, load: Load, asked: Sequence[Asked]) -> dict[str, Any]:
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
        "n_unequal": n_unequal,  # among answers that no approximate rung served
        "n_changed": n_changed,
        "changed_answers": n_changed / n if n else None,
    }


def _is_equal(one: Best, other: Best) -> bool:
    """Whether labels are the same; for equally likely labels, whether probabilities are the same."""
    return abs(one[1] - other[1]) <= EQUAL
