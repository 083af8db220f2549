"""Measure `serve_load`: requests per second that servers answer in time, in an open loop over HTTP.

`llmcache serve` with a calibrated cache, the same without a cache, and a typical hand-written server get the same
requests at the same times. Goodput is the largest rate that holds the limit: 99 % of all requests answered with 200
within `slo_ms` of their due time; refused and failed requests count as late. It is found by doubling the rate, then
bisecting. Each rate is held for `hold_s` by a newly started server, from the same calibrated cache, and cut short as
soon as the limit is certainly broken.

With `rates`, these rates are held to the end instead of a search.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from experiments.data.traces import ARRIVALS
from experiments.measures.base import Outcome
from experiments.measures.over_http.client import OK, post
from experiments.measures.over_http.loops import Limit, Load, Times, closed_loop, largest_rate, open_loop
from experiments.measures.over_http.made import Made, ServingExperiment, labels_of, made, order_of, serving
from experiments.measures.over_http.servers import ServerError, hits, scrape
from experiments.measures.over_http.traffic import PREDICT, changed
from experiments.support.files import Folders
from experiments.support.progress import Progress
from experiments.support.section import ONE_OR_MORE
from llmcache import ConfigError

CACHE = "cache"  # the server that others are compared with
N_WARM = 30  # requests before each load, not from the stream
LEAST = 200  # fewest requests of a load


class ServeLoad(ServingExperiment):
    # Arrivals of requests: evenly spaced, Poisson, or from the trace of a service.
    arrivals: Annotated[tuple[Literal["fixed", "poisson", "azure", "mooncake"], ...], ONE_OR_MORE] = Field(
        default=("poisson",), min_length=1
    )
    rates: Annotated[tuple[PositiveFloat, ...], ONE_OR_MORE] = ()  # requests per second; empty: goodput is searched
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
    """One rate at one server, and whether the server held it."""

    at: Mapping[str, Any]  # server, arrivals, round, rate
    load: Load
    figures: Mapping[str, Any]

    @property
    def row(self) -> dict[str, Any]:
        told = {name: value for name, value in self.figures.items() if not isinstance(value, dict)}
        return {**self.at, **told, "statuses": " ".join(f"{k}:{n}" for k, n in self.figures["statuses"].items())}


class Trials:
    def __init__(self, experiment: ServeLoad, folders: Folders, made: Made, labels: Sequence[str]) -> None:
        """`labels` are the model's own answers to the stream's requests."""
        self._experiment, self._folders, self._made, self._labels = experiment, folders, made, labels
        self._requests = [post(PREDICT, {"inputs": request.text}) for request in made.stream]
        self._warm = [post(PREDICT, {"inputs": request.text}) for request in made.known[:N_WARM]]
        self.done: list[Trial] = []
        self._progress = Progress()

    def hold(self, server: str, arrivals: str, number: int, rate: float) -> bool:
        """Whether a newly started server holds the rate; see `Trial`."""
        experiment = self._experiment
        at = {"server": server, "arrivals": arrivals, "round": number, "rate": rate}
        self._progress.advance(f"{server}, {arrivals}, round {number + 1}: {rate:.1f} a second", len(self.done), 0)
        due_s = self._due_s(arrivals, number, rate)
        limit = None if experiment.rates else experiment.limit
        with serving(experiment, server, self._made) as process:
            closed_loop(process.port, self._warm, 1)
            before, cpu_s = scrape(process.port), process.cpu_s
            load = open_loop(process.port, self._requests[: len(due_s)], due_s, limit=limit)
            check_any(server, load)
            figures = {
                "is_held": load.keeps(experiment.limit),
                "kept": load.n_kept(experiment.limit) / len(due_s),
                "held_s": float(due_s[-1]),
                **load.figures(),
                "server_cpu_s": process.cpu_s - cpu_s,
                "server_mb": process.rss / 1e6,
                **changed(load, self._labels),
                **hits(before, scrape(process.port)),
            }
        self.done.append(Trial(at, load, figures))
        return bool(figures["is_held"])

    def _due_s(self, arrivals: str, number: int, rate: float) -> Times:
        n = min(max(LEAST, math.ceil(rate * self._experiment.hold_s)), len(self._requests))
        rng = np.random.default_rng([self._experiment.seed, number])
        return ARRIVALS[arrivals](n, self._folders.data, rng) / rate


def run(experiment: ServeLoad, folders: Folders) -> Outcome:
    with made(experiment, folders) as found:
        if len(found.stream) < LEAST:
            raise ConfigError(f"task.limit: {len(found.stream)} requests follow those learned from; at least {LEAST}")
        texts = [request.text for request in found.stream]
        labels = [label for label, _ in labels_of(found.classifier(), texts)]
        trials = Trials(experiment, folders, found, labels)
        goodputs: dict[tuple[str, str], list[float]] = {}
        for arrivals in experiment.arrivals:
            for number in range(experiment.rounds):
                for server in order_of(experiment.servers, number):
                    hold = partial(trials.hold, server, arrivals, number)
                    if experiment.rates:
                        for rate in experiment.rates:
                            hold(rate)
                    else:
                        held = largest_rate(hold, experiment.first_rate, experiment.precision)
                        goodputs.setdefault((arrivals, server), []).append(held)
    points = goodput_points(trials.done, goodputs) if goodputs else rate_points(trials.done)
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


def goodput_points(done: Sequence[Trial], goodputs: Mapping[tuple[str, str], Sequence[float]]) -> list[dict[str, Any]]:
    """Return one row per server and arrival process: goodput over rounds, and figures of the largest rate held."""
    points = []
    for (arrivals, server), found in goodputs.items():
        held = [one for one in done if (one.at["arrivals"], one.at["server"]) == (arrivals, server)]
        last = max((one for one in held if one.figures["is_held"]), key=lambda one: float(one.at["rate"]))
        told = {name: last.figures.get(name) for name in SHOWN}
        spread = {"goodput": float(np.median(found)), "goodput_min": min(found), "goodput_max": max(found)}
        points.append({"server": server, "arrivals": arrivals, **spread, **told, **_cpu(last)})
    ours = {one["arrivals"]: one["goodput"] for one in points if one["server"] == CACHE}
    for one in points:
        one["gain"] = ours[one["arrivals"]] / one["goodput"] if ours and one["server"] != CACHE else None
    return points


def rate_points(done: Sequence[Trial]) -> list[dict[str, Any]]:
    return [{**one.at, **{name: one.figures.get(name) for name in ("is_held", *SHOWN)}, **_cpu(one)} for one in done]


SHOWN = ("p50_ms", "p90_ms", "p99_ms", "kept", "throughput", "hit_rate", "changed_answers", "lag_p99_ms", "statuses")


def _cpu(one: Trial) -> dict[str, float]:
    """Return the CPU time per request, of the server and of the load generator."""
    n = one.figures["n_ok"] or 1
    return {f"{who}_cpu_ms": 1e3 * one.figures[f"{who}_cpu_s"] / n for who in ("server", "generator")}
