"""Tests whether requests are still like those of the calibration, from what lookups find. Nothing is recomputed.

A certificate is about requests that are drawn like those it was measured on. Of each request some marks are compared
with those on C (part C of the calibration, which nothing was learned from): its risk, the similarity of who
would serve it, the class that is forecast, and with the risk whether it would be served at all.

Repeats of sources are left out on both sides: they are served their own answers, however many come, and C may hold
none, as it does where a cache learned from what it computed. Only that they are fewer than on C is looked for: the
bound counts them among all requests, so without them more of the others' answers may change than it says.

    profile    edges are laid at quantiles of C; a mark beyond an edge, or not, is an event with a share on C. Classes
               are laid out by how rare they are, and in six other orders, which part those that are equally so. That
               a request is no repeat of a source is one more event
    null       no event has a larger probability than the upper limit of its share: C is a sample, too
    bets       on each event, with several stakes, that it has: each is worth more than it was with probability small
    detector   a bet sets out with every request (Shiryaev and Roberts; e-detectors: Shin, Ramdas, Rinaldo 2024): all
               together are worth the number of requests on average, at most, whenever one looks, while the null holds

A request counts once in a block of as many different ones as C had. So requests that come again and again are no sign
of anything, as they are not on C.

Sizes: J events, that of being no repeat of a source last; S stakes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from llmcache.arrays import Floats
from llmcache.calibration.bounds import share_upper
from llmcache.decide import Choice

_QUANTILES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
_STAKES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.7, 0.85)
# Ranks times these, less the whole part, are orders that have little to do with one another.
_ORDERS = (0.6180339887, 0.7548776662, 0.5698402910, 0.8191725134, 0.6710436067, 0.5497004779)
_ERROR = 0.01  # chance that a share is over its upper limit, all together
_RARELY = 2_000_000  # requests between two false alarms, at least, on average: 1 % in 20,000
BATCH = 20  # requests after which bets are settled


class Marks(NamedTuple):
    """The quantities of a request that are compared."""

    risk: float  # of the one that would serve it; infinite where nobody may, -infinite of a repeat of a source
    similarity: float  # of that one, -1 to 1; -1 where nobody was found
    forecast: int  # the class that is expected, or the largest component of what is; -1 where nothing is

    @property
    def is_repeat(self) -> bool:
        """Whether the request is a repeat of a source; then no other mark is compared."""
        return self.risk == -inf


def marks_of(choice: Choice | None, forecast: Floats | None) -> Marks:
    """Return the marks of a request that is not a source, from its choice and the forecast of its output (C,)."""
    expected = -1 if forecast is None else int(forecast.argmax())
    if choice is None:
        return Marks(inf, -1.0, expected)
    return Marks(choice.risk_unquarantined, choice.similarity, expected)


def marks_of_source(forecast: Floats | None) -> Marks:
    return Marks(-inf, 1.0, -1 if forecast is None else int(forecast.argmax()))


@dataclass(frozen=True, slots=True)
class Profile:
    """The distribution of marks on C."""

    n: int  # different requests, repeats of sources left out
    classes: tuple[int, ...]  # forecasts, the rarest first; empty where nothing is forecast
    edges: tuple[tuple[float, ...], ...]  # by kind of mark: risks, similarities, places of the class in each order
    counts: tuple[tuple[int, ...], ...]  # how many marks are at most each edge
    n_repeats: int  # sources that came again


def profile(marks: Mapping[str, Marks], learned: Sequence[int], limit: float) -> Profile:
    """Lay edges through the marks of requests of C, by key; `limit` is the largest risk that is allowed."""
    # Those learned from: the order of classes must not come from C.
    classes = tuple(name for name, _ in reversed(Counter(learned).most_common()) if name >= 0)
    spread = _Spread(classes)
    new = [spread(one) for one in marks.values() if not one.is_repeat]
    kinds = list(zip(*new, strict=True)) if new else [()] * spread.n_kinds
    edges = tuple(_edges(kind, *((limit,) if i == 0 else ())) for i, kind in enumerate(kinds))
    counts = _Counts(edges)
    for numbers in new:
        counts.add(numbers)
    return Profile(len(new), classes, edges, tuple(map(tuple, counts.take())), len(marks) - len(new))


class _Spread:
    """Turns marks into numbers, one of each kind."""

    def __init__(self, classes: Sequence[int]) -> None:
        self._none = (-1.0,) * (1 + len(_ORDERS) if classes else 0)  # the place of all classes that are not known
        self._places = {
            name: (float(rank), *(rank * order % 1 for order in _ORDERS)) for rank, name in enumerate(classes, start=1)
        }

    def __call__(self, marks: Marks) -> tuple[float, ...]:
        """Risk, similarity, and the places of the class."""
        return marks.risk, marks.similarity, *self._places.get(marks.forecast, self._none)

    @property
    def n_kinds(self) -> int:
        return 2 + len(self._none)


class _Counts:
    """Counts numbers between edges, kind by kind."""

    def __init__(self, edges: Sequence[Sequence[float]]) -> None:
        self._edges = edges
        self._counts = [[0] * (len(kind) + 1) for kind in edges]

    def add(self, numbers: Sequence[float]) -> None:
        for edges, counts, number in zip(self._edges, self._counts, numbers, strict=True):
            counts[bisect_left(edges, number)] += 1

    def take(self) -> list[list[int]]:
        """How many numbers were at most each edge, by kind; then begin anew."""
        taken = [list(accumulate(counts))[:-1] for counts in self._counts]
        self._counts = [[0] * len(counts) for counts in self._counts]
        return taken


class DriftDetector:
    """Compares requests with one profile. The caller holds a lock."""

    def __init__(self, profile: Profile) -> None:
        """Begin without requests."""
        n, n_repeats = profile.n, profile.n_repeats
        at_most = np.concatenate([np.array(counts, np.int64) for counts in profile.counts])
        shown = np.concatenate([at_most, n - at_most])  # a mark is at most an edge, or beyond it
        delta = _ERROR / (len(shown) + 1)
        limits = np.array([share_upper(int(k), n, delta) for k in shown] + [share_upper(n, n + n_repeats, delta)])
        stakes = np.array(_STAKES)
        self._lost = np.log1p(-stakes)  # (S,)
        self._gained = np.log1p(stakes * (1 / limits[:, None] - 1)) - self._lost  # (J, S), over what is lost
        self._worth = np.zeros_like(self._gained)
        self._spread = _Spread(profile.classes)
        self._counts = _Counts(profile.edges)
        self._block = n, n + n_repeats
        #: Keys of the block under way, which do not count again.
        self.seen: set[str] = set()
        self._n_new = 0  # of those, no repeats

    def see(self, batch: Mapping[str, Marks]) -> bool:
        """Settle the bets on `BATCH` requests, given by key; return whether requests are found to be unlike those of C.

        So they are once the bets are worth more than is plausible for like requests.
        """
        if self._n_new >= self._block[0] and len(self.seen) >= self._block[1]:
            self.forget()
        new = [marks for marks in batch.values() if not marks.is_repeat]
        n_new, n_all = len(new), len(batch)
        self.seen.update(batch)
        self._n_new += n_new
        for marks in new:
            self._counts.add(self._spread(marks))
        at_most = np.array([count for counts in self._counts.take() for count in counts], np.int64)
        events = np.concatenate([at_most, n_new - at_most, [n_new]])[:, None]
        n_asked = np.full_like(events, n_new)
        n_asked[-1] = n_all
        self._worth += n_asked / self._worth.size
        self._worth *= np.exp(events * self._gained + n_asked * self._lost)
        return float(self._worth.sum()) >= _RARELY

    def forget(self) -> None:
        """Forget which requests were seen; they may count again."""
        self.seen.clear()
        self._n_new = 0


def _edges(marks: Sequence[float], *others: float) -> tuple[float, ...]:
    """Edges through marks, and others, rising; only finite ones."""
    finite = sorted(mark for mark in marks if isfinite(mark))
    among = [finite[int(share * (len(finite) - 1))] for share in _QUANTILES] if finite else []
    return tuple(sorted({float(edge) for edge in (*among, *others) if -inf < edge < inf}))
