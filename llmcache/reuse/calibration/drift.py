"""Tests whether requests are still like those of the calibration, from what lookups find. Nothing is recomputed.

The test is a mixture martingale. A gambler bets on events that should be no more frequent than they were on C (part C
of the calibration, which nothing was learned from). The bets are fair as long as requests are like those of C, so a
large gain is improbable, and shows drift. Bets on many events, with several stakes, are averaged; the average is fair,
too. A new gambler starts with every request, so that a late change is found as fast as an early one. Their total is, on
average, at most the number of requests at any time: an e-detector (Shiryaev and Roberts; Shin, Ramdas and Rinaldo,
"E-detectors", 2024).

    features   of a request: its risk, the similarity of its chosen source, its forecast class; through the risk,
               whether it is served at all
    events     a feature is at most an edge, or over it; the edges are quantiles on C. Classes are ordered by rarity,
               and in six other orders, which separate classes of equal rarity. "No repeat of a source" is one more
    null       no event is more probable than the upper limit of its share on C, which is a sample, too

Repeats of sources are left out on both sides: they are served their own answers, however many come, and C may hold
none, as in a cache that learns from requests it computed. Only their becoming rarer than on C is detected: the bound
counts them among all requests, so with fewer of them more of the other answers may change than it says.

A request counts once in a block of as many distinct requests as C had. So frequent repeats are no drift, as on C.

Sizes: J events, the last one "no repeat of a source"; S stakes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from llmcache.reuse.calibration.bounds import share_upper
from llmcache.reuse.sources import Choice
from llmcache.support.arrays import Floats

_QUANTILES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
_STAKES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.85)
# The fractional parts of ranks times these numbers give orders that are nearly independent of each other.
_ORDERS = (0.6180339887, 0.7548776662, 0.5698402910, 0.8191725134, 0.6710436067, 0.5497004779)
_UNKNOWN = (-1.0,) * (1 + len(_ORDERS))  # the places of a class that was not learned
_ERROR = 0.01  # chance that any share is over its upper limit
_BETWEEN_FALSE_ALARMS = 2_000_000  # requests, at least, on average: 1 % in 20,000
BATCH = 20  # requests after which bets are settled


class Features(NamedTuple):
    """The quantities of a request that are compared."""

    risk: float  # of its chosen source; infinite if no source may serve, -infinite for a repeat of a source
    similarity: float  # of that source, -1 to 1; -1 if none was found
    forecast: int  # the forecast class, or the largest component of the forecast output

    @property
    def is_repeat(self) -> bool:
        """Whether the request is a repeat of a source; then no other feature is compared."""
        return self.risk == -inf


def features_of(choice: Choice | None, forecast: Floats) -> Features:
    """Return the features of a request that repeats no source, from its choice and the forecast of its output (C,)."""
    expected = int(forecast.argmax())
    if choice is None:
        return Features(inf, -1.0, expected)
    similarity = -1.0 if choice.similarity is None else choice.similarity
    return Features(choice.risk_unquarantined, similarity, expected)


def features_of_source(forecast: Floats) -> Features:
    return Features(-inf, 1.0, int(forecast.argmax()))


@dataclass(frozen=True, slots=True)
class Profile:
    """The distribution of features on C."""

    n: int  # distinct requests, without repeats of sources
    classes: tuple[int, ...]  # forecast classes, rarest first
    edges: tuple[tuple[float, ...], ...]  # by kind of feature: risks, similarities, places of the class in each order
    counts: tuple[tuple[int, ...], ...]  # how many features are at most each edge
    n_repeats: int  # distinct sources that were repeated


def profile(features: Mapping[str, Features], learned: Sequence[int], limit: float) -> Profile:
    """Return the profile of the features of C, given by key.

    `learned` are the forecasts of the requests learned from; `limit`, the largest allowed risk, is one more edge.
    """
    # From `learned`: the order of classes must not depend on C.
    classes = tuple(name for name, _ in reversed(Counter(learned).most_common()))
    places = _places(classes)
    new = [_to_numbers(seen, places) for seen in features.values() if not seen.is_repeat]
    kinds = list(zip(*new, strict=True)) if new else [()] * (2 + len(_UNKNOWN))
    edges = tuple(_edges(kind, *((limit,) if i == 0 else ())) for i, kind in enumerate(kinds))
    return Profile(len(new), classes, edges, tuple(map(tuple, _count(new, edges))), len(features) - len(new))


def _places(classes: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Return the rank of each class, and its places in the other orders."""
    return {name: (float(rank), *(rank * order % 1 for order in _ORDERS)) for rank, name in enumerate(classes, start=1)}


def _to_numbers(features: Features, places: Mapping[int, tuple[float, ...]]) -> tuple[float, ...]:
    """Return the features as numbers, one of each kind: risk, similarity, and the places of the class."""
    return features.risk, features.similarity, *places.get(features.forecast, _UNKNOWN)


def _count(numbers: Sequence[Sequence[float]], edges: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return how many numbers of requests are at most each edge, by kind of number."""
    by_kind = np.array(numbers, np.float64).reshape(len(numbers), len(edges)).T
    return [(column[:, None] <= kind).sum(axis=0).tolist() for column, kind in zip(by_kind, edges, strict=True)]


class DriftDetector:
    """Compares requests with a profile. The caller holds a lock."""

    def __init__(self, profile: Profile) -> None:
        """Begin without requests."""
        n, n_repeats = profile.n, profile.n_repeats
        at_most = np.concatenate([np.array(counts, np.int64) for counts in profile.counts])
        shown = np.concatenate([at_most, n - at_most])  # a feature is at most an edge, or beyond it
        delta = _ERROR / (len(shown) + 1)
        limits = np.array([share_upper(int(k), n, delta) for k in shown] + [share_upper(n, n + n_repeats, delta)])
        stakes = np.array(_STAKES)
        self._lost = np.log1p(-stakes)  # (S,)
        self._gained = np.log1p(stakes * (1 / limits[:, None] - 1)) - self._lost  # (J, S), beyond `_lost`
        self._wealth = np.zeros_like(self._gained)
        self._places = _places(profile.classes)
        self._edges = profile.edges
        self._block = n, n + n_repeats
        #: Keys of the current block, which do not count again.
        self.seen: set[str] = set()
        self._n_new = 0  # of these, not repeats of sources

    def see(self, batch: Mapping[str, Features]) -> bool:
        """Settle the bets on `BATCH` requests, given by key; return whether requests are found to be unlike those of C.

        They are once the bets' total wealth is implausible for requests like those of C.
        """
        if self._n_new >= self._block[0] and len(self.seen) >= self._block[1]:
            self.forget()
        new = [features for features in batch.values() if not features.is_repeat]
        n_new, n_all = len(new), len(batch)
        self.seen.update(batch)
        self._n_new += n_new
        counted = _count([_to_numbers(features, self._places) for features in new], self._edges)
        at_most = np.array([count for counts in counted for count in counts], np.int64)
        events = np.concatenate([at_most, n_new - at_most, [n_new]])[:, None]
        n_bets = np.full_like(events, n_new)
        n_bets[-1] = n_all
        self._wealth += n_bets / self._wealth.size
        self._wealth *= np.exp(events * self._gained + n_bets * self._lost)
        return float(self._wealth.sum()) >= _BETWEEN_FALSE_ALARMS

    def forget(self) -> None:
        """Begin a new block: requests seen so far may count again."""
        self.seen.clear()
        self._n_new = 0


def _edges(features: Sequence[float], *others: float) -> tuple[float, ...]:
    """Return edges at quantiles of the features, and `others`, ascending; only finite ones."""
    finite = sorted(feature for feature in features if isfinite(feature))
    among = [finite[int(share * (len(finite) - 1))] for share in _QUANTILES] if finite else []
    return tuple(sorted({float(edge) for edge in (*among, *others) if -inf < edge < inf}))
