"""Traffic made from a pool of requests: some are asked often, some never, and what is popular changes.

Real sets of labelled requests repeat nothing, so that no eviction policy could do better than another on them. And they
have no order in time: an arrival gives them one, in which what a calibration sees first need not be like what follows.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from pydantic import Field

from experiments.support.section import Section

_T = TypeVar("_T")


class Traffic(Section):
    n: int = Field(ge=1)  # requests drawn
    # Exponent of the Zipf law of popularity: 0 asks all alike, 1 is what web traffic is like.
    skew: float = Field(default=1.0, ge=0.0)
    # How often popularity is dealt out anew, at equal distances; 1: it never changes.
    phases: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)  # of everything drawn


def draw(pool: Sequence[_T], traffic: Traffic) -> list[_T]:
    """A stream of requests from a pool of distinct ones."""
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
    # `shuffled`; `bursts`: intents come in bursts, each request once; `repeats`: requests are drawn again and again, by
    # a Zipf law.
    name: Literal["shuffled", "bursts", "repeats"]
    # Of `bursts`: requests of an intent that come in one, in the mean; lengths are exponential.
    length: int = Field(default=100, ge=1)
    # Of `bursts`: intents whose bursts go on at the same time, their requests in turns that are drawn.
    at_once: int = Field(default=3, ge=1)
    skew: float = Field(default=1.0, ge=0.0)  # of `repeats`: exponent of the law
    n: int | None = Field(default=None, ge=1)  # of `repeats`: requests drawn; by default as many as the pool has


def arrange(pool: Sequence[_T], label_of: Callable[[_T], object], arrival: Arrival, seed: int) -> list[_T]:
    """A stream of requests from a pool; `label_of` tells a request's intent."""
    if arrival.name == "repeats":
        return draw(pool, Traffic(n=arrival.n or len(pool), skew=arrival.skew, seed=seed))
    rng = random.Random(seed)
    shuffled = list(pool)
    rng.shuffle(shuffled)
    return _in_bursts(shuffled, label_of, arrival, rng) if arrival.name == "bursts" else shuffled


def _in_bursts(pool: Sequence[_T], label_of: Callable[[_T], object], arrival: Arrival, rng: random.Random) -> list[_T]:
    """Each request once. An intent's next burst begins the likelier, the more requests of it are left."""
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
