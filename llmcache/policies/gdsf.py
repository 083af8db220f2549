"""Greedy-Dual-Size-Frequency: what saves least computing per byte leaves first."""

import math
from collections import OrderedDict

from llmcache.policies.ranking import Ranked


class GDSF(Ranked):
    """The entry with the lowest value leaves first: uses times the cost of computing it anew, per byte, plus its age.

    Cherkasova (1998): value = clock + uses * cost / bytes, fixed at the last use; the clock is the value of the entry
    that left last, so that what is no longer used leaves in time. Each put and each hit is a use. Among equals the
    least recently used leaves.

    Departures: a cost per byte is taken relative to the average of all that were told. An entry whose cost was not
    told, a prefix block for one, counts as the average; where none is told, this is LFU with aging. The uses of keys
    that left are remembered, of as many as are held.
    """

    def __init__(self) -> None:
        super().__init__()  # ranked by value, then by use
        self._clock = 0.0
        self._n_uses: dict[str, int] = {}
        self._n_uses_before: OrderedDict[str, int] = OrderedDict()  # of keys that left, the latest last
        self._nbytes: dict[str, int] = {}
        self._costs: dict[str, float] = {}  # of those that were told
        self._told_cost = self._told_nbytes = 0.0

    def on_put(self, key: str, nbytes: int) -> None:
        self._nbytes[key] = max(1, nbytes)
        self._costs.pop(key, None)
        self._use(key)

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            self._use(key)

    def on_cost(self, key: str, cost: float) -> None:
        """Rank an entry by its cost from now on."""
        if not 0 < cost < math.inf:
            raise ValueError(f"cost={cost}: give a number over 0")
        if key in self._ranking:
            self._costs[key] = cost
            self._told_cost += cost
            self._told_nbytes += self._nbytes[key]
            self._ranking[key] = (self._value(key), self._ranking[key][1])

    def on_remove(self, key: str) -> None:
        if key not in self._ranking:
            return
        if key == self._ranking.first():
            self._clock = self._ranking[key][0]
        super().on_remove(key)
        self._costs.pop(key, None)
        del self._nbytes[key]
        self._n_uses_before[key] = self._n_uses.pop(key)
        while len(self._n_uses_before) > len(self._n_uses):
            self._n_uses_before.popitem(last=False)

    def _use(self, key: str) -> None:
        n_uses = self._n_uses_before.pop(key, 0) or self._n_uses.get(key, 0)
        self._n_uses[key] = n_uses + 1
        self._ranking[key] = (self._value(key), next(self._uses))

    def _value(self, key: str) -> float:
        if key not in self._costs:
            return self._clock + self._n_uses[key]
        cost, average = self._costs[key] / self._nbytes[key], self._told_cost / self._told_nbytes
        return self._clock + self._n_uses[key] * cost / average
