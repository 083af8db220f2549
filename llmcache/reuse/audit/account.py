"""The account of one calibration: draws hits for the audit and counts the verdicts.

A hit is drawn with a known probability: never under a floor, higher for risky hits, and higher for all hits while the
alarm is suspicious. A changed answer counts with the inverse of that probability, so the estimated rate of changed
answers over all requests is unbiased.

A drawn hit without a verdict counts against the claim. For the upper limit it counts as changed as soon as it is drawn.
For the alarm it counts as changed once recomputing it fails, or once more drawn hits wait than fit the queue.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from llmcache.reuse.audit.alarm import CLOSER, Alarm
from llmcache.reuse.audit.rate import Rate
from llmcache.support.arrays import Floats

BY_RISK = 2.5  # a hit at the limit is drawn 1 + this times as often as one without risk
MOST_WAITING = 1000  # queued hits; with more, drawn hits are computed in their own calls
_MOST_OPEN = MOST_WAITING + 200  # room for hits under way and calls that checked the queue earlier; older ones are lost


@dataclass(frozen=True, slots=True)
class AuditSample:
    """A drawn hit, with the weight of its verdict."""

    account: "AuditAccount"  # that drew it and counts its verdict
    number: int  # of the request
    weight: float  # inverse of the probability with which it was drawn
    scale: float = 1.0  # factor on the least probability


@dataclass(frozen=True, slots=True)
class Audited:
    """A row to compute and compare with its source's answer."""

    sample: AuditSample | None  # None for a row without a hit
    source: str  # key of the source, quarantined if the answer changed; "" without a hit
    answer: Floats | None  # signature (S,) of the source's answer at the time of the hit
    stands_for_all: bool  # drawn with the probability common to all rows, hits and misses


class AuditAccount:
    """Draws hits and counts their verdicts. The caller holds a lock."""

    def __init__(self, limit: float, floor: float, alpha: float, seed: int = 0) -> None:
        """Begin empty. `limit`, `floor`: see `Alarm`. `alpha`: chance of any false alarm, and of a wrong limit."""
        self.limit = limit
        self.rate = Rate(floor)
        self.alarm = Alarm(limit, floor, alpha)
        #: `n_drawn`, `n_recomputed`, `n_lost` and `n_changed`, as in `AuditStats`.
        self.counts: Counter[str] = Counter()
        self.has_rung = False
        self._floor = floor
        self._alpha = alpha
        self._random = random.Random(seed)
        self._open: dict[int, AuditSample] = {}  # without a verdict, by number, oldest first

    def see(self, share: float | None, scale: float = 1.0) -> AuditSample | None:
        """Count a request; return a sample if it is drawn for the audit.

        `share` is the risk of an approximate hit divided by the largest allowed risk, 0 to 1. It is None for all other
        requests, whose answers cannot have changed. `scale`, over 0 and at most 1, multiplies all probabilities: it may
        depend on everything before this request, but not on the request.
        """
        floor = scale * self._floor * (CLOSER if self.alarm.is_suspicious else 1)
        self.rate.see(scale)
        number = self.alarm.see()
        if share is None:
            return None
        chance = min(1.0, floor * (1 + BY_RISK * share))
        if not self.toss(chance):
            return None
        self.counts["n_drawn"] += 1
        sample = AuditSample(self, number, 1 / chance, scale)
        self.rate.draw(sample.weight, scale)
        self._open[number] = sample
        return sample

    def toss(self, chance: float) -> bool:
        return self._random.random() < chance

    def settle(self, sample: AuditSample, is_changed: bool) -> bool:
        """Add the verdict on a sample; return whether the alarm rings now. It rings once."""
        self.counts["n_recomputed"] += 1
        self.counts["n_changed"] += is_changed
        self.rate.settle(sample.weight, is_changed, sample.scale)
        was_open = self._open.pop(sample.number, None) is not None  # else `lose` has counted it as changed
        return is_changed and was_open and self._count_changed(sample)

    def lose(self, sample: AuditSample) -> bool:
        """Count a sample that will have no verdict as changed; return whether the alarm rings now."""
        if self._open.pop(sample.number, None) is None:
            return False
        self.counts["n_lost"] += 1
        return self._count_changed(sample)

    def lose_overdue(self) -> bool:
        """Lose the oldest samples beyond `_MOST_OPEN`; return whether the alarm rings now."""
        rings = False
        while len(self._open) > _MOST_OPEN:
            rings |= self.lose(next(iter(self._open.values())))
        return rings

    def withdraw(self, sample: AuditSample) -> None:
        """Cancel a sample whose hit was not served; its request counts as unchanged."""
        self._open.pop(sample.number, None)
        self.counts["n_drawn"] -= 1
        self.rate.settle(sample.weight, has_event=False, scale=sample.scale)

    def _count_changed(self, sample: AuditSample) -> bool:
        """Count a changed answer; return whether the alarm rings for the first time."""
        rings = self.alarm.found(sample.number, sample.weight) and not self.has_rung
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
