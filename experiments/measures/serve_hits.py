"""Measure `serve_hits`: what the socket costs: requests that are all repeats, in a closed loop.

The server runs on one core and the generator on another, where there are two. A client at a time tells latency, many at
once how many answers a second one core gives. `GET /health` by the same client is the floor: HTTP without an answer.
Servers without a cache compute each request, and get fewer of them.
"""

import os
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.over_http.client import Client, get, post
from experiments.measures.over_http.exposition import hits, scrape
from experiments.measures.over_http.loops import Load, closed_loop, run_loop
from experiments.measures.over_http.made import ServingExperiment, made, order_of, serving
from experiments.measures.over_http.processes import Running, on_cores
from experiments.measures.serve_load import CACHE, PREDICT
from experiments.support.folders import Folders
from experiments.support.progress import tracked

FLOOR = "/health"


class ServeHits(ServingExperiment):
    """Settings of the measure.

    Attributes:
        different: Texts that are asked again and again.
        n: Requests of each loop to the server with the cache.
        n_computed: Likewise to the others.
        at_once: Clients of the loop that tells throughput.
        rounds: Of all loops, each with servers started anew.
    """

    different: int = Field(default=50, ge=1)
    n: int = Field(default=4000, ge=1)
    n_computed: int = Field(default=400, ge=1)
    at_once: int = Field(default=16, ge=1)
    rounds: int = Field(default=2, ge=1)


def run(experiment: ServeHits, folders: Folders) -> Outcome:
    """Ask every server, in turns."""
    rows: list[dict[str, Any]] = []
    server_cores, own_cores = divided(sorted(os.sched_getaffinity(0)))
    with made(experiment, folders) as found:
        requests = [post(PREDICT, {"inputs": one.text}) for one in found.stream[: experiment.different]]
        turns = [(k, server) for k in range(experiment.rounds) for server in order_of(experiment.servers, k)]
        for number, server in tracked(turns, len(turns), "Servers"):
            with serving(experiment, server, found, server_cores) as process, on_cores(own_cores):
                n = experiment.n if server == CACHE else experiment.n_computed
                at = {"server": server, "round": number}
                rows += [at | row for row in _loops(experiment, process, requests, n)]
    points = [_point(rows, server, what) for server in experiment.servers for what in _names(rows)]
    metrics = {
        "task": experiment.task.title,
        "model": experiment.task.model,
        "n": experiment.n,
        "server_cores": len(server_cores),
        "own_core": server_cores != own_cores,
        "rounds": experiment.rounds,
        "points": points,
        "summary": points,
    }
    return Outcome(rows, metrics)


def divided(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """One core for the server, the others for the generator; the same one where there is no other."""
    return list(cores[:1]), list(cores[1:] or cores)


def _loops(experiment: ServeHits, process: Running, requests: Sequence[bytes], n: int) -> list[dict[str, Any]]:
    asked = [requests[i % len(requests)] for i in range(n)]
    _loop(process, requests * 2, 1)  # from then on all are repeats
    loops = (
        ("floor", [get(FLOOR)] * n, 1),
        ("one client", asked, 1),
        (f"{experiment.at_once} clients", asked, experiment.at_once),
    )
    rows = []
    for what, some, at_once in loops:
        before, cpu_s = scrape(process.port), process.cpu_s
        load = _loop(process, some, at_once)
        told = load.figures()
        rows.append(
            {
                "what": what,
                **{name: told[name] for name in ("n", "n_ok", "p50_ms", "p90_ms", "p99_ms", "throughput")},
                "server_cpu_ms": 1e3 * (process.cpu_s - cpu_s) / n,
                "generator_cpu_ms": 1e3 * load.cpu_s / n,
                **hits(before, scrape(process.port)),
            }
        )
    return rows


def _loop(process: Running, requests: Sequence[bytes], at_once: int) -> Load:
    client = Client(process.port)
    return run_loop(closed_loop(client, requests, at_once), client)


def _names(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["what"] for row in rows))


def _point(rows: Sequence[dict[str, Any]], server: str, what: str) -> dict[str, Any]:
    """The round with the median of the medians, the lower one of two."""
    found = sorted(
        (row for row in rows if (row["server"], row["what"]) == (server, what)), key=lambda row: row["p50_ms"]
    )
    return {name: value for name, value in found[(len(found) - 1) // 2].items() if name != "round"}
