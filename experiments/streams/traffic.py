"""Traffic made from a pool of requests: some are asked often, some never, and what is popular changes.

Real sets of labelled requests repeat nothing, so that no eviction policy could do better than another on them.
"""

import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

from pydantic import Field

from experiments.section import Section

_T = TypeVar("_T")


class Traffic(Section):
    """How requests are drawn.

    Attributes:
        n: Requests drawn.
        skew: Exponent of the Zipf law of popularity: 0 asks all alike, 1 is what web traffic is like.
        phases: How often popularity is dealt out anew, at equal distances; 1: it never changes.
        seed: Of everything drawn.
    """

    n: int = Field(ge=1)
    skew: float = Field(default=1.0, ge=0.0)
    phases: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)


def draw(pool: Sequence[_T], traffic: Traffic) -> list[_T]:
    """A stream of requests from a pool.

    Args:
        pool: Distinct requests, at least one.
        traffic: How they are drawn.
    """
    rng = random.Random(traffic.seed)
    weights = [1 / rank**traffic.skew for rank in range(1, len(pool) + 1)]
    ends = [round(traffic.n * phase / traffic.phases) for phase in range(traffic.phases + 1)]
    stream: list[_T] = []
    for begin, end in itertools.pairwise(ends):
        ranked = list(pool)
        rng.shuffle(ranked)
        stream += rng.choices(ranked, weights, k=end - begin)
    return stream
