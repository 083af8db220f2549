"""Does it pay? Times that were measured decide, for each length of call, whether the cache is asked at all.

What the cache costs: each call is read and looked up, and what it misses is stored. What it saves: the layers of a hit.
A layer's time grows with the tokens of a call and a lookup's hardly does, so times are kept by tokens, padding and all
rows included, in steps of a factor of two. With `overhead` = lookup + storing, the cache pays where

    hit rate * (model - hit)  >  (1 - hit rate) * overhead + beside

where `beside` is what else calls take for the cache's sake: what the audit does in them, what is read of answers. Below
that hit rate calls go by the cache. One in 64 takes the whole way all the same, so that times and hit rate stay fresh,
and so does each call whose requests are held. A hash is kept of every request, which tells how many come back and could
have been served. As soon as hits or hashes say that it would pay, calls take the whole way again, and hits decide anew.
`docs/architecture.md` has the constants.

What the model takes alone is a miss without lookup and storing, until it was seen: in calls that go by, of which there
are short stretches where reuse is calibrated. From then on `overhead` is all that a miss takes longer.

Nothing here reads a clock, a tensor or a model: `meter.py` does.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from llmcache.stats import Cost

logger = logging.getLogger("llmcache")

#: Requests of a bucket before it may step aside: 5 % of hits, where a small encoder breaks even, are then 13 +- 3.5.
PATIENCE = 256
#: The same with a threshold `tau`: who is similar enough comes with the entries, and nothing else can tell whether it
#: will. At half a millisecond a request, as many cost one second in the life of a cache.
PATIENCE_OF_TAU = 2048
_SOONER = 8  # patience by so much shorter where nothing but repeats is served, and calls that go by are noted
_FEW = 8  # patience by so much shorter for a length whose requests are rare, where those of all lengths have used it up
_PROBE = 64  # of calls that go by, one in so many takes the whole way: 10 % of overhead are then 0.2 % of all time
_CHEAP = 0.01  # of the model's time: it does not step aside from a cost of less
_NOTING = 0.0025  # of the time of calls that go by: what noting some of them may take
_FREELY = 256  # calls of all lengths that are noted before that is asked
_EVERY = 32  # of calls that go by, one in so many is timed
_RARE = 8  # probes are as much rarer where calls are noted: what repeats is seen without
_STRETCH = 16  # calls that go by in a row, to be compared with
_FIRST_GAP, _LAST_GAP = 256, 1024  # calls between two stretches: each gap is twice the one before
_TIMES = 64  # timed calls over which averages reach back, about
_SHARES = 256  # requests over which rates do
_LARGEST = 4.0  # a time counts at most so many averages: a codec's fit of seconds is not what the next call costs
_KNOWN = 65_536  # hashes kept; also the most calls that go by before it may return, past which none of them is known


class Times(NamedTuple):
    """Seconds of one call: from the trunk's arguments to its output, and what of that lookup and storing took."""

    whole_s: float
    lookup_s: float
    storing_s: float


class Verdict(NamedTuple):
    """Whether a call is to take the whole way.

    Attributes:
        pays: It is.
        is_probe: It is the one in 64 that does in any case.
        is_foretold: It does since its requests are held.
        is_noted: It goes by, and may be noted.
        is_timed: It goes by, and is to be timed.
        is_compared: It goes by only so that what the model takes alone is known.
    """

    pays: bool
    is_probe: bool
    is_foretold: bool = False
    is_noted: bool = False
    is_timed: bool = False
    is_compared: bool = False


def none_held(hashes: Sequence[int]) -> int:
    """For callers that hold nothing."""
    return 0


@dataclass(slots=True)
class _Average:
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


def _time() -> _Average:
    return _Average(_TIMES, _LARGEST)


def _share() -> _Average:
    return _Average(_SHARES)


@dataclass(slots=True)
class _Bucket:
    """What was seen of calls of about one length.

    Attributes:
        miss_s: Seconds of calls of which no row was served.
        lookup_s: Of these seconds, those of the lookup.
        storing_s: Likewise of storing.
        hit_s: Seconds of calls of which all rows were served.
        plain_s: Seconds of calls that went by.
        noting_s: Seconds that noting such a call takes.
        beside_s: Seconds beside calls that took the whole way.
        unbilled_s: Those since the latest such call whose hits count.
        hits: Share of rows served, of calls that took the whole way.
        repeats: Share of requests that were asked before.
        is_bypassed: Calls go by.
        n_since: Calls since it last stepped aside or returned.
        rest: Calls that go by before it may return.
        n_noted: Calls that may have been noted.
        notable: Calls that may be noted now.
        per_call: Likewise, for each call that goes by.
        gap: Calls between the latest stretch of calls that go by and the next.
        until: Calls until then; less than 1 within a stretch.
    """

    miss_s: _Average = field(default_factory=_time)
    lookup_s: _Average = field(default_factory=_time)
    storing_s: _Average = field(default_factory=_time)
    hit_s: _Average = field(default_factory=_time)
    plain_s: _Average = field(default_factory=_time)
    noting_s: _Average = field(default_factory=_time)
    beside_s: _Average = field(default_factory=_share)
    unbilled_s: float = 0.0
    hits: _Average = field(default_factory=_share)
    repeats: _Average = field(default_factory=_share)
    is_bypassed: bool = False
    n_since: int = 0
    rest: int = 0
    n_noted: int = 0
    notable: float = 1.0
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

    def go_by(self) -> None:
        """Count a call that goes by: it allows others to be noted."""
        if self.notable < 2:
            self.notable += self.per_call

    def time(self, plain_s: float, noting_s: float | None) -> None:
        """Take in what a call took that went by, and what noting it took, if it was noted."""
        self.plain_s.add(plain_s)
        if noting_s is not None:
            self.noting_s.add(noting_s)
        if self.noting_s.value > 0:
            self.per_call = _NOTING * self.model_s / self.noting_s.value

    def is_compared(self) -> bool:
        """Whether the next call goes by, to be compared with."""
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
        """Go by from now on: longer than last time, unless the return stood for more than twice as long as that."""
        has_stood = self.n_since > 2 * self.rest
        self.rest = patience if has_stood else min(2 * self.rest, _KNOWN)
        self.is_bypassed, self.n_since = True, 0

    def come_back(self) -> None:
        """Take the whole way again; hits of what is asked from now on decide."""
        self.hits = _share()
        self.is_bypassed, self.n_since = False, 0


class CostModel:
    """Decides which calls are worth a lookup. Thread-safe."""

    def __init__(self, depth: int, patience: int = PATIENCE) -> None:
        """Begin without times: until there are some, every call takes the whole way.

        Args:
            depth: Layers of the trunk.
            patience: Requests of a length before it may step aside, at least 1; an eighth once all lengths had as many.
        """
        self._depth = depth
        self._patience = patience
        # One slow call must not decide: so many times are the least, and what an accelerator has by then.
        self._fewest_times = max(1, patience // _PROBE)
        self._lock = threading.Lock()
        self.n_let_pass = 0
        self.restart()

    def restart(self) -> None:
        """Forget all that was seen: what can be served has changed."""
        with self._lock:
            self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
            self._hits = _share()  # of all lengths
            self.has_aside = False  # calls of some length go by, or did since it began anew
            self._n_free = _FREELY
        self.forget()

    def forget(self) -> None:
        """Forget which requests were asked."""
        with self._lock:
            self._recent: set[int] = set()
            self._older: set[int] = set()

    def pays(
        self,
        n_tokens: int,
        n_rows: int,
        hashes: Sequence[int],
        held: Callable[[Sequence[int]], int] = none_held,
        compares: bool = False,
        searches: bool = True,
    ) -> Verdict:
        """Whether a call is to take the whole way.

        Args:
            n_tokens: Of all rows, padding included, at least 1.
            n_rows: Requests, at least 1.
            hashes: Of the tokens of each; empty where reading them would cost too much.
            held: `hashes -> how many of these requests can be served`; asked of calls that would go by.
            compares: Have short stretches of calls go by, so that what the model takes alone is known.
            searches: Others than repeats may be served, which only calls that take the whole way tell.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            bucket.n_since += 1
            if hashes:
                bucket.repeats.add(sum(map(self._came_before, hashes)) / n_rows, n_rows)
            if not bucket.is_bypassed:
                is_probe = bucket.n_since % _PROBE == 0
                if compares and bucket.is_compared():
                    # Noted, as it would have been stored; that comes after what is timed, and touches little memory.
                    return Verdict(False, False, is_noted=True, is_timed=True, is_compared=True)
                return Verdict(True, is_probe)
            is_probe = bucket.n_since % (_PROBE if searches or not bucket.n_noted else _RARE * _PROBE) == 0
            rate = max(bucket.hits.value, bucket.repeats.value)
            if bucket.n_since < bucket.rest or rate <= (worthwhile_from := bucket.worthwhile_from):
                if is_probe or not hashes:
                    return Verdict(is_probe, is_probe)
                n_held = held(hashes)
                serves = n_held > 0 and bucket.serves(n_held / n_rows)
                bucket.go_by()
                is_noted = not serves and self._may_note(bucket)
                bucket.n_noted += is_noted
                return Verdict(serves, False, serves, is_noted, bucket.n_since % _EVERY == 0)
            bucket.come_back()
        _log("serves again", n_tokens, rate, worthwhile_from)
        return Verdict(True, is_probe)

    def lets_pass(self, n_tokens: int, request: int) -> bool:
        """Whether a call of one request goes by, and nothing more is to be done: most calls do while they are aside.

        Those that do are counted here, in `n_let_pass`.

        Args:
            n_tokens: As for `pays`, which is asked where this is False, and only then.
            request: The hash of its tokens.
        """
        with self._lock:
            bucket = self._buckets.get(n_tokens.bit_length())
            if bucket is None or not bucket.is_bypassed or request in self._recent or request in self._older:
                return False
            if self._n_free or bucket.notable >= 1 or (bucket.n_since + 1) % _EVERY == 0:
                return False
            bucket.n_since += 1
            bucket.notable += bucket.per_call
            bucket.repeats.add(0.0)
            self._came_before(request)
            self.n_let_pass += 1
            return True

    def spent(self, n_tokens: int, seconds: float) -> None:
        """Take in what was done beside the latest call that took the whole way, or before the next one."""
        with self._lock:
            self._buckets[n_tokens.bit_length()].unbilled_s += seconds

    def passed(self, n_tokens: int, seconds: float, noting_s: float | None = None) -> None:
        """Take in what a call took that went by, and what noting it took, if it was noted."""
        with self._lock:
            self._buckets[n_tokens.bit_length()].time(seconds, noting_s)

    def took(
        self,
        n_tokens: int,
        n_rows: int,
        n_hits: int,
        times: Times | None,
        is_foretold: bool = False,
        would_note: Callable[[], bool] = bool,
    ) -> None:
        """Take in how a call came out that took the whole way.

        Args:
            n_tokens: As it was asked about.
            n_rows: Likewise.
            n_hits: Rows that were served.
            times: What it took; None where it was not timed.
            is_foretold: It took the whole way since its requests are held, which says nothing of others.
            would_note: Whether such a call would be noted if it went by, and others than repeats are not served.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            if not (is_foretold and bucket.is_bypassed):
                bucket.hits.add(n_hits / n_rows, n_rows)
                self._hits.add(n_hits / n_rows, n_rows)
                bucket.beside_s.add(bucket.unbilled_s)
                bucket.unbilled_s = 0.0
            if times is not None and n_hits == n_rows:
                bucket.hit_s.add(times.whole_s)
            elif times is not None and n_hits == 0:  # what a batch costs that is served in part says nothing of either
                bucket.miss_s.add(times.whole_s)
                bucket.lookup_s.add(times.lookup_s)
                bucket.storing_s.add(times.storing_s)
            # One that came back has all its patience: repeats spoke for it, which others know not of.
            patience = self._patience if bucket.rest else self._patience // _SOONER
            rate, worthwhile_from = self._rate(bucket, patience), bucket.worthwhile_from
            if bucket.is_bypassed or rate is None or bucket.miss_s.n < self._fewest_times:
                return
            if rate >= worthwhile_from or bucket.is_cheap:
                return
            if patience < self._patience and not would_note():
                if (rate := self._rate(bucket, self._patience)) is None or rate >= worthwhile_from:
                    return
                patience = self._patience
            bucket.bypass(patience)
            self.has_aside = True
        _log("steps aside", n_tokens, rate, worthwhile_from)

    def rows(self) -> tuple[Cost, ...]:
        """What was measured, shortest calls first."""
        with self._lock:
            return tuple(self._row(bits, bucket) for bits, bucket in sorted(self._buckets.items()))

    def _may_note(self, bucket: _Bucket) -> bool:
        """Whether a call may be noted, which counts as one that is."""
        if bucket.notable >= 1:
            bucket.notable -= 1
        elif self._n_free:
            self._n_free -= 1
        else:
            return False
        return True

    def _rate(self, bucket: _Bucket, patience: int) -> float | None:
        """The hit rate of a length, None while it is not known; of a few requests that of all lengths counts, too."""
        if bucket.hits.n >= patience:
            return bucket.hits.value
        if not bucket.rest and bucket.hits.n >= patience // _FEW and self._hits.n >= patience:
            return max(bucket.hits.value, self._hits.value)
        return None

    def _row(self, bits: int, bucket: _Bucket) -> Cost:
        is_timed, worthwhile_from = bucket.miss_s.n > 0, bucket.worthwhile_from
        return Cost(
            tokens=1 << (bits - 1),
            lookup_ms=_ms(bucket.lookup_s),
            storing_ms=_ms(bucket.storing_s),
            layer_ms=bucket.model_s / self._depth * 1e3 if is_timed else None,
            plain_ms=_ms(bucket.plain_s),
            beside_ms=_ms(bucket.beside_s),
            miss_ms=_ms(bucket.miss_s),
            hit_ms=_ms(bucket.hit_s),
            hit_rate=bucket.hits.value if bucket.hits.n else None,
            repeats=bucket.repeats.value if bucket.repeats.n else None,
            worthwhile_from=worthwhile_from if is_timed and worthwhile_from < inf else None,
            is_bypassed=bucket.is_bypassed,
        )

    def _came_before(self, request: int) -> bool:
        """Whether a request is known by its hash; it is from now on. Two halves, the older of which goes as a whole."""
        is_known = request in self._recent or request in self._older
        self._recent.add(request)
        if len(self._recent) >= _KNOWN // 2:
            self._older, self._recent = self._recent, set()
        return is_known


def _ms(average: _Average) -> float | None:
    return average.value * 1e3 if average.n else None


def _log(what: str, n_tokens: int, rate: float, worthwhile_from: float) -> None:
    """Tell of a turn; turns become rarer, so that this does not fill a log."""
    least = 1 << (n_tokens.bit_length() - 1)
    logger.info(
        "llmcache %s for calls of %d to %d tokens: %.1f %% of requests could be served; it pays %s",
        what,
        least,
        2 * least - 1,
        100 * rate,
        f"from {worthwhile_from:.1%}"
        if worthwhile_from < inf
        else "at no rate, since a hit takes longer than the model",
    )
