"""Measure `load`: how long answers take where requests arrive at times of their own, whatever the answers take.

An open loop: the times are fixed in advance, drawn or taken from a trace. One thread answers in the order of arrival,
and a request waits until those before it are answered: latency is from arrival to answer. The model alone and the
cache, which begins with what was learned, get the same requests at the same times. `service` takes the other way: there
each request arrives when the one before it is answered, and nobody waits.

The offered load is requests a second over what the model alone answers a second when nobody waits. From 1 on the model
alone falls behind for as long as the stream lasts: its latencies then grow with `n`.
"""

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from experiments.data.streams.arrivals import ARRIVALS
from experiments.measures import service
from experiments.measures.base import Outcome
from experiments.measures.service import CACHE
from experiments.methods import NOCACHE
from experiments.methods.base import is_hit
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.section import ONE_OR_MORE
from llmcache.calibration.risk_target import RiskTarget
from llmcache.errors import ConfigError

Milliseconds = NDArray[np.float64]
PERCENTILES = ("p50", "p95", "p99")


class Load(service.Service):
    """Settings of the measure, beside those of `service`."""

    n: int = Field(default=500, ge=200)  # requests of each way and round: the first that follow those learned from
    loads: Annotated[tuple[PositiveFloat, ...], ONE_OR_MORE] = Field(default=(0.5, 0.8, 0.95, 1.2), min_length=1)
    # How requests arrive: by a Poisson law, or as in the trace of a service.
    arrivals: Annotated[tuple[Literal["poisson", "azure"], ...], ONE_OR_MORE] = Field(
        default=("poisson", "azure"), min_length=1
    )
    rounds: int = Field(default=2, ge=1)  # each with arrivals of its own; who goes first alternates
    threads: Annotated[tuple[int, ...], ONE_OR_MORE] = Field(default=(2,), min_length=1)


@dataclass(frozen=True, slots=True)
class Queue:
    """What became of requests (N,) that arrived at given times; all milliseconds from the first arrival."""

    arrived: Milliseconds
    begun: Milliseconds
    done: Milliseconds

    @property
    def latency_ms(self) -> Milliseconds:
        """From arrival to answer."""
        return self.done - self.arrived

    @property
    def busy(self) -> float:
        """Share of the time until the last answer in which one was being made."""
        return float((self.done - self.begun).sum() / self.done[-1])


def serve_at(
    arrived: Milliseconds,
    answer: Callable[[int], object],
    clock: Callable[[], float] = perf_counter,
    wait: Callable[[float], None] = sleep,
) -> Queue:
    """Answer requests in order, none before it arrived; `clock` and `wait` are of seconds."""
    begun, done = np.zeros(len(arrived)), np.zeros(len(arrived))
    started = clock()
    for i, due in enumerate(arrived / 1e3):
        if (early := started + due - clock()) > 0:
            wait(early)
        begun[i] = clock() - started
        answer(i)
        done[i] = clock() - started
    return Queue(arrived, begun * 1e3, done * 1e3)


def run(experiment: Load, folders: Folders) -> Outcome:
    """Serve the stream at each load, as requests arrive in each way."""
    n = experiment.n
    times = {name: [ARRIVALS[name](n, folders.data, rng) for rng in _rngs(experiment)] for name in experiment.arrivals}
    workload = experiment.stream(folders)
    server = service.Server(workload, experiment.cache, experiment.learn)
    if (left := len(server.stream.requests)) < n:
        raise ConfigError(f"n={n}: {left} requests follow those learned from; ask for fewer, or raise task.limit")
    server.stream.requests = server.stream.requests[:n]
    rows, points = [], []
    for risk_target, threads in itertools.product(experiment.risk_targets, experiment.threads):
        with service.threads_of_torch(threads):
            plain_ms = _time_alone(server)
            for name, load in itertools.product(experiment.arrivals, experiment.loads):
                max_drop = None if risk_target is None else risk_target.max_drop
                at = {"max_drop": max_drop, "threads": threads, "arrivals": name, "load": load, "plain_ms": plain_ms}
                found = _rounds(server, risk_target, [one * plain_ms / load for one in times[name]], at)
                rows += [at | _row(one) for one in found]
                points.append(at | point(found))
    server.cache.unwrap()
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": n,
        "rounds": experiment.rounds,
        "points": points,
        "summary": [{name: value for name, value in one.items() if not isinstance(value, dict)} for one in points],
    }
    return Outcome(rows, metrics)


@dataclass(frozen=True, slots=True)
class Turn:
    """The requests of a round, answered by one of the two."""

    who: str  # `NOCACHE` or `CACHE`
    number: int
    queue: Queue
    served: NDArray[np.str_]  # what served each request (N,)


def point(turns: Sequence[Turn]) -> dict[str, Any]:
    """Figures of a load, over all rounds; gains are latencies of the model alone over those with the cache."""
    plain, cached = ([one for one in turns if one.who == who] for who in (NOCACHE, CACHE))
    before, after = (percentiles(np.concatenate([one.queue.latency_ms for one in some])) for some in (plain, cached))
    return {
        "hit_rate": float(is_hit(np.concatenate([one.served for one in cached])).mean()),
        **{f"gain_{name}": before[name] / after[name] for name in PERCENTILES},
        "plain_busy": float(np.mean([one.queue.busy for one in plain])),
        "cache_busy": float(np.mean([one.queue.busy for one in cached])),
        "plain": before,
        "cache": after,
    }


def percentiles(ms: Milliseconds) -> dict[str, float]:
    """Those of latencies that are told of a service, and the mean."""
    found = np.percentile(ms, [int(name[1:]) for name in PERCENTILES])
    return dict(zip(PERCENTILES, map(float, found), strict=True)) | {"mean": float(ms.mean()), "n": len(ms)}


def _rngs(experiment: Load) -> list[np.random.Generator]:
    return [np.random.default_rng([experiment.seed, number]) for number in range(experiment.rounds)]


def _time_alone(server: service.Server) -> float:
    """Milliseconds that the model alone takes for a request when nobody waits: the mean of a second pass."""
    passes = [server.go(NOCACHE, number, f"The model alone, pass {number + 1} of 2") for number in range(2)]
    return float(passes[-1].ms.mean())


def _rounds(
    server: service.Server, risk_target: RiskTarget | None, times: Sequence[Milliseconds], at: Mapping[str, Any]
) -> list[Turn]:
    """Both answer the requests that arrive at `times`, round by round."""
    turns = []
    what = f"{at['arrivals']} arrivals at a load of {at['load']:g}"
    order = [(number, who) for number in range(len(times)) for who in _order_of(number)]
    for number, who in tracked(order, len(order), what):  # shown between turns: within one, it would delay answers
        if who == CACHE:
            server.begin(risk_target)
        turns.append(_turn(server, who, number, times[number]))
    return turns


def _order_of(number: int) -> tuple[str, str]:
    return (NOCACHE, CACHE) if number % 2 == 0 else (CACHE, NOCACHE)


def _turn(server: service.Server, who: str, number: int, arrived: Milliseconds) -> Turn:
    served: list[str] = []

    def answer(i: int) -> None:
        server.answer(who, i)
        served.append(server.served(who))

    gc.collect()
    with torch.inference_mode():
        queue = serve_at(arrived, answer)
    server.cache.drain()
    return Turn(who, number, queue, np.array(served))


def _row(one: Turn) -> dict[str, Any]:
    return {
        "round": one.number,
        "who": one.who,
        **percentiles(one.queue.latency_ms),
        "busy": one.queue.busy,
        "hit_rate": float(is_hit(one.served).mean()),
    }
