"""Least frequently used."""

from llmcache.memory.policies.ranking import Ranked


class LFU(Ranked):
    """Least frequently used; among equals the least recently used.

    Each put and each hit is a use. Removing a key resets its count; counts do not decay.
    """

    def on_put(self, key: str, nbytes: int) -> None:
        n_uses = self._ranking[key][0] if key in self._ranking else 0
        self._ranking[key] = (n_uses + 1, next(self._uses))  # by number of uses, then by time of the last use

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            self.on_put(key, 0)
