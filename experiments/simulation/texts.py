"""Requests that others may answer: the decisions of a calibrated cache whose sources grow, of whatever a worker knows.

A model sees each request once. Then the cache's own decision is asked who would serve a request, with those that a
worker knows as the only ones that a search finds; the search is exact. What is served is not stored.

Sizes: N requests, F width of a fingerprint.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from experiments.replay.rehearsal import Rehearsal
from experiments.simulation.banks import Held, Plan
from llmcache.calibration.calibration import Calibration
from llmcache.matching.partition import Neighbour


class Texts:
    """The later requests of a stream, the first of which all workers have learned from."""

    announces = True

    def __init__(self, rehearsal: Rehearsal, made: Calibration, learn: int, most: int | None = None) -> None:
        """Take requests that were observed, and what was calibrated on the first `learn`; of later ones `most`."""
        assert made.chosen is not None
        self._limit = made.chosen.limit
        self._fitter = rehearsal.calibrated.fitter
        self._cases = rehearsal.observed[: None if most is None else learn + most]
        self.texts = [request.text for request in rehearsal.workload.requests[: len(self._cases)]]
        self._learn = learn
        self.n = len(self._cases) - learn
        projected = [self._fitter.fingerprint.project_with_forecast(case.features[None]) for case in self._cases]
        self._vectors = np.concatenate([vectors for vectors, _ in projected])  # (N, F)
        self._forecasts = [forecasts for _, forecasts in projected]
        self._order: dict[int, list[tuple[int, float]]] = {}  # by request: those that may vote, the most similar first
        self._found: dict[tuple[int, ...], int | None] = {}  # by request and those that vote: who serves
        self._number = {case.row.key: i for i, case in reversed([*enumerate(self._cases)])}  # the first of equal ones
        self._is_first = np.array([self._number[case.row.key] == i for i, case in enumerate(self._cases)])
        self._learned = {self._number[case.row.key] for case in self._cases[:learn]}
        self._voters: Sequence[tuple[int, float]] = ()
        self._k = 0
        # The cache's banks find what a worker knows, from now on; everything else of the decision is its own.
        self._fitter.banks.search = self._search
        self._decide(learn)  # tells how many vote
        self.begin(1, 0, 0)

    def begin(self, n_workers: int, worker_values: int, store_values: int) -> None:
        self._held = [Held(worker_values) for _ in range(n_workers)]
        self._heard: list[set[Hashable]] = [set() for _ in range(n_workers)]
        self._n_heard = [0] * n_workers
        self._announced: list[Hashable] = []
        self._store = Held(store_values)

    def route(self, number: int) -> str:
        return self.texts[self._learn + number]

    def plan(self, worker: int, number: int) -> Plan:
        i = self._known_as(number)
        if self._has(worker, i):
            return self._use(worker, i, looks=False)
        if i in self._store:
            return Plan(0, 1, 0, (i,))
        source = self._find(worker, i)
        return Plan(0, 0, 1) if source is None else self._use(worker, source, looks=True)

    def fetched(self, worker: int, values: Iterable[Hashable]) -> None:
        for value in values:
            self._held[worker].add(value)

    def computed(self, worker: int, number: int, plan: Plan) -> Sequence[Hashable]:
        if not plan.n_computed:
            return ()
        i = self._known_as(number)
        self._held[worker].add(i)
        return (i,)

    def is_stored(self, value: Hashable) -> bool:
        return value in self._store

    def stored(self, value: Hashable) -> None:
        self._store.add(value)

    def told(self, values: Iterable[Hashable]) -> None:
        self._announced += values

    def hear(self, worker: int) -> int:
        new = self._announced[self._n_heard[worker] :]
        self._n_heard[worker] = len(self._announced)
        self._heard[worker].update(new)
        return len(new)

    def _known_as(self, number: int) -> int:
        """The number, from the first that was learned from on, of the first request that equals a later one."""
        return self._number[self._cases[self._learn + number].row.key]

    def _has(self, worker: int, i: int) -> bool:
        return i in self._learned or i in self._held[worker]

    def _use(self, worker: int, i: int, looks: bool) -> Plan:
        if i in self._learned:
            return Plan(1, 0, 0, looks=looks)
        if i in self._held[worker]:
            self._held[worker].add(i)
            return Plan(1, 0, 0, looks=looks)
        return Plan(0, 1, 0, (i,))

    def _find(self, worker: int, i: int) -> int | None:
        """Who serves a request from what a worker knows; None where it is computed."""
        heard, learned, held = self._heard[worker], self._learned, self._held[worker]
        known = (one for one in self._near(i) if one[0] in learned or one[0] in held or one[0] in heard)
        self._voters = [*islice(known, self._k)]
        asked = (i, *(j for j, _ in self._voters))
        if asked not in self._found:
            self._found[asked] = self._decide(i)
        source = self._found[asked]
        return source if source is None or self._has(worker, source) or source in self._store else None

    def _near(self, i: int) -> list[tuple[int, float]]:
        """Others as far as they may vote: the nearest of those that were learned from are known to every worker."""
        if i not in self._order:
            similarity = self._vectors @ self._vectors[i]
            order = np.argsort(-similarity, kind="stable")
            order = order[self._is_first[order] & (order != i)]
            n_learned = np.cumsum(order < self._learn)
            order = order[: int(np.searchsorted(n_learned, self._k)) + 1]
            self._order[i] = [(int(j), float(similarity[j])) for j in order]
        return self._order[i]

    def _decide(self, i: int) -> int | None:
        """Who serves a request, of those that vote, if that is not too risky."""
        case = self._cases[i]
        (choice,) = self._fitter.chooser.choose(case.scope, [case.row], self._vectors[i][None], self._forecasts[i])
        return None if choice is None or choice.risk > self._limit else self._number[choice.neighbour.key]

    def _search(self, scope: Any, rows: Any, vectors: Any, k: int = 1, layer: Any = None) -> list[list[Neighbour]]:
        self._k = k
        cases = ((self._cases[j], similarity) for j, similarity in self._voters)
        return [[Neighbour(case.row.key, similarity, case.answer, case.row.ids) for case, similarity in cases]]
