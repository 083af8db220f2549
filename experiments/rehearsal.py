"""What calibrated reuse does with a stream, tried many times on one pass of the model.

All requests are observed once; who would serve whom, and how doubtful that is, the library's own code decides, as it
does when it serves. Only the model is not run again.

Sizes: N requests.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.methods.base import COMPUTED, twin
from experiments.methods.cached import configure
from experiments.progress import tracked
from experiments.workload import Answer, Workload
from llmcache import LLMCache
from llmcache.observation import Observation
from llmcache.teacher import Found
from llmcache.trust import Trust


class Rehearsal:
    """A workload whose requests were all observed.

    Attributes:
        workload: Model and requests.
        cache: On a copy of the model. Holds nothing yet.
        trust: Its calibrated reuse.
        observed: The requests, N.
        answers: What the model alone answers, N.
    """

    def __init__(self, workload: Workload, options: dict[str, object]) -> None:
        """Run the model over all requests.

        Args:
            workload: Its model is not wrapped, and stays as it is.
            options: Settings of the cache. It is not audited unless they say so: a replay knows of no audit.

        Raises:
            LLMCacheError: The settings do not fit the model.
        """
        self.workload = workload
        config = configure(workload, {"audit": 0, **options})
        self.cache = LLMCache.wrap(twin(workload.module), config=config, tokenizer=workload.tokenizer)
        requests = workload.requests
        inputs = (request.inputs for request in tracked(requests, len(requests), "Observing the model alone"))
        self.observed = self.cache.observe(inputs, labels=[request.reference for request in requests])
        assert self.cache.trust is not None
        self.trust: Trust = self.cache.trust
        self.outputs = [torch.from_numpy(case.output)[None] for case in self.observed]
        self.answers: list[Answer] = [workload.answer(output, i) for i, output in enumerate(self.outputs)]
        self._number = {case.row.key: i for i, case in enumerate(self.observed)}

    def answers_from(self, first: int, sources: Sequence[str | None]) -> list[Answer]:
        """What requests from `first` on are told, each by who serves it; None where it is computed."""
        return [
            self.answers[i] if key is None else self.workload.answer(self.outputs[self._number[key]], i)
            for i, key in enumerate(sources, start=first)
        ]


def grow(
    trust: Trust, learned: Sequence[Observation], later: Sequence[Observation], limit: float
) -> tuple[NDArray[np.str_], list[str | None]]:
    """Serve requests while those that are computed become sources.

    Args:
        trust: Has learned.
        learned: Who serves at first.
        later: Requests, N, in the order in which they are asked.
        limit: The largest doubt.

    Returns:
        What serves each request (N,), and the key of its source.
    """
    trust.teacher.restart(learned)

    def ask(case: Observation, stored: Collection[str]) -> Found:
        return trust.teacher.look_up([case], stored)[0]

    return _serve(later, {case.row.key for case in learned}, limit, ask, lambda case: trust.teacher.stand([case]))


def doubts_about(trust: Trust, sources: Sequence[Observation], later: Sequence[Observation]) -> dict[str, Found]:
    """The doubt about each request by its key, if `sources` serve, which stand already, and no others."""
    found = trust.teacher.look_up(later, {case.row.key for case in sources})
    return {case.row.key: one for case, one in zip(later, found, strict=True)}


def freeze(
    doubts: Mapping[str, Found], learned: Collection[str], later: Sequence[Observation], limit: float
) -> tuple[NDArray[np.str_], list[str | None]]:
    """Serve requests from those that were learned from; the others serve their own repeats alone.

    Args:
        doubts: About each later request; see `doubts_about`.
        learned: Keys of who serves.
        later: See `grow`.
        limit: See `grow`.

    Returns:
        See `grow`.
    """
    return _serve(later, set(learned), limit, lambda case, _: doubts[case.row.key], lambda case: None)


def _serve(
    later: Sequence[Observation],
    stored: set[str],
    limit: float,
    ask: Callable[[Observation, Collection[str]], Found],
    store: Callable[[Observation], None],
) -> tuple[NDArray[np.str_], list[str | None]]:
    """Serve requests one by one; what is served is not stored."""
    served, sources = [], []
    for case in later:
        key = case.row.key
        found = Found(-np.inf, key, "exact") if key in stored else ask(case, stored)
        if found.doubt <= limit:
            served.append(found.rung)
            sources.append(found.key)
            continue
        store(case)
        stored.add(case.row.key)
        served.append(COMPUTED)
        sources.append(None)
    return np.array(served), sources
