"""S3-FIFO: new keys start in a small queue, so that requests seen once do not evict the others."""

from collections import OrderedDict

from llmcache.memory.policies.base import Policy

_MOST_HITS = 3  # largest hit count of a key: two bits, as in the paper


class S3FIFO(Policy):
    """New keys are evicted first unless they are hit or return soon; so a scan evicts no other keys.

    Yang et al. (SOSP 2023), section 4. A new key enters a small queue. At its end, a key that was hit moves to the main
    queue, and any other is evicted. A key evicted from the small queue is remembered, as many as are held; if put again
    meanwhile, it enters the main queue directly. At the end of that, a key with hits is requeued with one hit less.

    Departures: queue sizes are relative to the bytes held, since a policy does not know the budget. One hit in the
    small queue is enough, not two: one reuse of a prefix block may report several hits. Keys move when they reach the
    end of a queue, not when room is needed, so that `victim` changes nothing.
    """

    def __init__(self, trial: float = 0.1) -> None:
        """Create an empty policy; `trial` is the small queue's share of the bytes held, over 0 and under 1."""
        if not 0 < trial < 1:
            raise ValueError(f"trial={trial}: give a share over 0 and under 1")
        self.trial = trial
        self._small: OrderedDict[str, int] = OrderedDict()  # hits by key, next victim first
        self._main: OrderedDict[str, int] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()  # keys evicted from the small queue, oldest first
        self._nbytes_of: dict[str, int] = {}
        self._nbytes = self._small_nbytes = 0

    def on_put(self, key: str, nbytes: int) -> None:
        """Add a new key; for a key that is held, only update its bytes."""
        if key not in self._nbytes_of:
            (self._main if key in self._gone else self._small)[key] = 0
            self._gone.pop(key, None)
        more = nbytes - self._nbytes_of.get(key, 0)
        self._nbytes_of[key] = nbytes
        self._nbytes += more
        self._small_nbytes += more * (key in self._small)
        self._settle()

    def on_hit(self, key: str) -> None:
        if key in self._nbytes_of:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, _MOST_HITS)
            self._settle()

    def on_remove(self, key: str) -> None:
        nbytes = self._nbytes_of.pop(key, 0)
        self._nbytes -= nbytes
        if self._small.pop(key, None) is not None:
            self._small_nbytes -= nbytes
            self._gone[key] = None
        self._main.pop(key, None)
        while len(self._gone) > len(self._nbytes_of):
            self._gone.popitem(last=False)
        self._settle()

    def victim(self) -> str:
        for key in self._leaving:
            return key
        raise KeyError("no key to evict: the policy is empty")

    @property
    def _leaving(self) -> OrderedDict[str, int]:
        """The queue from which the next key is evicted."""
        is_over = self._small_nbytes >= self.trial * self._nbytes
        return self._small if self._small and (is_over or not self._main) else self._main

    def _settle(self) -> None:
        """Move keys with hits from the end of the queue that evicts next."""
        while (queue := self._leaving) and (n_hits := queue[key := next(iter(queue))]):
            if queue is self._main:
                queue[key] = n_hits - 1
                queue.move_to_end(key)
            else:
                del queue[key]
                self._small_nbytes -= self._nbytes_of[key]
                self._main[key] = 0
