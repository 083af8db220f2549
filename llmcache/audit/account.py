"""The account of one calibration: draws hits to be audited, and counts the verdicts.

A hit is drawn with a known probability: higher at first, higher for risky hits, never under a floor. A changed answer
counts with the inverse of that probability, so the estimated rate of changed answers, over all requests, has no bias.

A hit that was drawn and is never audited counts against the claim: as changed for the upper limit from the moment
that it is drawn, and for the alarm once computing it has failed, or more hits than fit the queue were drawn since.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from llmcache.arrays import Floats
from llmcache.audit.alarm import Alarm
from llmcache.audit.rate import Rate

N_FIRST = 500  # requests at the beginning of an account: what does not hold mostly does not from the start
_FIRST = 5  # times the floor, with which they are audited
MOST_WAITING = 1000  # hits that wait to be audited; with more, hits that are drawn are computed in their calls
_MOST_OPEN = MOST_WAITING + 200  # some are under way, or were drawn by calls that asked before: what is older is lost


@dataclass(frozen=True, slots=True)
class AuditSample:
    """A drawn hit, with the weight of its verdict."""

    account: "AuditAccount"  # where it was drawn, and its verdict belongs
    number: int  # of the request
    weight: float  # inverse of the probability with which it was drawn
    ease: float = 1.0  # what the least probability was multiplied by


@dataclass(frozen=True, slots=True)
class Audited:
    """A row whose own answer is to be computed and compared."""

    sample: AuditSample | None  # None for a row that nothing was found for
    source: str  # key of the stored request that is to blame if the answer is another; "" without a hit
    answer: Floats | None  # signature (S,) of that request's answer, at that time
    stands_for_all: bool  # drawn with the probability that all rows have, hits and misses


class AuditAccount:
    """Draws hits, and keeps the account of their verdicts. The caller holds a lock."""

    def __init__(self, limit: float, floor: float, alpha: float, seed: int = 0) -> None:
        """Begin empty; `limit` and `floor` as of `Alarm`; `alpha`: chance of any false alarm, and of a wrong limit."""
        self.limit = limit
        self.rate = Rate(floor)
        self.alarm = Alarm(limit, floor, alpha)
        #: `n_drawn`, `n_recomputed`, `n_lost` and `n_changed`, as of `AuditStats`.
        self.counts: Counter[str] = Counter()
        self.has_rung = False
        self._floor = floor
        self._alpha = alpha
        self._random = random.Random(seed)
        self._open: dict[int, AuditSample] = {}  # without a verdict, by number, oldest first

    def see(self, share: float | None, ease: float = 1.0) -> AuditSample | None:
        """Count a request, and return a sample if it is drawn to be audited.

        `share` is the risk of an approximate hit over the largest that is allowed, 0 to 1; None of all other requests,
        whose answers cannot have changed. `ease` multiplies all probabilities, over 0, at most 1: it may follow from
        all that was before this request, not from the request.
        """
        floor = min(1.0, _FIRST * self._floor) if self.rate.n < N_FIRST else self._floor
        floor *= ease
        self.rate.see(ease)
        number = self.alarm.see()
        if share is None:
            return None
        chance = min(1.0, floor * (1 + share))
        if not self.toss(chance):
            return None
        self.counts["n_drawn"] += 1
        sample = AuditSample(self, number, 1 / chance, ease)
        self.rate.draw(sample.weight, ease)
        self._open[number] = sample
        return sample

    def toss(self, chance: float) -> bool:
        return self._random.random() < chance

    def settle(self, sample: AuditSample, is_changed: bool) -> bool:
        """Add the verdict on a sample; return whether the alarm rings now, which it does once."""
        self.counts["n_recomputed"] += 1
        self.counts["n_changed"] += is_changed
        self.rate.settle(sample.weight, is_changed, sample.ease)
        was_open = self._open.pop(sample.number, None) is not None  # else it counts as changed already
        return is_changed and was_open and self._strikes(sample)

    def lose(self, sample: AuditSample) -> bool:
        """Count a sample that will never be audited as changed; return whether the alarm rings now."""
        if self._open.pop(sample.number, None) is None:
            return False
        self.counts["n_lost"] += 1
        return self._strikes(sample)

    def lose_overdue(self) -> bool:
        """Give up samples that have waited too long, as `lose`; return whether the alarm rings now."""
        rings = False
        while len(self._open) > _MOST_OPEN:
            rings |= self.lose(next(iter(self._open.values())))
        return rings

    def withdraw(self, sample: AuditSample) -> None:
        """Take back a sample whose hit was not served."""
        self._open.pop(sample.number, None)
        self.counts["n_drawn"] -= 1
        self.rate.settle(sample.weight, has_event=False, ease=sample.ease)

    def _strikes(self, sample: AuditSample) -> bool:
        """Count a changed answer; return whether the alarm rings for the first time."""
        self.alarm.found(sample.number, sample.weight)
        rings = not self.has_rung and self.alarm.rings()
        self.has_rung |= rings
        return rings

    def figures(self) -> dict[str, Any]:
        """Return figures by their names in `AuditStats`; each limit holds at all times with probability 1 - `alpha`."""
        return {
            "n_requests": self.rate.n,
            **self.counts,
            "rate": self.rate.mean,
            "lower": self.rate.lower(self._alpha),
            "upper": self.rate.upper(self._alpha),
            "needed": self.alarm.needed(2 * self.limit),
        }
