"""Calibrated reuse on a stream, replayed many times from one pass of the model.

All requests are observed once. The library's own code decides which source serves a request and at which risk, as in
service. Only the model is not run again.

Sizes: N requests.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.methods.base import COMPUTED, twin
from experiments.methods.cached import configure
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import LLMCache
from llmcache.lab import CalibratedReuse, Found, Observation


class Rehearsal:
    """A workload with all N requests observed, and an empty cache on a copy of its model."""

    def __init__(self, workload: Workload, options: dict[str, object]) -> None:
        """Run the model over all requests. Audit is off unless `options` set it, since a replay does not audit."""
        self.workload = workload
        self.cache = self._wrap(options)
        requests = workload.requests
        inputs = (request.inputs for request in tracked(requests, "Observing the model alone"))
        self.observed = self.cache.observe(inputs, labels=[request.reference for request in requests])
        assert self.cache.calibrated is not None
        self.calibrated = self.cache.calibrated
        self.outputs = [torch.from_numpy(case.output)[None] for case in self.observed]
        self.answers: list[Answer] = [workload.answer(output, i) for i, output in enumerate(self.outputs)]
        self._number = {case.row.key: i for i, case in enumerate(self.observed)}

    def _wrap(self, options: Mapping[str, object]) -> LLMCache:
        config = configure(self.workload, {"audit": 0, **options})
        return LLMCache.wrap(twin(self.workload.module), config=config, tokenizer=self.workload.tokenizer)

    def beside(self, options: Mapping[str, object]) -> tuple[LLMCache, CalibratedReuse]:
        """Return another cache on the model and its calibrated reuse, which can learn from these observations."""
        cache = self._wrap(options)
        cache.observe([self.workload.requests[0].inputs])  # creates its calibrated reuse
        assert cache.calibrated is not None
        return cache, cache.calibrated

    @property
    def model_ms(self) -> float:
        """Median time the model takes for a request, ms; repeats, which are not computed, are left out."""
        first = {case.row.key: case.seconds for case in reversed(self.observed)}
        return float(np.median([*first.values()])) * 1e3

    def answers_from(self, first: int, sources: Sequence[str | None]) -> list[Answer]:
        """Return the answers of requests from `first` on, given the key of each one's source; None if computed."""
        return [
            self.answers[i] if key is None else self.workload.answer(self.outputs[self._number[key]], i)
            for i, key in enumerate(sources, start=first)
        ]


def empty(cache: LLMCache, observed: Sequence[Observation]) -> None:
    """Clear a cache, and keep the earlier observations valid to learn from."""
    cache.clear()
    if observed:
        assert cache.calibrated is not None
        cache.calibrated.keep(observed)


def grow(
    calibrated: CalibratedReuse, learned: Sequence[Observation], later: Sequence[Observation], limit: float
) -> tuple[NDArray[np.str_], list[str | None]]:
    """Serve requests; computed ones become sources. Returns what serves each (N,), and the keys of the sources."""
    calibrated.fitter.set_sources(learned)

    def ask(case: Observation, stored: Collection[str]) -> Found:
        return calibrated.fitter.look_up([case], stored)[0]

    add = calibrated.fitter.add_sources
    return _serve(later, {case.row.key for case in learned}, limit, ask, lambda case: add([case]))


class Frozen:
    """Serves requests from the learned ones only; other requests can only serve their own repeats."""

    def __init__(
        self, calibrated: CalibratedReuse, sources: Sequence[Observation], later: Sequence[Observation]
    ) -> None:
        """Find for each later request its source among `sources`, which were learned from, and the risk."""
        self._later = later
        self._keys = {case.row.key for case in sources}
        found = calibrated.fitter.look_up(later, self._keys)
        self._found = {case.row.key: one for case, one in zip(later, found, strict=True)}

    def serve(self, limit: float) -> tuple[NDArray[np.str_], list[str | None]]:
        """Return what serves each request (N,), and the keys of the sources; see `grow`."""
        return _serve(self._later, set(self._keys), limit, lambda case, _: self._found[case.row.key], lambda case: None)


def _serve(
    later: Sequence[Observation],
    stored: set[str],
    limit: float,
    ask: Callable[[Observation, Collection[str]], Found],
    store: Callable[[Observation], None],
) -> tuple[NDArray[np.str_], list[str | None]]:
    """Serve requests one by one; only computed requests are stored."""
    served, sources = [], []
    for case in later:
        key = case.row.key
        found = Found(-np.inf, key, "exact") if key in stored else ask(case, stored)
        if found.risk <= limit:
            served.append(found.rung)
            sources.append(found.key)
            continue
        store(case)
        stored.add(case.row.key)
        served.append(COMPUTED)
        sources.append(None)
    return np.array(served), sources
