"""Whether a value is read from a store rather than computed: learned in service from what both took, by length."""

from collections import defaultdict
from dataclasses import dataclass

_LEAST_N = 16  # times that both were measured, before anything is decided
_LOOK = 32  # of requests that are computed since reading does not pay, one is read all the same
_FADE = 0.1  # weight of the newest
_LEAST_S = 0.005  # that a read may take
_MOST_S = 1.0  # where it is not known what it saves


@dataclass(slots=True)
class _Mean:
    """Seconds, averaged over the latest times."""

    n: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.n += 1
        self.seconds += (seconds - self.seconds) * max(_FADE, 1 / self.n)


class BreakEven:
    """Times of reading and computing, in classes of length: each up to twice as long as the one before."""

    def __init__(self, least_tokens: int | None = None) -> None:
        """Learn; or read whatever has so many tokens."""
        self._given = least_tokens
        self._read: dict[int, _Mean] = defaultdict(_Mean)
        self._computed: dict[int, _Mean] = defaultdict(_Mean)
        self._n_asked = 0

    def pays(self, n_tokens: int) -> bool:
        """Whether to read what saves computing so many tokens."""
        if self._given is not None:
            return n_tokens >= self._given
        self._n_asked += 1
        return self._is_faster(n_tokens.bit_length()) or self._n_asked % _LOOK == 0

    @property
    def least_tokens(self) -> int:
        """Tokens from which reading pays, as far as is known."""
        slow = [length for length in list(self._read) if not self._is_faster(length)]
        return self._given if self._given is not None else 2 ** max(slow) if slow else 0

    def patience_s(self, n_tokens: int) -> float:
        """How long a read may take: as long as computing."""
        computed = self._computed.get(n_tokens.bit_length())
        return _MOST_S if computed is None or computed.n < _LEAST_N else max(_LEAST_S, computed.seconds)

    def read(self, n_tokens: int, seconds: float) -> None:
        """Reading took so long, and was not in vain."""
        self._read[n_tokens.bit_length()].add(seconds)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Computing took so long."""
        self._computed[n_tokens.bit_length()].add(seconds)

    def _is_faster(self, length: int) -> bool:
        read, computed = self._read.get(length), self._computed.get(length)
        if read is None or computed is None or min(read.n, computed.n) < _LEAST_N:
            return True
        return read.seconds <= computed.seconds
