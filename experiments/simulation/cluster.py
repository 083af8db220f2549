"""Workers that serve a stream: how they share it and what they know, simulated on measured times.

A worker is one core. It answers its requests in the order in which they come; what it hears of others and what it waits
for the Redis is part of its calls. Writers and followers run beside the calls, as threads do.
"""

from collections import deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from experiments.simulation.banks import Knowledge, Plan
from experiments.simulation.redis import Redis
from experiments.simulation.times import Ladder, Times, Use
from experiments.support.ring import Ring

SEPARATE, ROUTED, SHARED = DESIGNS = ("separate", "routed", "shared")
_WAITING_BYTES = 256 << 20  # that a worker keeps for its writer; more is dropped
_AT_ONCE_BYTES = 32 << 20  # that the writer puts together

Happening = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True, slots=True)
class Site:
    """What workers have.

    Attributes:
        worker_bytes: Memory of each for what it holds.
        store_bytes: Memory of the Redis.
        link_bytes_s: That the link of the Redis takes a second.
        timeout_s: For which the Redis may be silent.
        load: Requests a second and worker, of what a worker alone computes a second.
        bound: Requests that a routed worker may have, of the mean of all; see `Ring`.
    """

    worker_bytes: float
    store_bytes: float
    link_bytes_s: float
    timeout_s: float
    load: float
    bound: float


@dataclass(slots=True)
class _Counts:
    """What happened; times in seconds, of all workers."""

    latencies: list[float] = field(default_factory=list)
    n_found: int = 0  # values
    n_asked: int = 0
    n_hits: int = 0  # requests of which nothing was computed
    n_fetched: int = 0  # values
    n_late: int = 0  # requests that the Redis was too slow for
    n_dropped: int = 0  # values
    busy_s: float = 0.0
    heard_s: float = 0.0


class Cluster:
    """One run of so many workers."""

    def __init__(
        self, design: str, n_workers: int, knowledge: Knowledge, times: Times, site: Site, rng: np.random.Generator
    ) -> None:
        """Begin with workers that know nothing but what all have learned."""
        self._env = simpy.Environment()
        self._is_shared = design == SHARED
        self._is_routed = design == ROUTED
        self._n_workers, self._knowledge, self._times, self._site = n_workers, knowledge, times, site
        self._random = rng.random
        self._ring = Ring(n_workers)
        self._turns = [simpy.Resource(self._env) for _ in range(n_workers)]
        self._loads = [0] * n_workers  # requests that each has
        self._redis = Redis(site.link_bytes_s)
        self._writing: list[deque[Hashable]] = [deque() for _ in range(n_workers)]
        self._untold: list[Hashable] = []
        self._wake = [self._env.event() for _ in range(n_workers)]  # of writers
        self._wake_teller = self._env.event()
        self._counts = _Counts()
        worker_values, store_values = (int(most / times.nbytes) for most in (site.worker_bytes, site.store_bytes))
        knowledge.begin(n_workers, worker_values, store_values)
        if self._is_shared:
            for worker in range(n_workers):
                self._env.process(self._write(worker))
            self._env.process(self._tell())

    def serve_open(self, arrivals: NDArray[np.float64], computes_s: float) -> dict[str, Any]:
        """Serve requests that arrive at times whose mean distance is 1, where computing one takes so long; figures."""
        times = arrivals * computes_s / (self._site.load * self._n_workers)
        return self._run([self._env.process(self._arrive(times))])

    def serve_closed(self, shares: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Serve shares of the requests, each worker its own, one after the other; figures."""
        return self._run([self._env.process(self._take(worker, share)) for worker, share in enumerate(shares)])

    def _run(self, working: Sequence[simpy.Event]) -> dict[str, Any]:
        self._env.run(self._env.all_of(working))
        counts, seconds = self._counts, self._env.now
        p50, p99 = np.percentile(counts.latencies, (50, 99))
        return {
            "hit_rate": counts.n_found / counts.n_asked,
            "whole_hits": counts.n_hits / len(counts.latencies),
            "p50_ms": 1e3 * float(p50),
            "p99_ms": 1e3 * float(p99),
            "mean_ms": 1e3 * float(np.mean(counts.latencies)),
            **self._redis.figures(seconds),
            "busy": counts.busy_s / (self._n_workers * seconds),
            "hear_share": counts.heard_s / (self._n_workers * seconds),
            "n_fetched": counts.n_fetched,
            "n_late": counts.n_late,
            "n_dropped": counts.n_dropped,
            "seconds_simulated": seconds,
        }

    def _arrive(self, times: NDArray[np.float64]) -> Happening:
        served = []
        for number, at in enumerate(times.tolist()):
            yield self._env.timeout(max(0.0, at - self._env.now))
            served.append(self._env.process(self._serve(self._worker_of(number), number)))
        yield self._env.all_of(served)

    def _take(self, worker: int, share: Sequence[int]) -> Happening:
        for number in share:
            yield from self._serve(worker, number)

    def _worker_of(self, number: int) -> int:
        if not self._is_routed:
            return number % self._n_workers
        return self._ring.of_bounded(self._knowledge.route(number), self._loads, self._site.bound)

    def _serve(self, worker: int, number: int) -> Happening:
        came = self._env.now
        self._loads[worker] += 1
        with self._turns[worker].request() as turn:
            yield turn
            began = self._env.now
            yield from self._answer(worker, number)
            self._counts.busy_s += self._env.now - began
        self._loads[worker] -= 1
        self._counts.latencies.append(self._env.now - came)

    def _answer(self, worker: int, number: int) -> Happening:
        if self._is_shared and self._knowledge.announces:
            yield from self._hear(worker)
        plan = self._knowledge.plan(worker, number)
        if self._is_shared and plan.looks:
            plan = yield from self._fetch(worker, plan)
        elif plan.n_remote:
            raise AssertionError("there is no store")
        yield self._env.timeout(
            self._draw(self._times.hit, plan.n_local + plan.n_remote) + self._draw(self._times.compute, plan.n_computed)
        )
        counts, n_found = self._counts, plan.n_local + plan.n_remote
        counts.n_found += n_found
        counts.n_asked += n_found + plan.n_computed
        counts.n_hits += not plan.n_computed
        new = self._knowledge.computed(worker, number, plan)
        if self._is_shared:
            self._put(worker, new)

    def _hear(self, worker: int) -> Happening:
        n_heard = self._knowledge.hear(worker)
        if n_heard:
            heard_s = sum(self._draw(self._times.hear, 1) for _ in range(n_heard))
            self._counts.heard_s += heard_s
            yield self._env.timeout(heard_s)

    def _fetch(self, worker: int, plan: Plan) -> Happening:
        """Ask the store, and read what it has; returns what is served in the end."""
        is_late = yield from self._trip(self._times.asked, self._draw(self._times.look, 1))
        if plan.n_remote and not is_late:
            use, own_s = self._times.read * plan.n_remote, self._draw(self._times.fetch, plan.n_remote)
            is_late = yield from self._trip(use, own_s)
        self._counts.n_late += is_late
        if is_late:
            return plan.alone
        self._knowledge.fetched(worker, plan.remote)
        self._counts.n_fetched += plan.n_remote
        return plan

    def _trip(self, use: Use, own_s: float) -> Happening:
        """An exchange with the Redis that takes `own_s` beside it; returns whether it was given up."""
        waits_s, answered_s = self._redis.ask(self._env.now, use)
        if waits_s > self._site.timeout_s:
            yield self._env.timeout(self._site.timeout_s)
            return True
        yield self._env.timeout(answered_s - self._env.now + own_s)
        return False

    def _put(self, worker: int, values: Sequence[Hashable]) -> None:
        most = int(_WAITING_BYTES / self._times.nbytes)
        kept = values[: max(0, most - len(self._writing[worker]))]
        self._counts.n_dropped += len(values) - len(kept)
        self._writing[worker].extend(kept)
        if kept:
            self._rouse(self._wake[worker])

    def _write(self, worker: int) -> Happening:
        """The writer of a worker: what waits is written at once."""
        most, times = max(1, int(_AT_ONCE_BYTES / self._times.nbytes)), self._times
        while True:
            yield self._wake[worker]
            yield self._env.timeout(self._draw(times.delay, 1))
            while waiting := self._writing[worker]:
                values = [waiting.popleft() for _ in range(min(most, len(waiting)))]
                use = times.written
                for value in values:  # between two of them the Redis answers others
                    is_new = not self._knowledge.is_stored(value)  # what is there is not written again
                    _, answered_s = self._redis.ask(self._env.now, use if is_new else times.asked)
                    yield self._env.timeout(answered_s - self._env.now)
                    if is_new:
                        use = times.written_more
                        self._knowledge.stored(value)
                        self._untold.append(value)
                        self._rouse(self._wake_teller)
            self._wake[worker] = self._env.event()

    def _tell(self) -> Happening:
        """The Redis tells all workers of what was written; what is written meanwhile is told together, next."""
        times = self._times
        while True:
            yield self._wake_teller
            while self._untold:
                values, self._untold = self._untold, []
                n_more = len(values) - 1
                _, answered_s = self._redis.ask(
                    self._env.now, (times.told + times.told_more * n_more) * self._n_workers
                )
                yield self._env.timeout(answered_s - self._env.now)
                self._knowledge.told(values)
                self._counts.heard_s += (times.follow_s + times.follow_more_s * n_more) * self._n_workers
            self._wake_teller = self._env.event()

    def _rouse(self, wake: simpy.Event) -> None:
        if not wake.triggered:
            wake.succeed()

    def _draw(self, ladder: Ladder, size: int) -> float:
        return ladder.draw(size, self._random()) if size else 0.0
