"""S3-FIFO: newcomers are on trial in a small queue, so that requests asked once do not drive out the others."""

from collections import OrderedDict

from llmcache.policies.base import Policy

_MOST_HITS = 3  # counted of a key: two bits, as in the paper


class S3FIFO(Policy):
    """Newcomers leave first unless they are hit on trial, or come again soon after: a scan drives out nothing else.

    Yang et al. (SOSP 2023), section 4. A newcomer enters a small queue; one that was hit there goes on to the main
    queue, another leaves. A key that left the small queue and is put again while it is remembered, as many as are held,
    enters the main queue at once. At the end of the main queue, a key with hits begins again with one hit less.

    Departures: queues are measured in bytes of what is held, since a policy is not told the budget. One hit on trial is
    enough, not two: a prefix block hears of one reuse several times. Keys go on when they come to the end of a queue,
    not when room is needed, so that asking for a victim changes nothing.
    """

    def __init__(self, trial: float = 0.1) -> None:
        """Open an empty policy; `trial` is the small queue's share of the bytes held, over 0 and under 1."""
        if not 0 < trial < 1:
            raise ValueError(f"trial={trial}: give a share over 0 and under 1")
        self.trial = trial
        self._small: OrderedDict[str, int] = OrderedDict()  # hits by key, next victim first
        self._main: OrderedDict[str, int] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()  # left the small queue, oldest first
        self._nbytes_of: dict[str, int] = {}
        self._nbytes = self._small_nbytes = 0

    def on_put(self, key: str, nbytes: int) -> None:
        """Take a newcomer in; of a key that is held, note its bytes alone."""
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
        """The queue that a key has to leave next."""
        is_over = self._small_nbytes >= self.trial * self._nbytes
        return self._small if self._small and (is_over or not self._main) else self._main

    def _settle(self) -> None:
        """Let keys with hits go on from the end of the queue that is to lose one."""
        while (queue := self._leaving) and (n_hits := queue[key := next(iter(queue))]):
            if queue is self._main:
                queue[key] = n_hits - 1
                queue.move_to_end(key)
            else:
                del queue[key]
                self._small_nbytes -= self._nbytes_of[key]
                self._main[key] = 0
