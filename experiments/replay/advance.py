"""Thresholds chosen in advance, as a calibration chooses its limit, for any method that compares vectors.

    A and B   requests that are stored; each one's similarity to its nearest other gives the thresholds, strictest first
    C         tests them in that order with an exact bound until the first fails; the last that passed is used
    later     served from A and B only (frozen), or from all computed requests as well (growing, without a bound)

So a response cache is held to the same claim as llmcache, by the same tests on the same requests.

Sizes: M requests (a unit each), F vector width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from experiments.replay.replay import Replay, Units, replay
from llmcache.lab import (
    Doubles,
    HoldoutOutcome,
    OperatingPoint,
    RiskTarget,
    candidate_limits,
    choose_limit,
    split,
    try_limits,
)

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
