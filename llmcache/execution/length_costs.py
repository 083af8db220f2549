"""What was seen of calls of about one length: averages of times and rates, and what follows from them."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

#: Hashes kept; also the most bypassed calls before the cache may return, past which none of them is known.
KNOWN = 65_536
_CHEAP = 0.01  # of the model's time: a cost of less leads to no bypass
_RECORDING = 0.0025  # of the time of bypassed calls: what recording some of them may take
_STRETCH = 16  # bypassed calls in a row, to be compared with
_FIRST_GAP, _LAST_GAP = 256, 1024  # calls between two stretches: each gap is twice the one before
_TIMES = 64  # timed calls over which averages reach back, about
_SHARES = 256  # requests over which rates do
_LARGEST = 4.0  # a time counts at most so many averages: a codec's fit of seconds is not what the next call costs


class Times(NamedTuple):
    """Seconds of one call: from the trunk's arguments to its output, and what of that lookup and storing took."""

    whole_s: float
    lookup_s: float
    storing_s: float


@dataclass(slots=True)
class Average:
    """Of the latest values, older ones fading.

    Attributes:
        reach: How many values it reaches back, about.
        largest: A value counts at most so many times the average.
        value: The average; 0 before the first value.
        n: Values so far.
    """

    reach: int
    largest: float = inf
    value: float = 0.0
    n: int = 0

    def add(self, value: float, n: int = 1) -> None:
        """Take in a value that stands for `n`, at least 1."""
        if self.value:
            value = min(value, self.largest * self.value)
        self.n += n
        self.value += (value - self.value) * min(1.0, n / min(self.n, self.reach))


def time_average() -> Average:
    return Average(_TIMES, _LARGEST)


def share_average() -> Average:
    return Average(_SHARES)


@dataclass(slots=True)
class LengthCosts:
    """What was seen of calls of about one length.

    Attributes:
        miss_s: Seconds of calls of which no row was served.
        lookup_s: Of these seconds, those of the lookup.
        storing_s: Likewise of storing.
        hit_s: Seconds of calls of which all rows were served.
        n_served: Such calls, timed or not.
        plain_s: Seconds of bypassed calls.
        recording_s: Seconds that recording such a call takes.
        beside_s: Seconds beside calls that took the whole way.
        unbilled_s: Those since the latest such call whose hits count.
        hits: Share of rows served, of calls that took the whole way.
        repeats: Share of requests that were asked before.
        is_bypassed: Calls bypass the cache.
        n_since: Calls since calls were last bypassed, or came back.
        rest: Calls that are bypassed before it may return.
        n_recorded: Calls that may have been recorded.
        recordable: Calls that may be recorded now.
        per_call: Likewise, for each call that is bypassed.
        gap: Calls between the latest stretch of bypassed calls and the next.
        until: Calls until then; less than 1 within a stretch.
    """

    miss_s: Average = field(default_factory=time_average)
    lookup_s: Average = field(default_factory=time_average)
    storing_s: Average = field(default_factory=time_average)
    hit_s: Average = field(default_factory=time_average)
    n_served: int = 0
    plain_s: Average = field(default_factory=time_average)
    recording_s: Average = field(default_factory=time_average)
    beside_s: Average = field(default_factory=share_average)
    unbilled_s: float = 0.0
    hits: Average = field(default_factory=share_average)
    repeats: Average = field(default_factory=share_average)
    is_bypassed: bool = False
    n_since: int = 0
    rest: int = 0
    n_recorded: int = 0
    recordable: float = 1.0
    per_call: float = 0.0
    gap: int = _FIRST_GAP
    until: int = _FIRST_GAP

    @property
    def overhead_s(self) -> float:
        """What the cache adds to a miss."""
        told_s = self.lookup_s.value + self.storing_s.value
        return max(told_s, self.miss_s.value - self.plain_s.value) if self._has_compared else told_s

    @property
    def model_s(self) -> float:
        """What the model alone takes."""
        return self.plain_s.value if self._has_compared else self.miss_s.value - self.overhead_s

    @property
    def saved_s(self) -> float:
        """What a hit saves. Until there was one, it is taken to cost no more than its lookup."""
        return self.model_s - (self.hit_s.value if self.hit_s.n else self.lookup_s.value)

    @property
    def worthwhile_from(self) -> float:
        """The hit rate at which it breaks even."""
        cost_s = self.overhead_s + self.beside_s.value
        return cost_s / (self.saved_s + self.overhead_s) if self.saved_s > 0 else inf

    @property
    def is_cheap(self) -> bool:
        """Whether so little is lost that nothing need be won; hits may come yet."""
        return self.saved_s > 0 and self.overhead_s + self.beside_s.value <= _CHEAP * self.model_s

    def serves(self, share: float) -> bool:
        """Whether a call of which that share of rows is held takes less time than the model, as far as is known."""
        saved_s, overhead_s = self.saved_s, self.overhead_s
        return saved_s > 0 and share * saved_s > (1 - share) * overhead_s

    def bill(self) -> None:
        """Take in a call that took the whole way: what was done beside is its own."""
        self.beside_s.add(self.unbilled_s)
        self.unbilled_s = 0.0

    def add_miss(self, times: Times) -> None:
        """Take in what a call took that computed all its rows."""
        self.miss_s.add(times.whole_s)
        self.lookup_s.add(times.lookup_s)
        self.storing_s.add(times.storing_s)

    def count_bypassed(self) -> None:
        """Count a bypassed call: it allows others to be recorded."""
        if self.recordable < 2:
            self.recordable += self.per_call

    def time(self, plain_s: float, recording_s: float | None) -> None:
        """Take in what a bypassed call took, and what recording it took, if it was recorded."""
        self.plain_s.add(plain_s)
        if recording_s is not None:
            self.recording_s.add(recording_s)
        if self.recording_s.value > 0:
            self.per_call = _RECORDING * self.model_s / self.recording_s.value

    def is_compared(self) -> bool:
        """Whether the next call is bypassed, to be compared with."""
        self.until -= 1
        if self.until > 0:
            return False
        if self.until <= 1 - _STRETCH:
            self.gap = self.until = min(2 * self.gap, _LAST_GAP)
        return True

    @property
    def _has_compared(self) -> bool:
        return self.plain_s.n >= _STRETCH

    def bypass(self, patience: int) -> None:
        """Bypass calls from now on: longer than last time, unless the return stood for more than twice as long."""
        has_stood = self.n_since > 2 * self.rest
        self.rest = patience if has_stood else min(2 * self.rest, KNOWN)
        self.is_bypassed, self.n_since = True, 0

    def come_back(self) -> None:
        """Take the whole way again; hits of what is asked from now on decide."""
        self.hits = share_average()
        self.is_bypassed, self.n_since = False, 0
