"""Least frequently used."""

from itertools import count

from llmcache.policies.base import Policy
from llmcache.policies.ranking import Ranking


class LFU(Policy):
    """Least frequently used; among equals the least recently used.

    Each put and each hit is a use. The count starts anew when a key was removed, and does not fade with time.
    """

    def __init__(self) -> None:
        self._ranking = Ranking()  # by number of uses, then by the latest
        self._uses = count()

    def on_put(self, key: str, nbytes: int) -> None:
        n_uses = self._ranking[key][0] if key in self._ranking else 0
        self._ranking[key] = (n_uses + 1, next(self._uses))

    def on_hit(self, key: str) -> None:
        if key in self._ranking:
            self.on_put(key, 0)

    def on_remove(self, key: str) -> None:
        self._ranking.discard(key)

    def victim(self) -> str:
        return self._ranking.first()
