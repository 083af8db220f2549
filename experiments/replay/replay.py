"""Replay of caches at many thresholds, and thresholds chosen in advance.

What a cache serves depends only on tokens, vectors and the order of requests, so one recorded pass of the model
(`recording`) is enough for a whole sweep. Misses are stored and nothing is evicted. Speed cannot be replayed: it is
measured live or left empty.

A threshold is chosen as a calibration chooses its limit, so a response cache is held to the same claim as llmcache:

    A and B   requests that are stored; each one's similarity to its nearest other gives the thresholds, strictest first
    C         tests them in that order with an exact bound until the first fails; the last that passed is used
    later     served from A and B only (frozen), or from all computed requests as well (growing, without a bound)

Sizes: N requests, M rows (a request with four choices has four), F vector width, K thresholds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from experiments.methods.base import BYPASSED, COMPUTED, is_hit
from llmcache.lab import (
    Doubles,
    Floats,
    HoldoutOutcome,
    OperatingPoint,
    RiskTarget,
    candidate_limits,
    choose_limit,
    split,
    try_limits,
)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of lookup and storage: rows, or whole requests."""

    request: NDArray[np.int64]  # number of each unit's request, ascending, (M,)
    vectors: Floats  # float32 (M, F); zero vectors are neither searched nor found
    # Equal for equal units; None if there are no exact hits
    keys: Sequence[bytes] | None = None
    lengths: NDArray[np.int64] | None = None  # a unit serves only units of its length (M,); None: any length
    first_searched: int = 0  # first request that is searched for; before it, the fingerprint was still being fitted
    # Numbers of the only units that are stored; None: all computed units
    sources: NDArray[np.int64] | None = None
    compare: Callable[[Floats, Floats], Floats] = np.matmul  # `(vectors (B, F), vector (F,)) -> similarity (B,)`


@dataclass(frozen=True, slots=True)
class Replay:
    served: NDArray[np.str_]  # what serves each unit: `exact`, `near`, `computed` or `bypassed`, (M,)
    source: NDArray[np.int64]  # number of the unit's source, or its own if computed, (M,)
    similarity: Floats  # cosine to the nearest stored unit, (M,); NaN if none was stored


def replay(units: Units, thresholds: Sequence[float]) -> list[Replay]:
    """Decide every unit in order at every threshold; a threshold above 1 allows no near hits."""
    vectors, m, k = units.vectors, len(units.vectors), len(thresholds)
    limits = np.array(thresholds, dtype=np.float32)
    stored = np.zeros((k, m), dtype=bool)
    source = np.tile(np.arange(m), (k, 1))
    nearest = np.full((k, m), np.nan, dtype=np.float32)
    served = np.full((k, m), COMPUTED, dtype="<U8")
    seen: dict[bytes, list[int]] = {}
    may_serve = np.ones(m, bool) if units.sources is None else np.isin(np.arange(m), units.sources)
    for begin, end in _groups(units.request):
        for i in range(begin, end):
            if not vectors[i].any():
                served[:, i] = BYPASSED
            elif begin and units.request[i] >= units.first_searched:
                usable = stored[:, :begin]
                if units.lengths is not None:
                    usable = usable & (units.lengths[:begin] == units.lengths[i])
                similarity = np.where(usable, units.compare(vectors[:begin], vectors[i]), -np.inf)
                best = similarity.argmax(axis=1)
                found = similarity[np.arange(k), best]
                nearest[:, i] = np.where(np.isfinite(found), found, np.nan)
                is_near = found >= limits
                source[is_near, i], served[is_near, i] = best[is_near], "near"
            if units.keys is not None and units.request[i] >= units.first_searched:
                for earlier in seen.get(units.keys[i], []):  # the latest stored unit serves
                    source[stored[:, earlier], i], served[stored[:, earlier], i] = earlier, "exact"
        for i in range(begin, end):  # rows of one request do not see each other
            stored[:, i] = may_serve[i] & (source[:, i] == i) & (served[:, i] != BYPASSED)
            if units.keys is not None:
                seen.setdefault(units.keys[i], []).append(i)
    return [Replay(served[row], source[row], nearest[row]) for row in range(k)]


def _groups(request: NDArray[np.int64]) -> list[tuple[int, int]]:
    begins = np.flatnonzero(np.diff(request, prepend=-1)).tolist()
    return list(zip(begins, [*begins[1:], len(request)], strict=True))


def rows_served(replay: Replay) -> float:
    """Return the share of units served from storage: below the hit rate if requests are served in part."""
    return float(is_hit(replay.served).mean())


def by_request(units: Units, replay: Replay) -> NDArray[np.str_]:
    """Return what served each request (N,): the least exact of its rows."""
    rank = {BYPASSED: 0, COMPUTED: 1, "exact": 2, "near": 3}
    names = np.array(list(rank))
    values = np.array([rank[str(served)] for served in replay.served])
    begins = [begin for begin, _ in _groups(units.request)]
    found: NDArray[np.str_] = names[np.maximum.reduceat(values, begins)]
    return found


#: Whether a source's answer differs from the request's own: `(request, source) -> bool`.
IsChanged = Callable[[int, int], bool]


def choose_threshold(
    units: Units, n_first: int, risk_target: RiskTarget, is_changed: IsChanged
) -> tuple[OperatingPoint | None, NDArray[np.int64]]:
    """Return the loosest threshold that meets the claim, negated as a risk limit, and the requests that are stored."""
    learned, tested = (np.array(part) for part in split(n_first, risk_target))
    _, among = nearest(units, learned, learned)
    limits = candidate_limits(-among.astype(np.float64))
    sources, similarity = nearest(units, tested, learned)
    pairs = zip(tested.tolist(), sources.tolist(), strict=True)
    loss = np.array([is_changed(*pair) for pair in pairs], np.float64)
    trial = HoldoutOutcome(-similarity.astype(np.float64), loss)
    return choose(trial, limits, risk_target), learned


def choose(seen: HoldoutOutcome, limits: Doubles, risk_target: RiskTarget) -> OperatingPoint | None:
    """Return the loosest limit that meets the claim on requests not learned from; None if none does."""
    return choose_limit(try_limits(seen, limits, risk_target.max_drop, risk_target.delta), risk_target.max_drop)


def nearest(
    units: Units, numbers: Sequence[int] | NDArray[np.int64], stored: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return for each request (M,) the nearest stored one other than itself, and their similarity."""
    source, similarity = np.zeros(len(numbers), np.int64), np.full(len(numbers), -inf, np.float32)
    vectors = units.vectors[stored]
    for i, number in enumerate(numbers):
        alike = np.where(stored == number, -inf, units.compare(vectors, units.vectors[number]))
        best = int(alike.argmax())
        source[i], similarity[i] = stored[best], alike[best]
    return source, similarity


def serve(units: Units, n_first: int, setting: OperatingPoint | None, stored: NDArray[np.int64], grows: bool) -> Replay:
    """Replay all requests; later ones are served at the threshold, and computed ones are stored if `grows`."""
    threshold = inf if setting is None else -setting.limit
    asked = replace(units, keys=None, first_searched=n_first, sources=None if grows else stored)
    (again,) = replay(asked, (threshold,))
    return again
