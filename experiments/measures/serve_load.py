"""Measure `serve_load`: requests per second that servers answer in time, in an open loop over HTTP.

`llmcache serve` with a calibrated cache, the same without a cache, and a typical hand-written server get the same
requests at the same times. Goodput is the largest rate that holds the limit: 99 % of all requests answered with 200
within `slo_ms` of their due time; refused and failed requests count as late. It is found by doubling the rate, then
bisecting. Each rate is held for `hold_s` by a newly started server, from the same calibrated cache, and cut short as
soon as the limit is certainly broken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.over_http.client import OK, post
from experiments.measures.over_http.loops import Limit, Load, closed_loop, largest_rate, open_loop, poisson
from experiments.measures.over_http.made import Made, ServingExperiment, labels_of, made, serving
from experiments.measures.over_http.servers import ServerError, hits, scrape
from experiments.measures.over_http.traffic import PREDICT, changed
from experiments.support.files import Folders
from experiments.support.progress import Progress
from llmcache import ConfigError

ARRIVALS = "poisson"
CACHE = "cache"  # the server that others are compared with
N_WARM = 30  # requests before each load, not from the stream
LEAST = 200  # fewest requests of a load


class ServeLoad(ServingExperiment):
    first_rate: float = Field(default=40.0, gt=0)  # requests per second at the start of a search
    # A search ends when the lowest broken rate is at most 1 + precision times the highest held rate.
    precision: float = Field(default=0.05, gt=0)
    slo_ms: float = Field(default=100.0, gt=0)  # longest latency, from when the request was due
    # Seconds that a rate is held; at least `LEAST` requests, at most those of the stream.
    hold_s: float = Field(default=15.0, gt=0)
    rounds: int = Field(default=2, ge=1)  # each with new arrivals; the order of the servers alternates

    @property
    def limit(self) -> Limit:
        return Limit(self.slo_ms)


@dataclass(frozen=True, slots=True)
class Trial:
    at: Mapping[str, Any]  # server, arrivals, round, rate
    figures: Mapping[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        told = {name: value for name, value in self.figures.items() if not isinstance(value, dict)}
        return {**self.at, **told, "statuses": " ".join(f"{k}:{n}" for k, n in self.figures["statuses"].items())}


class Trials:
    def __init__(self, experiment: ServeLoad, made: Made, labels: Sequence[str]) -> None:
        """`labels` are the model's own answers to the stream's requests."""
        self._experiment, self._made, self._labels = experiment, made, labels
        self._requests = [post(PREDICT, {"inputs": request.text}) for request in made.stream]
        self._warm = [post(PREDICT, {"inputs": request.text}) for request in made.known[:N_WARM]]
        self.done: list[Trial] = []
        self._progress = Progress()

    def hold(self, server: str, number: int, rate: float) -> bool:
        """Whether a newly started server holds the rate."""
        experiment = self._experiment
        self._progress.advance(f"{server}, round {number + 1}: {rate:.1f} a second", len(self.done), 0)
        n = min(max(LEAST, math.ceil(rate * experiment.hold_s)), len(self._requests))
        due_s = poisson(n, np.random.default_rng([experiment.seed, number])) / rate
        with serving(experiment, server, self._made) as process:
            closed_loop(process.port, self._warm, 1)
            before, cpu_s = scrape(process.port), process.cpu_s
            load = open_loop(process.port, self._requests[:n], due_s, limit=experiment.limit)
            check_any(server, load)
            figures = {
                "is_held": load.keeps(experiment.limit),
                "kept": load.n_kept(experiment.limit) / n,
                "held_s": float(due_s[-1]),
                **load.figures(),
                "server_cpu_s": process.cpu_s - cpu_s,
                "server_mb": process.rss / 1e6,
                **changed(load, self._labels),
                **hits(before, scrape(process.port)),
            }
        at = {"server": server, "arrivals": ARRIVALS, "round": number, "rate": rate}
        self.done.append(Trial(at, figures))
        return bool(figures["is_held"])


def run(experiment: ServeLoad, folders: Folders) -> Outcome:
    with made(experiment, folders) as found:
        if len(found.stream) < LEAST:
            raise ConfigError(f"task.limit: {len(found.stream)} requests follow those learned from; at least {LEAST}")
        texts = [request.text for request in found.stream]
        labels = [label for label, _ in labels_of(found.classifier(), texts)]
        trials = Trials(experiment, found, labels)
        goodputs: dict[str, list[float]] = {}
        for number in range(experiment.rounds):
            for server in list(experiment.servers)[:: -1 if number % 2 else 1]:
                hold = partial(trials.hold, server, number)
                held = largest_rate(hold, experiment.first_rate, experiment.precision)
                goodputs.setdefault(server, []).append(held)
    points = goodput_points(trials.done, goodputs)
    right = np.mean([one == request.label for one, request in zip(labels, found.stream, strict=True)])
    metrics = {
        "task": experiment.task.title,
        "model": experiment.task.model,
        "n": len(found.stream),
        "learn": experiment.learn,
        "max_drop": experiment.max_drops[0],
        "slo_ms": experiment.slo_ms,
        "hold_s": experiment.hold_s,
        "rounds": experiment.rounds,
        "accuracy_nocache": float(right),
        "points": points,
        "summary": [{k: v for k, v in one.items() if not isinstance(v, dict)} for one in points],
    }
    return Outcome([trial.row for trial in trials.done], metrics)


def check_any(server: str, load: Load) -> None:
    """Raise if no request was answered at all, since no lower rate would help."""
    if not (load.status == OK).any():
        told = next((reply for reply in load.replies if reply is not None), None)
        last = "" if told is None else f"; {told.status}: {told.body[:300].decode(errors='replace')}"
        raise ServerError(f"{server}: none of {len(load.status)} requests was answered with 200{last}")


def goodput_points(done: Sequence[Trial], goodputs: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return one row per server: goodput over rounds, and figures of the largest rate held."""
    points = []
    for server, found in goodputs.items():
        held = [one for one in done if one.at["server"] == server and one.figures["is_held"]]
        figures = max(held, key=lambda one: float(one.at["rate"])).figures
        told = {name: figures.get(name) for name in SHOWN}
        spread = {"goodput": float(np.median(found)), "goodput_min": min(found), "goodput_max": max(found)}
        n = figures["n_ok"] or 1
        cpu = {f"{who}_cpu_ms": 1e3 * figures[f"{who}_cpu_s"] / n for who in ("server", "generator")}  # a request's
        points.append({"server": server, "arrivals": ARRIVALS, **spread, **told, **cpu})
    ours = next((one["goodput"] for one in points if one["server"] == CACHE), None)
    for one in points:
        one["gain"] = ours / one["goodput"] if ours and one["server"] != CACHE else None
    return points


SHOWN = ("p50_ms", "p90_ms", "p99_ms", "kept", "throughput", "hit_rate", "changed_answers", "lag_p99_ms", "statuses")
