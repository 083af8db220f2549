"""Does it pay? Times that were measured decide, for each length of call, whether the cache is asked at all.

What the cache costs: each call is read and looked up, and what it misses is stored. What it saves: the layers of a hit.
A layer's time grows with the tokens of a call and a lookup's hardly does, so times are kept by tokens, padding and all
rows included, in steps of a factor of two. With `overhead` = lookup + storing, the cache pays where

    hit rate * (model - hit)  >  (1 - hit rate) * overhead

Below that hit rate calls go by the cache. One in 64 takes the whole way all the same, so that times and hit rate stay
fresh, and a hash is kept of every request, which tells how many come back and could have been served. As soon as either
says that it would pay, calls take the whole way again, and hits decide anew. `docs/design.md` gives the reasons.

Nothing here reads a clock, a tensor or a model: `meter.py` does.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

logger = logging.getLogger("llmcache")

#: Requests of a bucket before it may step aside: 5 % of hits, where a small encoder breaks even, are then 13 +- 3.5.
PATIENCE = 256
#: The same with a threshold `tau`: who is similar enough comes with the entries, and nothing else can tell whether it
#: will. At half a millisecond a request, as many cost one second in the life of a cache.
PATIENCE_OF_TAU = 2048
_FEW = 8  # patience by so much shorter for a length whose requests are rare, where those of all lengths have used it up
_PROBE = 64  # of calls that go by, one in so many takes the whole way: 10 % of overhead are then 0.2 % of all time
_TIMES = 64  # timed calls over which averages reach back, about
_SHARES = 256  # requests over which rates do
_LARGEST = 4.0  # a time counts at most so many averages: a codec's fit of seconds is not what the next call costs
_KNOWN = 65_536  # hashes kept; also the most calls that go by before it may return, past which none of them is known


@dataclass(frozen=True, slots=True)
class Cost:
    """What the cache costs and saves in calls of about one length. Times are recent averages; None: no such call.

    Attributes:
        tokens: Tokens of the smallest such call, all rows and padding included; the largest has less than twice that.
        lookup_ms: Of a miss: reading the request, fingerprint, search and decision.
        storing_ms: Of a miss: keeping its states and storing them.
        layer_ms: What a layer takes: what is left of a miss, by the number of layers. They are alike, a reuse mostly
            replaces all of them, and embeddings and final norm take about a hundredth.
        miss_ms: All of a miss.
        hit_ms: All of a hit: lookup, transfer of the state, and what of the model still runs.
        hit_rate: Share of requests served, of those that took the whole way.
        repeats: Share of all requests that were asked before; None where tokens are not on the host.
        pays_from: Hit rate from which the cache pays; None also where a hit takes longer than the model.
        is_aside: Such calls go by the cache.
    """

    tokens: int
    lookup_ms: float | None
    storing_ms: float | None
    layer_ms: float | None
    miss_ms: float | None
    hit_ms: float | None
    hit_rate: float | None
    repeats: float | None
    pays_from: float | None
    is_aside: bool


class Times(NamedTuple):
    """Seconds of one call: from the trunk's arguments to its output, and what of that lookup and storing took."""

    whole_s: float
    lookup_s: float
    storing_s: float


class Verdict(NamedTuple):
    """Whether a call is to take the whole way, and whether it is the one in 64 that does in any case."""

    pays: bool
    is_probe: bool


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
        hits: Share of rows served, of calls that took the whole way.
        repeats: Share of requests that were asked before.
        is_aside: Calls go by.
        n_since: Calls since it last stepped aside or returned.
        rest: Calls that go by before it may return.
    """

    miss_s: _Average = field(default_factory=_time)
    lookup_s: _Average = field(default_factory=_time)
    storing_s: _Average = field(default_factory=_time)
    hit_s: _Average = field(default_factory=_time)
    hits: _Average = field(default_factory=_share)
    repeats: _Average = field(default_factory=_share)
    is_aside: bool = False
    n_since: int = 0
    rest: int = 0

    @property
    def overhead_s(self) -> float:
        """What the cache adds to a miss."""
        return self.lookup_s.value + self.storing_s.value

    @property
    def model_s(self) -> float:
        """What the model alone takes."""
        return self.miss_s.value - self.overhead_s

    @property
    def pays_from(self) -> float:
        """The hit rate at which it breaks even. Until there was a hit, one is taken to cost no more than its lookup."""
        saved_s = self.model_s - (self.hit_s.value if self.hit_s.n else self.lookup_s.value)
        return self.overhead_s / (saved_s + self.overhead_s) if saved_s > 0 else inf

    def step_aside(self, patience: int) -> None:
        """Go by from now on: longer than last time, unless the return stood for more than twice as long as that."""
        has_stood = self.n_since > 2 * self.rest
        self.rest = patience if has_stood else min(2 * self.rest, _KNOWN)
        self.is_aside, self.n_since = True, 0

    def come_back(self) -> None:
        """Take the whole way again; hits of what is asked from now on decide."""
        self.hits = _share()
        self.is_aside, self.n_since = False, 0


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
        self.restart()

    def restart(self) -> None:
        """Forget all that was seen: what can be served has changed."""
        with self._lock:
            self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
            self._hits = _share()  # of all lengths
        self.forget()

    def forget(self) -> None:
        """Forget which requests were asked."""
        with self._lock:
            self._recent: set[int] = set()
            self._older: set[int] = set()

    def pays(self, n_tokens: int, n_rows: int, hashes: Sequence[int]) -> Verdict:
        """Whether a call is to take the whole way.

        Args:
            n_tokens: Of all rows, padding included, at least 1.
            n_rows: Requests, at least 1.
            hashes: Of the tokens of each; empty where reading them would cost too much.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            bucket.n_since += 1
            if hashes:
                bucket.repeats.add(sum(map(self._came_before, hashes)) / n_rows, n_rows)
            is_probe = bucket.n_since % _PROBE == 0
            if not bucket.is_aside:
                return Verdict(True, is_probe)
            rate = max(bucket.hits.value, bucket.repeats.value)
            if bucket.n_since < bucket.rest or rate <= (pays_from := bucket.pays_from):
                return Verdict(is_probe, is_probe)
            bucket.come_back()
        _log("serves again", n_tokens, rate, pays_from)
        return Verdict(True, is_probe)

    def took(self, n_tokens: int, n_rows: int, n_hits: int, times: Times | None) -> None:
        """Take in how a call came out that took the whole way.

        Args:
            n_tokens: As it was asked about.
            n_rows: Likewise.
            n_hits: Rows that were served.
            times: What it took; None where it was not timed.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            bucket.hits.add(n_hits / n_rows, n_rows)
            self._hits.add(n_hits / n_rows, n_rows)
            if times is not None and n_hits == n_rows:
                bucket.hit_s.add(times.whole_s)
            elif times is not None and n_hits == 0:  # what a batch costs that is served in part says nothing of either
                bucket.miss_s.add(times.whole_s)
                bucket.lookup_s.add(times.lookup_s)
                bucket.storing_s.add(times.storing_s)
            rate, pays_from = self._rate(bucket), bucket.pays_from
            if bucket.is_aside or rate is None or bucket.miss_s.n < self._fewest_times or rate >= pays_from:
                return
            bucket.step_aside(self._patience)
        _log("steps aside", n_tokens, rate, pays_from)

    def rows(self) -> tuple[Cost, ...]:
        """What was measured, shortest calls first."""
        with self._lock:
            return tuple(self._row(bits, bucket) for bits, bucket in sorted(self._buckets.items()))

    def _rate(self, bucket: _Bucket) -> float | None:
        """The hit rate of a length, None while it is not known; of a few requests that of all lengths counts, too."""
        if bucket.hits.n >= self._patience:
            return bucket.hits.value
        # One that came back has all its patience: repeats spoke for it, which others know not of.
        if not bucket.rest and bucket.hits.n >= self._patience // _FEW and self._hits.n >= self._patience:
            return max(bucket.hits.value, self._hits.value)
        return None

    def _row(self, bits: int, bucket: _Bucket) -> Cost:
        is_timed, pays_from = bucket.miss_s.n > 0, bucket.pays_from
        return Cost(
            tokens=1 << (bits - 1),
            lookup_ms=_ms(bucket.lookup_s),
            storing_ms=_ms(bucket.storing_s),
            layer_ms=bucket.model_s / self._depth * 1e3 if is_timed else None,
            miss_ms=_ms(bucket.miss_s),
            hit_ms=_ms(bucket.hit_s),
            hit_rate=bucket.hits.value if bucket.hits.n else None,
            repeats=bucket.repeats.value if bucket.repeats.n else None,
            pays_from=pays_from if is_timed and pays_from < inf else None,
            is_aside=bucket.is_aside,
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


def _log(what: str, n_tokens: int, rate: float, pays_from: float) -> None:
    """Tell of a turn; turns become rarer, so that this does not fill a log."""
    least = 1 << (n_tokens.bit_length() - 1)
    logger.info(
        "llmcache %s for calls of %d to %d tokens: %.1f %% of requests could be served; it pays %s",
        what,
        least,
        2 * least - 1,
        100 * rate,
        f"from {pays_from:.1%}" if pays_from < inf else "at no rate, since a hit takes longer than the model",
    )
