"""Calibrated reuse at work: requests that are not of a rehearsal's stream, and live serving."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.methods.base import COMPUTED
from experiments.models.loading import encode
from experiments.tasks.workload import Answer, Request, Workload
from llmcache import LLMCache
from llmcache.lab import Alarm, RiskTarget


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request."""

    answer: Answer
    served: str  # what served it: a rung, or `computed`
    source: str | None  # key of the stored request that it was served from; None where it was computed


def asking(workload: Workload, texts: Sequence[str], max_length: int) -> Workload:
    """The workload with other requests, which have no reference."""
    other = copy(workload)
    other.requests = [
        Request(str(i), encode(workload.tokenizer, text, max_length), text, None) for i, text in enumerate(texts)
    ]
    return other


def ask(cache: LLMCache, workload: Workload, number: int) -> Reply:
    """Have one request answered, and what the audit drew of it audited at once."""
    # In service that is done in the next idle moment, seconds later at most; here results do not hang on when that is.
    output = cache(**workload.requests[number].inputs)
    (outcome,) = cache.last
    cache.drain()
    return Reply(workload.answer(output, number), outcome.rung or COMPUTED, outcome.source)


def requests_expected(risk_target: RiskTarget, audit: float, n_before: int, rate: float) -> int | None:
    """Requests after which an alarm can be expected at this rate; None where it is in order, or nobody listens."""
    if not audit or rate <= risk_target.max_drop:
        return None
    alarm = Alarm(risk_target.max_drop, audit, risk_target.delta)
    for _ in range(n_before):
        alarm.see()
    return alarm.needed(rate)


class Asked:
    """All that was asked of one cache, which was just calibrated, in order, and when its audit gave alarm."""

    def __init__(self, cache: LLMCache) -> None:
        self.cache = cache
        self.keys: list[str] = []
        self.sources: list[str | None] = []
        self.changed: list[bool] = []
        self.alarms: list[int] = []  # requests until each

    def ask(self, workload: Workload, number: int, own: Answer) -> None:
        """Ask a request, to which the model's own answer is known."""
        reply = ask(self.cache, workload, number)
        self.keys.append(self.cache.last[0].key)
        self.sources.append(reply.source)
        self.changed.append(reply.answer != own)
        made = self.cache.calibration
        n_alarms = 2 if made is None else made.n_alarms  # after the second one it has ended
        if n_alarms > len(self.alarms):
            self.alarms.append(len(self.keys))

    @property
    def is_hit(self) -> NDArray[np.bool_]:
        """Which of the requests were served (N,)."""
        return np.array([source is not None for source in self.sources])

    @property
    def is_changed(self) -> NDArray[np.bool_]:
        """Which of them got another answer than the model's own (N,)."""
        return np.array(self.changed)


def has_drifted(cache: LLMCache) -> bool:
    """Whether a cache says that requests are no longer like those of its calibration, which is void then."""
    return cache.calibration is not None and cache.calibration.has_drifted
