"""Measures `service` and `set_rates`: whole passes over a stream, as in a service.

    learning     the first `learn` requests are computed and calibrated on, outside the passes. Calibration is repeated
                 before each pass with the cache, so each pass starts from the same state. 0: starts empty
    even rounds  the model alone, the cache, the model alone
    odd rounds   the cache, the model alone, the cache

Requests of a pass run back to back; audit and storing use the defaults. A pass is timed until the audit queue is
empty. Everything is measured for each number of torch threads.

`set_rates` takes hit rates that are given. With `learn`, the stream is unchanged and the claim is chosen: of
`max_drops`, the one whose calibration serves the share nearest to the rate. (If requests were selected by whether they
hit, the cache would rightly find them unlike those of its calibration.) Without `learn`, only repeats are served, and
the stream is made with this share of repeats. The hit rate reported is the measured one.

Sizes: N served requests.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.harness import Pass, Way, asking, by_round, calls_of, on_threads, speedup
from experiments.measures.learning import LearningExperiment
from experiments.methods import NOCACHE
from experiments.methods.base import BYPASSED, COMPUTED, is_hit, twin
from experiments.methods.cached import configure
from experiments.metrics.metrics import figures_of, percentiles
from experiments.replay.rehearsal import empty
from experiments.support.files import Folders
from experiments.support.section import ONE_OR_MORE
from experiments.tasks.workload import Request, Workload
from llmcache import Calibration, ConfigError, LLMCache
from llmcache.lab import Observation, RiskTarget

CACHE = "llmcache"
AS_BY_DEFAULT = {"auto_bypass": True}  # other experiments turn it off


class Service(LearningExperiment):
    """Settings of the measure. `cache.sources` sets the sources of the calibration."""

    learn: int = Field(default=2500, ge=0)  # as in other measures; 0: no calibration, only exact repeats are served
    max_drops: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.01,), min_length=1)
    rounds: int = Field(default=2, ge=1)  # three passes each
    # Numbers of torch threads.
    threads: Annotated[tuple[int, ...], ONE_OR_MORE] = Field(default=(2, 1), min_length=1)

    @property
    def risk_targets(self) -> list[RiskTarget | None]:
        """One risk target for each loss; [None] without learning."""
        if not self.learn:
            return [None]
        return [self.risk_target(max_drop, self.config.sources) for max_drop in self.max_drops]


class Server:
    """The model alone and a copy with the cache; both answer the later requests in whole passes."""

    def __init__(self, workload: Workload, options: Mapping[str, Any], learn: int) -> None:
        """Copy the model twice and compute the requests to learn from. Each request has one row."""
        self.stream = workload.after(learn)  # requests to answer
        self._plain = twin(workload.module)
        by_default = {} if "tau" in options else AS_BY_DEFAULT
        config = configure(workload, {**by_default, **options}, audits_in_background=True)
        self.cache = LLMCache.wrap(twin(workload.module), config=config, tokenizer=workload.tokenizer)
        first = [request.inputs for request in workload.requests[:learn]]
        self._observed: list[Observation] = self.cache.observe(first) if first else []

    def begin(self, risk_target: RiskTarget | None) -> None:
        empty(self.cache, self._observed)
        if risk_target is not None:
            self.learned(risk_target)

    def learned(self, risk_target: RiskTarget) -> Calibration:
        assert self.cache.calibrated is not None
        return self.cache.calibrated.calibrate(self._observed, risk_target)

    def go(self, who: str, number: int, what: str) -> Pass:
        """Answer all requests of the stream in order, back to back, with the cache or by the model alone."""
        is_cached = who == CACHE
        ask = asking(self.stream, self.cache.model if is_cached else self._plain)
        return Way(who, ask, self.cache if is_cached else None).go(calls_of(self.stream), number, what)


def run(experiment: Service, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    server = Server(workload, experiment.cache, experiment.learn)
    rows, ways = [], []
    for risk_target in experiment.risk_targets:
        for threads in experiment.threads:
            way, more = serve(experiment, server, risk_target, threads)
            ways.append(way)
            rows += more
    server.cache.unwrap()
    n_counted = len(workload.requests) - experiment.learn
    return Outcome(rows, about(experiment, workload, n_counted, ways))


def serve(
    experiment: Service, server: Server, risk_target: RiskTarget | None, threads: int, **more: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run all rounds and return their figures and one row per pass; `more` is added to both."""
    at = {"max_drop": None if risk_target is None else risk_target.max_drop, "threads": threads, **more}
    with on_threads(threads):
        passes, told = _passes(experiment, server, risk_target, ", ".join(f"{name} {at[name]}" for name in at))
    return at | figures(experiment, server.stream, passes) | told, [at | _row(one) for one in passes]


def about(experiment: Service, workload: Workload, n_counted: int, ways: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics of a run from the figures of its settings, each measured over `n_counted` requests."""
    return {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_counted": n_counted,
        "mean_tokens": float(np.mean([request.inputs["input_ids"].shape[-1] for request in workload.requests])),
        "rounds": experiment.rounds,
        "ways": ways,
        "summary": [_shown(way) for way in ways],
    }


def order_of_passes(number: int) -> tuple[str, str, str]:
    return (NOCACHE, CACHE, NOCACHE) if number % 2 == 0 else (CACHE, NOCACHE, CACHE)


def figures(experiment: Service, stream: Workload, passes: Sequence[Pass]) -> dict[str, Any]:
    """Return the speed over all rounds, times by kind of request, and the answer quality of the first cached pass."""
    plain, cached = ([one for one in passes if one.who == who] for who in (NOCACHE, CACHE))
    ms, served = (np.concatenate([getattr(one, name) for one in cached]) for name in ("ms", "served"))
    first = cached[0]
    quality = figures_of(stream, plain[0].answers, first.answers, first.served, experiment.seed)
    ratios = speedup(by_round(plain), by_round(cached))
    return {
        **ratios,
        "share_of_bound": share_of_bound(ratios["speedup"], quality["hit_rate"]),
        "plain_ms": _times(np.concatenate([one.ms for one in plain])),
        "hit_ms": _times(ms[is_hit(served)]),
        "miss_ms": _times(ms[served == COMPUTED]),
        "bypassed_ms": _times(ms[served == BYPASSED]),
        "bypassed": float((first.served == BYPASSED).mean()),
        **quality,
    }


def share_of_bound(ratio: float, hit_rate: float) -> float | None:
    """Return speed-up / (1 / (1 - hit rate)); the bound assumes free hits and no miss overhead. None if all hit."""
    return None if hit_rate == 1 else ratio * (1 - hit_rate)


def _passes(
    experiment: Service, server: Server, risk_target: RiskTarget | None, what: str
) -> tuple[list[Pass], dict[str, Any]]:
    """Run all passes of all rounds; also return the cache's own figures after its last pass."""
    passes: list[Pass] = []
    told: dict[str, Any] = {}
    for number in range(experiment.rounds):
        for who in order_of_passes(number):
            if who == CACHE:
                server.begin(risk_target)
            passes.append(server.go(who, number, f"{what}: round {number + 1} of {experiment.rounds}, {who}"))
            if who == CACHE:
                told = _told(server.cache)
    return passes, told


def _told(cache: LLMCache) -> dict[str, Any]:
    stats, made = cache.stats().to_dict(), cache.calibration
    return {
        "audit": stats["audit"],
        "calibration_s": None if made is None else round(made.seconds, 3),
        "limit": None if made is None else made.limit,
        "is_certified": None if made is None else made.is_certified,
    }


def _times(ms: NDArray[np.float64]) -> dict[str, Any] | None:
    known = percentiles(ms)
    return None if known is None else known | {"mean": float(ms.mean())}


def _row(one: Pass) -> dict[str, Any]:
    shares = {name: float((one.served == name).mean()) for name in (COMPUTED, BYPASSED)}
    return {
        "round": one.number,
        "who": one.who,
        "seconds": one.seconds,
        "drained_s": one.drained_s,
        "median_ms": float(np.median(one.ms)),
        "mean_ms": float(one.ms.mean()),
        **shares,
    }


def _shown(way: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("max_drop", "threads", "speedup", "speedup_min", "speedup_max", "hit_rate", "share_of_bound"),
        *("bypassed", "changed_answers"),
    )
    times = {name: None if way[name] is None else way[name]["mean"] for name in ("plain_ms", "hit_ms", "miss_ms")}
    asked = {name: way[name] for name in ("hit_rate_set",) if name in way}  # streams made with a set hit rate
    return asked | {name: way[name] for name in names} | times | {"accuracy_drop": way["accuracy_drop"]}


class SetRates(Service):
    hit_rates: Annotated[tuple[float, ...], ONE_OR_MORE] = Field(default=(0.52, 0.87, 0.92), min_length=1)
    n: int = Field(default=800, ge=200)  # requests per pass

    def check(self) -> None:
        super().check()
        if any(not 0 < rate < 1 for rate in self.hit_rates):
            raise ConfigError(f"hit_rates: give shares above 0 and below 1 (got {list(self.hit_rates)})")


def run_at_rates(experiment: SetRates, folders: Folders) -> Outcome:
    workload = experiment.stream(folders)
    server = Server(workload, experiment.cache, experiment.learn)
    pool, n = server.stream, experiment.n
    if experiment.learn and len(pool.requests) < n:
        raise ConfigError(f"n={n}: {len(pool.requests)} requests follow those learned from; raise task.limit")
    chosen = {claim: server.learned(claim).chosen for claim in experiment.risk_targets if claim is not None}
    served = {claim: 0.0 if found is None else found.hit_rate for claim, found in chosen.items()}
    rows, ways = [], []
    for rate in experiment.hit_rates:
        server.stream = pool.of(pool.requests[:n] if experiment.learn else _repeating(pool, rate, n, experiment.seed))
        nearest = min(served, key=lambda claim: abs(served[claim] - rate)) if experiment.learn else None
        for threads in experiment.threads:
            way, more = serve(experiment, server, nearest, threads, hit_rate_set=rate)
            ways.append(way)
            rows += more
    server.cache.unwrap()
    return Outcome(rows, about(experiment, workload, n, ways))


def _repeating(pool: Workload, rate: float, n: int, seed: int) -> list[Request]:
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
