"""Greedy-Dual-Size-Frequency: evicts first the entries that save the least computing per byte."""

import math
from collections import OrderedDict

from llmcache.memory.policies.ranking import Ranked


class GDSF(Ranked):
    """The entry with the lowest value is evicted first: uses times recompute cost per byte, plus the clock at last use.

    Cherkasova (1998): value = clock + uses * cost / bytes, set at the last use; the clock is the value of the last
    evicted entry, so that unused entries are evicted in time. Each put and each hit is a use. Among equals the least
    recently used is evicted.

    Departures: a cost per byte is divided by the average of all known costs per byte. An entry of unknown cost, such as
    a prefix block, counts as average; without any known cost this is LFU with aging. The uses of removed keys are
    remembered, for as many keys as are held.
    """

    def __init__(self) -> None:
        super().__init__()  # ranked by value, then by use
        self._clock = 0.0
        self._n_uses: dict[str, int] = {}
        self._n_uses_before: OrderedDict[str, int] = OrderedDict()  # uses of removed keys, the latest last
        self._nbytes: dict[str, int] = {}
        self._costs: dict[str, float] = {}  # known costs
        self._total_cost = self._total_nbytes = 0.0

    def on_put(self, key: str, nbytes: int) -> None:
        self._nbytes[key] = max(1, nbytes)
        self._costs.pop(key, None)
        self._use(key)

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            self._use(key)

    def on_cost(self, key: str, cost: float) -> None:
        if not 0 < cost < math.inf:
            raise ValueError(f"cost={cost}: give a number over 0")
        if key in self._ranking:
            self._costs[key] = cost
            self._total_cost += cost
            self._total_nbytes += self._nbytes[key]
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
        cost, average = self._costs[key] / self._nbytes[key], self._total_cost / self._total_nbytes
        return self._clock + self._n_uses[key] * cost / average
