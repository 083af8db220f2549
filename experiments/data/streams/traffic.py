"""Traffic drawn from a pool of requests: some are frequent, some never occur, and popularity changes.

Real sets of labelled requests have no repeats, so no eviction policy could beat another on them. They also have no
order in time: an arrival defines one, in which the requests of a calibration may be unlike the later ones.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from pydantic import Field

from experiments.support.section import Section

_T = TypeVar("_T")


class Traffic(Section):
    n: int = Field(ge=1)  # requests to draw
    # Exponent of the Zipf law of popularity: 0 is uniform, 1 is typical of web traffic.
    skew: float = Field(default=1.0, ge=0.0)
    # Number of phases of equal length; popularity is reassigned in each. 1: it never changes.
    phases: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)  # of everything drawn


def draw(pool: Sequence[_T], traffic: Traffic) -> list[_T]:
    rng = random.Random(traffic.seed)
    weights = [1 / rank**traffic.skew for rank in range(1, len(pool) + 1)]
    ends = [round(traffic.n * phase / traffic.phases) for phase in range(traffic.phases + 1)]
    stream: list[_T] = []
    for begin, end in itertools.pairwise(ends):
        ranked = list(pool)
        rng.shuffle(ranked)
        stream += rng.choices(ranked, weights, k=end - begin)
    return stream


class Arrival(Section):
    # `shuffled`; `bursts`: intents come in bursts, each request once; `repeats`: requests are drawn repeatedly, by a
    # Zipf law.
    name: Literal["shuffled", "bursts", "repeats"]
    # For `bursts`: mean requests per burst of an intent; lengths are exponential.
    length: int = Field(default=100, ge=1)
    # For `bursts`: concurrent bursts, whose requests interleave at random.
    at_once: int = Field(default=3, ge=1)
    skew: float = Field(default=1.0, ge=0.0)  # for `repeats`: exponent of the law
    n: int | None = Field(default=None, ge=1)  # for `repeats`: requests to draw, by default the size of the pool


def arrange(pool: Sequence[_T], label_of: Callable[[_T], object], arrival: Arrival, seed: int) -> list[_T]:
    """Arrange or draw a stream of requests from a pool; `label_of` returns a request's intent."""
    if arrival.name == "repeats":
        return draw(pool, Traffic(n=arrival.n or len(pool), skew=arrival.skew, seed=seed))
    rng = random.Random(seed)
    shuffled = list(pool)
    rng.shuffle(shuffled)
    return _in_bursts(shuffled, label_of, arrival, rng) if arrival.name == "bursts" else shuffled


def _in_bursts(pool: Sequence[_T], label_of: Callable[[_T], object], arrival: Arrival, rng: random.Random) -> list[_T]:
    """Arrange each request once. The probability that an intent's burst is next grows with its remaining requests."""
    left: dict[object, list[_T]] = {}
    for request in pool:
        left.setdefault(label_of(request), []).append(request)
    going: list[list[_T]] = []
    stream: list[_T] = []
    while left or going:
        while left and len(going) < arrival.at_once:
            (label,) = rng.choices(list(left), [len(rest) for rest in left.values()])
            end = max(1, round(rng.expovariate(1 / arrival.length)))
            going.append(left[label][:end])
            left[label] = left[label][end:]
            if not left[label]:
                del left[label]
        burst = rng.choice(going)
        stream.append(burst.pop())
        going = [one for one in going if one]
    return stream
