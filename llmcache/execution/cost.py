"""Is the cache worthwhile? Times that were measured decide, for each length of call, whether the cache is asked at all.

What the cache costs: each call is read and looked up, and what it misses is stored. What it saves: the layers of a hit.
A layer's time grows with the tokens of a call and a lookup's hardly does, so times are kept by tokens, padding and all
rows included, in steps of a factor of two. With `overhead` = lookup + storing, the cache pays where

    hit rate * (model - hit)  >  (1 - hit rate) * overhead + beside

where `beside` is what else calls take for the cache's sake: what the audit does in them, what is read of answers. Below
that hit rate calls bypass the cache. One in 64 takes the whole way all the same, so that times and hit rate stay fresh,
and so does each call whose requests are held. A hash is kept of every request, which tells how many come back and could
have been served. As soon as hits or hashes say that it would pay, calls take the whole way again, and hits decide anew.
`docs/architecture.md` has the constants.

What the model takes alone is a miss without lookup and storing, until it was seen: in bypassed calls, of which there
are short stretches where reuse is calibrated. From then on `overhead` is all that a miss takes longer.

Nothing here reads a clock, a tensor or a model: `meter.py` does.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from llmcache.execution.length_costs import KNOWN, Average, LengthCosts, Times, share_average
from llmcache.stats import Cost
from llmcache.threads import forkable

logger = logging.getLogger("llmcache")

#: Requests of a length before its calls are bypassed: 5 % of hits, where a small encoder breaks even, are 13 +- 3.5.
PATIENCE = 256
#: The same with a threshold `tau`: who is similar enough comes with the entries, and nothing else can tell whether it
#: will. At half a millisecond a request, as many cost one second in the life of a cache.
PATIENCE_OF_TAU = 2048
_SOONER = 8  # patience by so much shorter where nothing but repeats is served, and bypassed calls are recorded
_FEW = 8  # patience by so much shorter for a length whose requests are rare, where those of all lengths have used it up
PROBE = 64  # of bypassed calls, one in so many takes the whole way: 10 % of overhead are then 0.2 % of all time
_FREELY = 256  # calls of all lengths that are recorded before that is asked
_EVERY = 32  # of bypassed calls, one in so many is timed
_RARE = 8  # probes are as much rarer where calls are recorded: what repeats is seen without


class Verdict(NamedTuple):
    """Whether a call is to take the whole way.

    Attributes:
        is_worthwhile: It is.
        is_probe: It is the one in 64 that does in any case.
        is_foretold: It does since its requests are held.
        is_recorded: It is bypassed, and may be recorded.
        is_timed: It is bypassed, and is to be timed.
        is_compared: It is bypassed only so that what the model takes alone is known.
    """

    is_worthwhile: bool
    is_probe: bool
    is_foretold: bool = False
    is_recorded: bool = False
    is_timed: bool = False
    is_compared: bool = False


def none_held(hashes: Sequence[int]) -> int:
    """For callers that hold nothing."""
    return 0


class CostModel:
    """Decides which calls are worth a lookup. Thread-safe."""

    def __init__(self, depth: int, patience: int = PATIENCE) -> None:
        """Begin without times: until there are some, every call takes the whole way.

        Args:
            depth: Layers of the trunk.
            patience: Requests of a length before calls may be bypassed, at least 1; an eighth once all lengths
                had as many.
        """
        self._depth = depth
        self._patience = patience
        # One slow call must not decide: so many times are the least, and what an accelerator has by then.
        self._fewest_times = max(1, patience // PROBE)
        self._lock = forkable(threading.Lock())
        self.n_let_pass = 0
        self.restart()

    def restart(self) -> None:
        """Forget all that was seen: what can be served has changed."""
        with self._lock:
            self._buckets: defaultdict[int, LengthCosts] = defaultdict(LengthCosts)
            self._hits = share_average()  # of all lengths
            self.has_bypassed = False  # calls of some length are bypassed, or were since it began anew
            self._n_free = _FREELY
        self.forget()

    def recount(self) -> None:
        """Count hits and repeats anew; what calls take stays known."""
        with self._lock:
            self.n_let_pass = 0
            self._hits = share_average()
            for bucket in self._buckets.values():
                bucket.n_served, bucket.hits, bucket.repeats = 0, share_average(), share_average()

    def forget(self) -> None:
        """Forget which requests were asked."""
        with self._lock:
            self._recent: set[int] = set()
            self._older: set[int] = set()

    def judge(
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
            held: `hashes -> how many of these requests can be served`; asked of calls that would be bypassed.
            compares: Have short stretches of calls bypassed, so that what the model takes alone is known.
            searches: Others than repeats may be served, which only calls that take the whole way tell.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            bucket.n_since += 1
            if hashes:
                bucket.repeats.add(sum(map(self._came_before, hashes)) / n_rows, n_rows)
            if not bucket.is_bypassed:
                is_probe = bucket.n_since % PROBE == 0
                if compares and bucket.is_compared():
                    # Noted, as it would have been stored; that comes after what is timed, and touches little memory.
                    return Verdict(False, False, is_recorded=True, is_timed=True, is_compared=True)
                return Verdict(True, is_probe)
            is_probe = bucket.n_since % (PROBE if searches or not bucket.n_recorded else _RARE * PROBE) == 0
            rate = max(bucket.hits.value, bucket.repeats.value)
            if bucket.n_since < bucket.rest or rate <= (worthwhile_from := bucket.worthwhile_from):
                if is_probe or not hashes:
                    return Verdict(is_probe, is_probe)
                n_held = held(hashes)
                serves = n_held > 0 and bucket.serves(n_held / n_rows)
                bucket.count_bypassed()
                is_recorded = not serves and self._may_record(bucket)
                bucket.n_recorded += is_recorded
                return Verdict(serves, False, serves, is_recorded, bucket.n_since % _EVERY == 0)
            bucket.come_back()
        _log("serves again", n_tokens, rate, worthwhile_from)
        return Verdict(True, is_probe)

    def is_bypassed(self, n_tokens: int) -> bool:
        """Whether calls of so many tokens, at least 1, are bypassed now."""
        with self._lock:
            bucket = self._buckets.get(n_tokens.bit_length())
            return bucket is not None and bucket.is_bypassed

    def lets_pass(self, n_tokens: int, request: int) -> bool:
        """Whether a call of one request is bypassed, and nothing more is to be done: so are most of a bypassed length.

        Those that do are counted here, in `n_let_pass`.

        Args:
            n_tokens: As for `judge`, which is asked where this is False, and only then.
            request: The hash of its tokens.
        """
        with self._lock:
            bucket = self._buckets.get(n_tokens.bit_length())
            if bucket is None or not bucket.is_bypassed or request in self._recent or request in self._older:
                return False
            if self._n_free or bucket.recordable >= 1 or (bucket.n_since + 1) % _EVERY == 0:
                return False
            bucket.n_since += 1
            bucket.recordable += bucket.per_call
            bucket.repeats.add(0.0)
            self._came_before(request)
            self.n_let_pass += 1
            return True

    def spent(self, n_tokens: int, seconds: float) -> None:
        """Take in what was done beside the latest call that took the whole way, or before the next one."""
        with self._lock:
            self._buckets[n_tokens.bit_length()].unbilled_s += seconds

    def passed(self, n_tokens: int, seconds: float, recording_s: float | None = None) -> None:
        """Take in what a bypassed call took, and what recording it took, if it was recorded."""
        with self._lock:
            self._buckets[n_tokens.bit_length()].time(seconds, recording_s)

    def took(
        self,
        n_tokens: int,
        n_rows: int,
        n_hits: int,
        times: Times | None,
        is_foretold: bool = False,
        would_record: Callable[[], bool] = bool,
    ) -> None:
        """Take in how a call came out that took the whole way.

        Args:
            n_tokens: As it was asked about.
            n_rows: Likewise.
            n_hits: Rows that were served.
            times: What it took; None where it was not timed.
            is_foretold: It took the whole way since its requests are held, which says nothing of others.
            would_record: Whether such a call would be recorded if it were bypassed, and only repeats are served.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            if not (is_foretold and bucket.is_bypassed):
                bucket.hits.add(n_hits / n_rows, n_rows)
                self._hits.add(n_hits / n_rows, n_rows)
                bucket.bill()
            bucket.n_served += n_hits == n_rows
            if times is not None and n_hits == n_rows:
                bucket.hit_s.add(times.whole_s)
            elif times is not None and n_hits == 0:  # what a batch costs that is served in part says nothing of either
                bucket.add_miss(times)
            # One that came back has all its patience: repeats spoke for it, which others know not of.
            patience = self._patience if bucket.rest else self._patience // _SOONER
            rate, worthwhile_from = self._rate(bucket, patience), bucket.worthwhile_from
            if bucket.is_bypassed or rate is None or bucket.miss_s.n < self._fewest_times:
                return
            if rate >= worthwhile_from or bucket.is_cheap:
                return
            if patience < self._patience and not would_record():
                if (rate := self._rate(bucket, self._patience)) is None or rate >= worthwhile_from:
                    return
                patience = self._patience
            bucket.bypass(patience)
            self.has_bypassed = True
        _log("is bypassed", n_tokens, rate, worthwhile_from)

    def computed(self, n_tokens: int, times: Times | None) -> None:
        """Take in a call whose requests were all computed; `took` was told of them by the one that looked them up.

        Args:
            n_tokens: Of all rows, padding included, at least 1.
            times: What it took; None where it was not timed.
        """
        with self._lock:
            bucket = self._buckets[n_tokens.bit_length()]
            if not bucket.hits.n:  # else calls that look up are billed, which are as many
                bucket.bill()
            if times is not None:
                bucket.add_miss(times)

    def rows(self) -> tuple[Cost, ...]:
        """What was measured, shortest calls first."""
        with self._lock:
            return tuple(self._row(bits, bucket) for bits, bucket in sorted(self._buckets.items()))

    def _may_record(self, bucket: LengthCosts) -> bool:
        """Whether a call may be recorded, which counts as one that is."""
        if bucket.recordable >= 1:
            bucket.recordable -= 1
        elif self._n_free:
            self._n_free -= 1
        else:
            return False
        return True

    def _rate(self, bucket: LengthCosts, patience: int) -> float | None:
        """The hit rate of a length, None while it is not known; of a few requests that of all lengths counts, too."""
        if bucket.hits.n >= patience:
            return bucket.hits.value
        if not bucket.rest and bucket.hits.n >= patience // _FEW and self._hits.n >= patience:
            return max(bucket.hits.value, self._hits.value)
        return None

    def _row(self, bits: int, bucket: LengthCosts) -> Cost:
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
            saved_ms=bucket.n_served * bucket.saved_s * 1e3 if is_timed and bucket.hit_s.n else None,
        )

    def _came_before(self, request: int) -> bool:
        """Whether a request is known by its hash; it is from now on. Two halves, the older of which goes as a whole."""
        is_known = request in self._recent or request in self._older
        self._recent.add(request)
        if len(self._recent) >= KNOWN // 2:
            self._older, self._recent = self._recent, set()
        return is_known


def _ms(average: Average) -> float | None:
    return average.value * 1e3 if average.n else None


def _log(what: str, n_tokens: int, rate: float, worthwhile_from: float) -> None:
    """Tell of a turn; turns become rarer, so that this does not fill a log."""
    least = 1 << (n_tokens.bit_length() - 1)
    logger.info(
        "llmcache %s for calls of %d to %d tokens: %.1f %% of requests could be served; it is worthwhile %s",
        what,
        least,
        2 * least - 1,
        100 * rate,
        f"from {worthwhile_from:.1%}"
        if worthwhile_from < inf
        else "at no rate, since a hit takes longer than the model",
    )
