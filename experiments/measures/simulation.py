"""Measure `simulation`: workers by the hundred, from times that were measured here, and a check against real ones.

| design | which requests a worker is asked | what it finds |
|---|---|---|
| `separate` | one of so many, in turn | what it computed itself |
| `routed` | those of conversations or texts that a consistent hash with bounded loads gives it | likewise |
| `shared` | one of so many, in turn | what any computed, through one Redis |

| stream | requests | who can serve whom |
|---|---|---|
| the task | its later ones, by a Poisson law | decisions of the calibrated cache on what each worker knows |
| Mooncake | the trace's, at its times | blocks of its prompts |
| Azure | the trace's lengths, at its times | a model: beginnings as in Mooncake's requests, see `of_azure` |

A block of a trace stands for one of the cache's on the decoder that is timed. As many requests come a second and worker
in all runs, so more workers see the same requests in less time. Redis and its link are queues.
"""

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field

from experiments.data.streams.arrivals import poisson
from experiments.measures.base import Outcome
from experiments.measures.store_workers import StoreWorkers, Way, calibrate, serve_all, shares_of
from experiments.methods.base import is_hit
from experiments.models.architectures import check
from experiments.replay.rehearsal import Rehearsal
from experiments.simulation.clock import measure
from experiments.simulation.cluster import DESIGNS, SEPARATE, Cluster, Site
from experiments.simulation.kinds import BLOCK, blocks, requests
from experiments.simulation.scaling import Limits, stops, with_ratios
from experiments.simulation.streams import Stream, of_azure, of_mooncake
from experiments.simulation.texts import Texts
from experiments.simulation.times import Times
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import check_installed, redis_server
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Workload
from llmcache import ConfigError

_TIMEOUT_MS = 1000.0  # where times are taken: none is to be given up

Count = Annotated[int, Field(ge=1)]


class Simulation(StoreWorkers):
    """Settings of the measure. `workers` are those of the real runs, beside one."""

    simulated: tuple[Count, ...] = Field(default=(1, 2, 4, 8, 16, 32, 64, 128, 256), min_length=1)
    designs: Annotated[tuple[Literal["separate", "routed", "shared"], ...], ONE_OR_MORE] = Field(
        default=DESIGNS, min_length=1
    )
    checked: int = Field(default=1500, ge=1)  # later requests of the real runs
    clocked: int = Field(default=200, ge=8)  # requests of a kind that are timed
    decoder: str = "gpt2"  # an architecture with random weights, or a folder
    prompts: int = Field(default=10, ge=3)  # of a size that are timed on it
    prompt_blocks: Annotated[tuple[Count, ...], ONE_OR_MORE] = Field(
        default=(1, 4, 15, 60), min_length=1
    )  # blocks of these
    requests: int = Field(default=8000, ge=2)  # of a trace
    load: float = Field(default=0.5, gt=0)  # requests a second and worker, of what a worker alone computes
    bound: float = Field(default=1.25, gt=1)  # requests of a routed worker, of the mean of all
    worker_mb: float = Field(default=8000.0, gt=0)
    store_mb: float = Field(default=64000.0, gt=0)
    link_gbit: float = Field(default=10.0, gt=0)  # a second, of the Redis
    timeout_ms: float = Field(default=5.0, gt=0)  # of the store
    limits: Limits = Limits()

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings; see `Section.make`."""
        made = super().make(values, name)
        if made.simulated[0] != 1 or list(made.simulated) != sorted(set(made.simulated)):
            raise ConfigError(
                f"simulated={list(made.simulated)}: begin with 1, which others are held against, and go up"
            )
        return made

    @property
    def site(self) -> Site:
        return Site(
            worker_bytes=1e6 * self.worker_mb,
            store_bytes=1e6 * self.store_mb,
            link_bytes_s=1e9 * self.link_gbit / 8,
            timeout_s=self.timeout_ms / 1e3,
            load=self.load,
            bound=self.bound,
        )


def run(experiment: Simulation, folders: Folders) -> Outcome:
    """Run real workers, take times, and simulate many."""
    check_installed()
    most = max(experiment.prompt_blocks)
    check(experiment.decoder, BLOCK * most, head="token")
    workload, rng = experiment.stream(folders), np.random.default_rng(experiment.seed)
    traces = [of(folders.data, experiment.requests, most, rng) for of in (of_mooncake, of_azure)]
    real = list(serve_all(experiment, _first(workload, experiment.learn + experiment.checked)))
    of_texts, of_blocks = _times(experiment, workload, real[0])
    rehearsal = Rehearsal(workload, experiment.cache)
    claim = experiment.risk_target(min(experiment.max_drops), "growing")
    found = rehearsal.calibrate(rehearsal.calibrated, experiment.learn, claim)
    checks = _checks(experiment, Texts(rehearsal, found, experiment.learn, experiment.checked), of_texts, real)
    texts = Texts(rehearsal, found, experiment.learn)
    streams = [Stream(experiment.task.title, texts, poisson(texts.n, None, rng), [1] * texts.n, of_texts)]
    streams += [Stream(*trace, of_blocks) for trace in traces]
    points = [
        point for stream in streams for design in experiment.designs for point in _points(experiment, stream, design)
    ]
    told = groupby(points, key=lambda point: (point["stream"], point["design"]))
    metrics = {
        **experiment.about(workload),
        "summary": points,
        "check": checks,
        "stops": [row for _, some in told for row in stops([*some], experiment.limits)],
        "times": {"requests": of_texts.figures(), "blocks": of_blocks.figures()},
        "risk_limits": {"real": real[0].limit, "simulated": found.chosen.limit if found.chosen else None},
        "streams": [stream.figures() for stream in streams],
        "threads": torch.get_num_threads(),
    }
    return Outcome(points, metrics)


def _first(workload: Workload, n: int) -> Workload:
    """The first requests of a workload."""
    some = copy(workload)
    some.requests = workload.requests[:n]
    return some


def _times(experiment: Simulation, workload: Workload, one: Way) -> tuple[Times, Times]:
    """Times of requests, whose computing and hits are those of a real worker, and of blocks."""
    with TemporaryDirectory() as place, redis_server(Path(place)) as server:
        store = {
            "store": {"name": "redis", "url": server.url, "timeout_ms": _TIMEOUT_MS},
            "store_least_tokens": 0,
        }
        folder = Path(place) / "calibrated"
        calibrate(experiment, workload, store, folder)
        of_texts = measure(requests(workload, folder, experiment.clocked, experiment.seed), server)
        server.do("FLUSHALL")
        settings = {**store, "auto_bypass": False}
        asked = blocks(experiment.decoder, settings, experiment.prompt_blocks, experiment.prompts, experiment.seed)
        return of_texts.of_calls(one.seconds(is_hit=False), one.seconds(is_hit=True)), measure(asked, server)


def _checks(experiment: Simulation, texts: Texts, times: Times, real: Sequence[Way]) -> list[dict[str, Any]]:
    """Each real run beside the same simulated: its shares, each worker asked one request after the other."""
    rows = []
    for way in real:
        design = way.name if way.name in DESIGNS else SEPARATE
        shares = shares_of(way.name, texts.texts, experiment.learn, way.n_workers)
        numbers = [[number - experiment.learn for number in share] for share in shares]
        rng = np.random.default_rng(experiment.seed)
        made = Cluster(design, way.n_workers, texts, times, experiment.site, rng).serve_closed(numbers)
        hit_rate = float(is_hit(np.array([one.served for one in way.told])).mean())
        ms = np.array([one.ms for one in way.told])
        rows.append(
            {
                "way": way.name,
                "workers": way.n_workers,
                "n": len(ms),
                "real_hit_rate": hit_rate,
                "hit_rate": made["hit_rate"],
                "points": 100 * (made["hit_rate"] - hit_rate),
                "real_p50_ms": float(np.median(ms)),
                "p50_ms": made["p50_ms"],
                "real_mean_ms": float(ms.mean()),
                "mean_ms": made["mean_ms"],
                "real_fetched": way.total("n_fetched"),
                "fetched": made["n_fetched"],
                "real_errors": way.total("n_errors"),
                "late": made["n_late"],
            }
        )
    return rows


def _points(experiment: Simulation, stream: Stream, design: str) -> list[dict[str, Any]]:
    """One design on one stream, by workers."""
    points = []
    for n_workers in tracked(experiment.simulated, len(experiment.simulated), f"Simulating {stream.name}, {design}"):
        rng = np.random.default_rng((experiment.seed, n_workers))
        cluster = Cluster(design, n_workers, stream.knowledge, stream.times, experiment.site, rng)
        figures = cluster.serve_open(stream.arrivals, stream.computes_s)
        about = {"stream": stream.name, "design": design, "workers": n_workers, "n": stream.knowledge.n}
        points.append({**about, **figures})
    return with_ratios(points)
