"""Decides whether to read a value from a store or to compute it, from measured times of both by length in tokens."""

from collections import defaultdict
from dataclasses import dataclass

_LEAST_N = 16  # measurements of reading and of computing before anything is decided
_LOOK = 32  # one in so many requests is read although reading does not pay, to measure again
_FADE = 0.1  # weight of the latest measurement in the mean
_LEAST_S = 0.005  # least time limit of a read
_MOST_S = 1.0  # time limit of a read until the time to compute is known


@dataclass(slots=True)
class _Mean:
    """Moving average of seconds."""

    n: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.n += 1
        self.seconds += (seconds - self.seconds) * max(_FADE, 1 / self.n)


class BreakEven:
    """Mean times of reading and computing, by number of tokens rounded to powers of two."""

    def __init__(self, least_tokens: int | None = None) -> None:
        """Learn the break-even point, or read everything of at least `least_tokens` tokens if that is given."""
        self._given = least_tokens
        self._read: dict[int, _Mean] = defaultdict(_Mean)
        self._computed: dict[int, _Mean] = defaultdict(_Mean)
        self._n_asked = 0

    def pays(self, n_tokens: int) -> bool:
        """Whether to read a value that saves computing `n_tokens` tokens."""
        if self._given is not None:
            return n_tokens >= self._given
        self._n_asked += 1
        return self._is_faster(n_tokens.bit_length()) or self._n_asked % _LOOK == 0

    @property
    def least_tokens(self) -> int:
        """Least number of tokens for which reading pays, by the measurements so far."""
        slow = [length for length in list(self._read) if not self._is_faster(length)]
        return self._given if self._given is not None else 2 ** max(slow) if slow else 0

    def patience_s(self, n_tokens: int) -> float:
        """Return the time limit of a read in seconds: the time to compute as many tokens."""
        computed = self._computed.get(n_tokens.bit_length())
        return _MOST_S if computed is None or computed.n < _LEAST_N else max(_LEAST_S, computed.seconds)

    def read(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a read that found a value."""
        self._read[n_tokens.bit_length()].add(seconds)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Record the time of computing."""
        self._computed[n_tokens.bit_length()].add(seconds)

    def _is_faster(self, length: int) -> bool:
        read, computed = self._read.get(length), self._computed.get(length)
        if read is None or computed is None or min(read.n, computed.n) < _LEAST_N:
            return True
        return read.seconds <= computed.seconds
