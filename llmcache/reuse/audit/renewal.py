"""The newest requests for a renewal: a uniform sample of hits and misses.

Exact repeats are left out. Their answers never change, so a bound for the others holds for all requests.
"""

from collections import deque

from llmcache.reuse.calibration.calibration import Calibration, size_needed
from llmcache.reuse.calibration.observer import flaw
from llmcache.reuse.observation import Observation


class RenewalBuffer:
    """Keeps the requests for the next calibration. The caller holds a lock."""

    def __init__(self, every: int | None) -> None:
        """Begin empty. `every`: requests after which a calibration is renewed; None: never, and nothing is kept."""
        self.every = every
        self._cases: deque[Observation] = deque()
        self._needed = 0

    def begin(self, calibration: Calibration) -> None:
        """Start over for a calibration, after an alarm with the kept requests; keep up to twice what the next needs."""
        if self.every is None:
            return
        self._needed = size_needed(calibration.max_drop, calibration.delta)
        self._cases = deque(self._cases if calibration.n_alarms else (), maxlen=2 * self._needed)

    def add(self, case: Observation) -> None:
        """Keep a request with its entry, unless it has a `flaw`."""
        if self.every is not None and not flaw(case):
            self._cases.append(case)

    def is_due(self, n_requests: int) -> bool:
        """Whether `every` requests have passed and the kept ones are enough for the claim."""
        return self.every is not None and n_requests >= self.every and len(self._cases) >= self._needed

    def forget(self, namespace: str | None) -> None:
        left = (case for case in self._cases if namespace not in (None, case.scope.namespace))
        self._cases = deque(left, maxlen=self._cases.maxlen)

    @property
    def cases(self) -> list[Observation]:
        return list(self._cases)
