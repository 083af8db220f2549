"""What was purged or forgotten while calls were under way, so that these bring none of it back."""

import threading
from collections.abc import Collection

from llmcache.support.threads import forkable

_MOST_FORGOTTEN = 65_536  # forgotten keys that are remembered


class Purges:
    """The purges of one wrapped model's memory. Thread-safe.

    A part of memory records a purge and drops what it holds under the lock under which it also stores. A call notes
    `generation` when it begins, and each part stores only what `is_current` since.
    """

    def __init__(self) -> None:
        self.generation = 0  # recorded clears and forgets
        self._cleared: dict[str | None, int] = {}  # generation of the latest clear, by namespace; None: of all
        self._forgotten: dict[str, int] = {}  # generation of the latest forget, by key
        self._lock = forkable(threading.RLock())

    def clear(self, namespace: str | None) -> None:
        """Record that a namespace was purged (None: all)."""
        with self._lock:
            self.generation += 1
            self._cleared[namespace] = self.generation

    def forget(self, keys: Collection[str]) -> None:
        """Record that entries or blocks were forgotten."""
        with self._lock:
            self.generation += 1
            if len(self._forgotten) + len(keys) > _MOST_FORGOTTEN:
                self._forgotten.clear()
                self._cleared[None] = self.generation  # calls under way store nothing at all
            self._forgotten |= dict.fromkeys(keys, self.generation)

    def is_current(self, namespace: str, key: str, generation: int) -> bool:
        """Whether a key that was computed or read at this `generation` has been neither cleared nor forgotten since."""
        with self._lock:
            cleared = max(self._cleared.get(None, 0), self._cleared.get(namespace, 0))
            return max(cleared, self._forgotten.get(key, 0)) <= generation
