"""An alarm that rings when a rate exceeds its limit, and with a small, known probability if it never does.

The alarm is a mixture martingale. Gamblers bet that the rate is over its limit; at or under the limit their bets are
fair or worse. So the probability that their total wealth ever reaches 1 / alpha times what they began with is alpha at
most (Ville 1939; Waudby-Smith and Ramdas 2024, section 4). When it does, the alarm rings.

Long before, the alarm is *suspicious*, and requests are checked `CLOSER` times as often. The bets stay fair, since that
depends on earlier requests alone.

Sizes: E gamblers, J bets each.
"""

from collections import Counter
from math import ceil, log, log1p

import numpy as np

from llmcache.reuse.calibration.bounds import mixed, stakes
from llmcache.support.arrays import Doubles

EPOCH = 500  # requests between the starts of two gamblers: the longest delay before one starts after the rate changes
CLOSER = 20  # factor on the probability of a check while the alarm is suspicious
WATCH = 100  # requests between looks at whether suspicion lasts; a new alarm is suspicious until the first look
_MUCH = 20.0  # log wealth beyond any that is compared
_STEADY = 100  # epochs of that length; each later one is a hundredth of all requests before it
_RECENT, _THINNED = 128, 16  # the latest 128 epochs all keep their gambler; of older epochs, every 16th does


def epoch_of(n: int) -> int:
    """Return the epoch of request `n`; both count from 0."""
    steady = _STEADY * EPOCH
    return n // EPOCH if n < steady else _STEADY + int(log(n / steady) / log1p(1 / _STEADY))


class Alarm:
    """Rings when a rate that may change exceeds a limit; if it never does, with probability `alpha` at most.

    On each request, gamblers bet part of their wealth that it has the event. A gambler who bets from the beginning has
    lost nearly all by the time of a late change. So a gambler starts with every epoch; number e gets a share
    1 / (e (e + 1)) of the initial wealth, and all shares sum to 1. The caller holds a lock.

    Stakes are fixed, so wealth depends on counts alone. Most old gamblers give up their wealth, which never raises the
    total.
    """

    def __init__(self, limit: float, floor: float, alpha: float) -> None:
        """Begin without requests.

        Args:
            limit: The largest acceptable rate.
            floor: The least probability with which a request is checked for the event.
            alpha: Chance of ringing although the rate never exceeds `limit`.
        """
        self.n = 0  # requests
        self.is_suspicious = True  # at first, and while a gambler has at least twice what it began with
        self._by_epoch: Counter[int] = Counter()  # requests
        self._found: Counter[tuple[int, float]] = Counter()  # events, by epoch and weight
        self._limit = limit
        self._floor = floor
        self._alpha = alpha
        self._stakes = stakes(limit * floor / 4)  # the least is the best at a rate a quarter over the limit
        self._lost = np.log1p(-self._stakes)

    def see(self) -> int:
        """Add a request, which counts 0 until an event is found in it; return its number."""
        number = self.n
        self._by_epoch[epoch_of(number)] += 1
        self.n += 1
        if self.is_suspicious and self.n % WATCH == 0:
            self._compare()
        return number

    def found(self, number: int, weight: float) -> bool:
        """Count an event found in a request that was checked with probability 1 / `weight`; return whether it rings.

        It may be found long after the request: until then the request counts 0, which never favours a gambler.
        """
        self._found[epoch_of(number), weight] += 1
        return self._compare()

    def _compare(self) -> bool:
        """Decide on suspicion; return whether the gamblers' total wealth has reached 1 / alpha."""
        wealth, shares = self.wealth()
        n_bets = len(self._stakes)
        self.is_suspicious = bool(np.exp(np.minimum(wealth, _MUCH)).sum(axis=1).max() >= 2 * n_bets)
        return mixed((wealth + shares).ravel(), n_bets) >= log(1 / self._alpha)

    def wealth(self) -> tuple[Doubles, Doubles]:
        """Return log wealth (E, J), where each bet begins with 1, and the gamblers' log shares in the total (E, 1)."""
        n_epochs = max(1, len(self._by_epoch))
        n_bets = np.array([[self._by_epoch[epoch]] for epoch in range(n_epochs)], np.float64)
        gained = np.zeros((n_epochs, len(self._stakes)))
        found = np.array([(*kind, n) for kind, n in self._found.items()], np.float64).reshape(-1, 3)
        won = np.log(1 - self._stakes + self._stakes * found[:, 1:2] / self._limit) - self._lost
        np.add.at(gained, found[:, 0].astype(np.int64), found[:, 2:] * won)
        n_bets, gained = (np.cumsum(counts[::-1], axis=0)[::-1] for counts in (n_bets, gained))  # from each epoch on
        e = np.arange(1.0, n_epochs + 1)
        kept = (e > n_epochs - _RECENT) | (e % _THINNED == 1)
        return (gained + n_bets * self._lost)[kept], -np.log(e * (e + 1))[kept, None]

    def needed(self, rate: float) -> int | None:
        """Return the expected number of requests until the alarm if the rate rises to `rate` now; None if no bet grows.

        Wald's estimate. With the least probability p, it takes 1 / (p rate) requests until an event is found. Then the
        probability is c = `CLOSER` p, and a share q = c rate of requests shows an event. A bet of stake s grows by
        g(s) = q log(1 - s + s / (c limit)) + (1 - q) log(1 - s) per request. The best of the J bets of the next
        gambler, number e, begins with 1 / (J e (e + 1)) and must reach 1 / alpha, which takes
        log(J e (e + 1) / alpha) / max g(s) requests. It starts after one epoch at most.
        """
        closer = min(1.0, CLOSER * self._floor)
        q = closer * rate
        growth = q * np.log(1 - self._stakes + self._stakes / (closer * self._limit)) + (1 - q) * self._lost
        if growth.max() <= 0:
            return None
        e, wait = epoch_of(self.n) + 2, max(EPOCH, self.n // _STEADY) + 1 / (self._floor * rate)
        return ceil(wait + log(len(self._stakes) * e * (e + 1) / self._alpha) / float(growth.max()))
