"""An alarm that rings when a rate exceeds its limit, and hardly ever while it does not.

Sizes: E gamblers, J bets each.
"""

from math import ceil, log

import numpy as np

from llmcache.calibration.bounds import mixed, stakes

EPOCH = 500  # requests between two gamblers: how late, at most, the next one sets out after the rate has changed


class Alarm:
    """Rings when a rate that may change exceeds a limit; while it never does, with probability `alpha` at most.

    Gamblers stake part of their wealth on each request: that it has the event. They would be paid fairly if the rate
    were at the limit, so all of them together become 1 / alpha times as rich with probability alpha at most
    (Ville 1939; Waudby-Smith and Ramdas 2024, section 4). One that has bet from the beginning has lost nearly all when
    the rate changes late. So one sets out every `EPOCH` requests, number e with a share 1 / (e (e + 1)) of the money,
    which is 1 for all of them together. The caller holds a lock.
    """

    def __init__(self, limit: float, floor: float, alpha: float) -> None:
        """`limit`: the largest rate in order; `floor`: the least probability with which an event is looked for."""
        self.n = 0
        self._limit = limit
        self._floor = floor
        self._alpha = alpha
        self._stakes = stakes(limit * floor / 4)  # the best one at a rate a quarter over the limit
        self._lost = np.log1p(-self._stakes)
        self._gained = np.zeros((0, len(self._stakes)))  # by each bet, over what it would have with no event (E, J)

    def see(self) -> int:
        """Take in a request, which counts 0 until an event is found in it, and return its number."""
        self.n += 1
        return self.n - 1

    def found(self, number: int, weight: float) -> bool:
        """An event was found in a request, looked for with probability 1 / `weight`; whether the alarm rings now.

        It may be found long after: what is not audited yet counts as 0, which is never to a gambler's advantage.
        """
        e = np.arange(1, self.n // EPOCH + 2)
        new = np.zeros((len(e) - len(self._gained), len(self._stakes)))
        self._gained = np.vstack([self._gained, new])
        won = np.log(1 - self._stakes + self._stakes * weight / self._limit) - self._lost
        self._gained[: number // EPOCH + 1] += won
        n_bets = self.n - (e - 1) * EPOCH
        wealth = self._gained + n_bets[:, None] * self._lost - np.log(e * (e + 1.0))[:, None]
        return mixed(wealth.ravel(), len(self._stakes)) >= log(1 / self._alpha)

    def needed(self, rate: float) -> int | None:
        """Requests after which it can be expected to ring once the rate has risen now; None where no bet grows.

        Wald's estimate. Looked for with the least probability p, an event is seen in a share q = p rate of requests. A
        bet of stake s then grows by g(s) = q log(1 - s + s / (p limit)) + (1 - q) log(1 - s) a request. The best of J
        bets of the gamblers who set out next, number e, has 1 / (J e (e + 1)) of the money and needs 1 / alpha, which
        takes log(J e (e + 1) / alpha) / max g(s) requests; and it sets out after one epoch at most.
        """
        q = self._floor * rate
        growth = q * np.log(1 - self._stakes + self._stakes / (self._floor * self._limit)) + (1 - q) * self._lost
        if growth.max() <= 0:
            return None
        e = self.n // EPOCH + 2
        return EPOCH + ceil(log(len(self._stakes) * e * (e + 1) / self._alpha) / float(growth.max()))
