"""Measure `set_rates`: whole passes, as in `service`, at given hit rates.

With `learn`, the stream is unchanged and the claim is chosen: of `max_drops`, the one whose calibration serves the
share nearest to the given rate. (If requests were selected by whether they hit, the cache would rightly find them
unlike those of its calibration.) Without `learn`, only repeats are served, and the stream is made with this share of
repeats. The hit rate reported is the measured one.

With free hits and misses at the model's own cost, the speed-up is 1 / (1 - hit rate); `share_of_bound` is the measured
share of it.
"""

import random
from typing import Annotated

from pydantic import Field

from experiments.measures import service
from experiments.measures.base import Outcome
from experiments.support.files import Folders
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Request, Workload
from llmcache import ConfigError
from llmcache.lab import RiskTarget


class SetRates(service.Service):
    hit_rates: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.52, 0.87, 0.92), min_length=1)
    n: int = Field(default=800, ge=200)  # requests per pass

    def check(self) -> None:
        super().check()
        if any(not 0 < rate < 1 for rate in self.hit_rates):
            raise ConfigError(f"hit_rates: give shares above 0 and below 1 (got {list(self.hit_rates)})")


def run(experiment: SetRates, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    server = service.Server(workload, experiment.cache, experiment.learn)
    pool, n = server.stream, experiment.n
    if experiment.learn and len(pool.requests) < n:
        raise ConfigError(f"n={n}: {len(pool.requests)} requests follow those learned from; raise task.limit")
    served = {claim: _share_served(server, claim) for claim in experiment.risk_targets if claim is not None}
    rows, ways = [], []
    for rate in experiment.hit_rates:
        server.stream = pool.of(pool.requests[:n] if experiment.learn else _repeating(pool, rate, n, experiment.seed))
        nearest = min(served, key=lambda claim: abs(served[claim] - rate)) if experiment.learn else None
        for threads in experiment.threads:
            way, more = service.serve(experiment, server, nearest, threads, hit_rate_set=rate)
            ways.append(way)
            rows += more
    server.cache.unwrap()
    return Outcome(rows, service.about(experiment, workload, n, ways))


def _share_served(server: service.Server, risk_target: RiskTarget) -> float:
    """Return the hit rate a calibration expects; 0 if it found no limit."""
    chosen = server.learned(risk_target).chosen
    return 0.0 if chosen is None else chosen.hit_rate


def _repeating(pool: Workload, rate: float, n: int, seed: int) -> list[Request]:
    """Return `n` requests of which a share `rate` are repeats."""
    different = list({request.text: request for request in pool.requests}.values())
    return [different[i] for i in with_repeats(len(different), rate, n, random.Random(seed))]


def with_repeats(n_pool: int, hit_rate: float, n: int, rng: random.Random) -> list[int]:
    """Return `n` request numbers: a share `hit_rate` are uniform repeats, the others the pool's, in its order."""
    n_new = n - round(hit_rate * n)
    if not 1 <= n_new <= n_pool:
        raise ConfigError(f"hit_rates: {hit_rate:g} of {n} takes {n_new} different requests; the stream has {n_pool}")
    is_new = [True] * (n_new - 1) + [False] * (n - n_new)
    rng.shuffle(is_new)
    stream: list[int] = []
    n_seen = 0
    for new in (True, *is_new):
        stream.append(n_seen if new else rng.randrange(n_seen))
        n_seen += new
    return stream
