"""An alarm that rings when a rate exceeds its limit, and hardly ever while it does not.

Sizes: E gamblers, J bets each.
"""

from collections import Counter
from math import ceil, log, log1p

import numpy as np

from llmcache.arrays import Doubles
from llmcache.calibration.bounds import mixed, stakes

EPOCH = 500  # requests between two gamblers: how late, at most, the next one sets out after the rate has changed
_STEADY = 100  # epochs of that length; later ones are each a hundredth of what came before
_RECENT, _THINNED = 128, 16  # of older epochs, one of so many has a gambler who goes on


def epoch_of(n: int) -> int:
    """Return the number of the epoch that request `n` lies in, from 0."""
    steady = _STEADY * EPOCH
    return n // EPOCH if n < steady else _STEADY + int(log(n / steady) / log1p(1 / _STEADY))


class Alarm:
    """Rings when a rate that may change exceeds a limit; while it never does, with probability `alpha` at most.

    Gamblers stake part of their wealth on each request: that it has the event. They would be paid fairly if the rate
    were at the limit, so all of them together become 1 / alpha times as rich with probability alpha at most
    (Ville 1939; Waudby-Smith and Ramdas 2024, section 4). One that has bet from the beginning has lost nearly all when
    the rate changes late. So one sets out with every epoch, number e with a share 1 / (e (e + 1)) of the money,
    which is 1 for all of them together. The caller holds a lock.

    Stakes are fixed, so wealth depends on counts alone. Most old gamblers give up what they have, which is never to
    their advantage.
    """

    def __init__(self, limit: float, floor: float, alpha: float) -> None:
        """Begin without requests.

        Args:
            limit: The largest rate in order.
            floor: The least probability with which an event is looked for.
            alpha: Chance of ringing while the rate is in order.
        """
        self.n = 0  # requests
        self._by_epoch: Counter[int] = Counter()  # requests
        self._found: Counter[tuple[int, float]] = Counter()  # events, by epoch and weight
        self._limit = limit
        self._floor = floor
        self._alpha = alpha
        self._stakes = stakes(limit * floor / 4)  # the best one at a rate a quarter over the limit
        self._lost = np.log1p(-self._stakes)

    def see(self) -> int:
        """Add a request, which counts 0 until an event is found in it, and return its number."""
        number = self.n
        self._by_epoch[epoch_of(number)] += 1
        self.n += 1
        return number

    def found(self, number: int, weight: float) -> None:
        """An event was found in a request, looked for with probability 1 / `weight`.

        It may be found long after: what is not audited yet counts as 0, which is never to a gambler's advantage.
        """
        self._found[epoch_of(number), weight] += 1

    def rings(self) -> bool:
        """Whether it rings."""
        return mixed(self.wealth().ravel(), len(self._stakes)) >= log(1 / self._alpha)

    def wealth(self) -> Doubles:
        """Return the log wealth of each bet of each gambler (E, J); all of them begin with 1 together."""
        latest = max(self._by_epoch, default=0)
        n_epochs = latest + 1
        n_bets, gained = np.zeros((n_epochs, 1)), np.zeros((n_epochs, len(self._stakes)))
        for epoch, n in self._by_epoch.items():
            n_bets[epoch] += n
        found = np.array([(*kind, n) for kind, n in self._found.items()], np.float64).reshape(-1, 3)
        won = np.log(1 - self._stakes + self._stakes * found[:, 1:2] / self._limit) - self._lost
        np.add.at(gained, found[:, 0].astype(np.int64), found[:, 2:] * won)
        n_bets, gained = (
            np.cumsum(one[::-1], axis=0)[::-1] for one in (n_bets, gained)
        )  # of an epoch, and of later ones
        e = np.arange(1, n_epochs + 1)[:, None]
        wealth: Doubles = gained + n_bets * self._lost - np.log(e * (e + 1.0))
        return wealth[[epoch > latest - _RECENT or epoch % _THINNED == 0 for epoch in range(n_epochs)]]

    def needed(self, rate: float) -> int | None:
        """Return the expected number of requests until it rings, if the rate rises now; None where no bet grows.

        Wald's estimate. Looked for with the least probability p, an event is seen in a share q = p rate of requests. A
        bet of stake s then grows by g(s) = q log(1 - s + s / (p limit)) + (1 - q) log(1 - s) a request. The best of J
        bets of the gamblers who set out next, number e, has 1 / (J e (e + 1)) of the money and needs 1 / alpha, which
        takes log(J e (e + 1) / alpha) / max g(s) requests; and it sets out after one epoch at most.
        """
        q = self._floor * rate
        growth = q * np.log(1 - self._stakes + self._stakes / (self._floor * self._limit)) + (1 - q) * self._lost
        if growth.max() <= 0:
            return None
        e, wait = epoch_of(self.n) + 2, max(EPOCH, self.n // _STEADY)
        return wait + ceil(log(len(self._stakes) * e * (e + 1) / self._alpha) / float(growth.max()))
