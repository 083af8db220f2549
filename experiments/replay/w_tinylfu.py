"""W-TinyLFU, a reference for the library's policies; not part of the library."""

from collections import OrderedDict

from llmcache import Policy

_MOST = 15  # largest count of a key: four bits, as in the paper
_SAMPLE = 10  # counts are halved after this many uses per key held


class WTinyLFU(Policy):
    """Admits a key from the window only if it was used more often than the key it would evict.

    Einziger et al. (2017): a window of 1 % in LRU order, and a segmented main part, of which 80 % is protected.
    Departure: uses are counted exactly, for each key since counts were last halved, not by a sketch. A sketch has
    errors, so it would do no better.
    """

    def __init__(self, window: float = 0.01, protected: float = 0.8) -> None:
        self.window = window
        self.protected = protected
        self._nbytes_of: dict[str, int] = {}
        self._window, self._probation, self._protected = (_Segment(self._nbytes_of) for _ in range(3))
        self._n_uses: dict[str, int] = {}
        self._n_counted = 0
        self._candidates: OrderedDict[str, None] = OrderedDict()  # left the window, and have evicted no key yet

    def on_put(self, key: str, nbytes: int) -> None:
        self.on_remove(key)
        self._count(key)
        self._nbytes_of[key] = nbytes
        self._window.add(key)
        while len(self._window) > 1 and self._window.nbytes > self.window * self._nbytes:
            candidate = self._window.pop()
            self._candidates[candidate] = None
            self._probation.add(candidate)

    def on_hit(self, key: str) -> None:
        if key not in self._nbytes_of:
            return
        self._count(key)
        if key in self._window:
            self._window.add(key)
            return
        self._probation.discard(key)
        self._candidates.pop(key, None)
        self._protected.add(key)
        while self._protected.nbytes > self.protected * (self._probation.nbytes + self._protected.nbytes):
            self._probation.add(self._protected.pop())

    def on_remove(self, key: str) -> None:
        self._candidates.pop(key, None)
        if self._candidates and key == next(iter(self._probation), None):
            self._candidates.popitem()  # it was admitted
        for segment in (self._window, self._probation, self._protected):
            segment.discard(key)
        self._nbytes_of.pop(key, None)

    def victim(self) -> str:
        for segment in (self._probation, self._protected, self._window):
            for key in segment:
                candidate = next(reversed(self._candidates), key)
                return candidate if self._uses(candidate) <= self._uses(key) else key
        raise KeyError("no key to evict: the policy is empty")

    @property
    def _nbytes(self) -> int:
        return self._window.nbytes + self._probation.nbytes + self._protected.nbytes

    def _uses(self, key: str) -> int:
        return self._n_uses.get(key, 0)

    def _count(self, key: str) -> None:
        self._n_uses[key] = min(_MOST, self._uses(key) + 1)
        self._n_counted += 1
        if self._n_counted >= _SAMPLE * max(_MOST, len(self._nbytes_of)):
            self._n_uses = {one: n // 2 for one, n in self._n_uses.items() if n > 1}
            self._n_counted //= 2


class _Segment(OrderedDict[str, None]):
    """Keys in order of use, least recent first, with their bytes."""

    def __init__(self, nbytes_of: dict[str, int]) -> None:
        super().__init__()
        self._nbytes_of = nbytes_of
        self.nbytes = 0

    def add(self, key: str) -> None:
        if key not in self:
            self.nbytes += self._nbytes_of[key]
        self[key] = None
        self.move_to_end(key)

    def discard(self, key: str) -> None:
        if key in self:
            del self[key]
            self.nbytes -= self._nbytes_of[key]

    def pop(self) -> str:  # type: ignore[override]
        key = next(iter(self))
        self.discard(key)
        return key
