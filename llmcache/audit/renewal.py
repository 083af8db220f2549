"""The newest requests for a renewal: a uniform draw among hits and misses.

Exact repeats are not among them. Their answers never change, so a bound for the others holds for all requests.
"""

from collections import deque

from llmcache.calibration.calibration import Calibration, size_needed
from llmcache.calibration.observer import flaw
from llmcache.request.observation import Observation


class RenewalBuffer:
    """Keeps the requests that the next calibration is made from. The caller holds a lock."""

    def __init__(self, every: int | None) -> None:
        """`every`: requests after which a calibration is renewed; None: never, and nothing is kept."""
        self.every = every
        self._cases: deque[Observation] = deque()
        self._needed = 0

    def begin(self, made: Calibration) -> None:
        """Begin anew after a calibration: keep the latest requests, twice as many as the next one needs at least."""
        if self.every is None:
            return
        self._needed = size_needed(made.max_drop, made.delta)
        self._cases = deque(self._cases if made.n_alarms else (), maxlen=2 * self._needed)

    def add(self, case: Observation) -> None:
        """Keep a request with its entry, unless nothing can be learned from it."""
        if self.every is not None and not flaw(case):
            self._cases.append(case)

    def is_due(self, n_requests: int) -> bool:
        """Whether `every` requests have passed, and those kept can carry the claim."""
        return self.every is not None and n_requests >= self.every and len(self._cases) >= self._needed

    def forget(self, namespace: str | None) -> None:
        left = (case for case in self._cases if namespace not in (None, case.scope.namespace))
        self._cases = deque(left, maxlen=self._cases.maxlen)

    @property
    def cases(self) -> list[Observation]:
        return list(self._cases)
