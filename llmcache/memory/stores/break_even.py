"""Decides whether to read a value from a store or to compute it, from measured times of both by length in tokens."""

from llmcache.support.break_even import LookUpTimes

_LEAST_N = 16  # measurements of reading and of computing before anything is decided
_WINDOW = 10  # measurements after which older ones fade
_LOOK = 32  # one in so many requests is read although reading does not pay, to measure again
_LEAST_S = 0.005  # least time limit of a read
_MOST_S = 1.0  # time limit of a read until the time to compute is known


class BreakEven(LookUpTimes):
    """Times of reads that found a value, and of computing."""

    def __init__(self, least_tokens: int | None = None) -> None:
        """Learn the break-even point, or read everything of at least `least_tokens` tokens if that is given."""
        super().__init__(_LEAST_N, _LEAST_N, _WINDOW, _LOOK)
        self._given = least_tokens

    def pays(self, n_tokens: int) -> bool:
        """Whether to read a value that saves computing `n_tokens` tokens."""
        return super().pays(n_tokens) if self._given is None else n_tokens >= self._given

    @property
    def least_tokens(self) -> int:
        return super().least_tokens if self._given is None else self._given

    def patience_s(self, n_tokens: int) -> float:
        """Return the time limit of a read in seconds: the time to compute as many tokens."""
        computing_s = self.of(n_tokens).computing_s
        return _MOST_S if computing_s.n < _LEAST_N else max(_LEAST_S, computing_s.value)
