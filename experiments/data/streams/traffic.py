"""Traffic drawn from a pool of requests, and streams of keys: some are frequent, some never occur, popularity changes.

Real sets of labelled requests have no repeats, so no eviction policy could beat another on them. They also have no
order in time: an arrival defines one, in which the requests of a calibration may be unlike the later ones.

Keys measure eviction alone; each request has keys, their sizes and costs:

zipf      a few keys are frequent; now and then comes a scan, whose keys are requested once
mooncake  the blocks of each prompt of Mooncake's trace: a block is useful only with all blocks before it
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from experiments.data.traces import BLOCK, azure_lengths, read_trace
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


BYTES = 1024  # of a vector, or of one token's values; hit rates do not depend on it


@dataclass(frozen=True, slots=True)
class Asked:
    """One entry of a request."""

    key: str
    nbytes: int = BYTES
    tokens: int = 1  # cost of computing it


class KeyStream(Section):
    name: Literal["zipf", "mooncake"]
    # For `zipf`: requests for popular keys, number of popular keys, and exponent of the law.
    n: int = Field(default=60_000, ge=1)
    keys: int = Field(default=10_000, ge=1)
    skew: float = Field(default=1.0, ge=0.0)
    # For `zipf`: number of phases; popularity is reassigned in each. 1: it never changes.
    phases: int = Field(default=1, ge=1)
    # For `zipf`: keys per scan (0: none), and requests for popular keys before each scan.
    scan: int = Field(default=0, ge=0)
    every: int = Field(default=4_000, ge=1)
    # For `zipf`: tokens per key, one, or those of the prompts of Azure's trace in order; an entry keeps a vector, or
    # one per token.
    lengths: Literal["equal", "azure"] = "equal"
    keeps: Literal["vector", "tokens"] = "vector"

    @property
    def title(self) -> str:
        if self.name == "mooncake":
            return "Mooncake's trace, blocks"
        told = [f"Zipf {self.skew:g}"]
        told += [f"{self.phases} phases"] if self.phases > 1 else []
        told += ["scans"] if self.scan else []
        told += [f"Azure's lengths, {self.keeps}"] if self.lengths == "azure" else []
        return ", ".join(told)

    @property
    def is_uniform(self) -> bool:
        """Whether all entries have the same size and cost."""
        return self.lengths == "equal"


def asked(stream: KeyStream, data: Path | None, seed: int) -> list[Sequence[Asked]]:
    """Return the entries of each request: one entry, or a chain of blocks."""
    if stream.name == "mooncake":
        return [[Asked(str(block), tokens=BLOCK) for block in blocks] for blocks in read_trace(data)]
    lengths = cycle(azure_lengths(data)) if stream.lengths == "azure" else cycle([1])
    made = (
        Asked(str(number), BYTES * (length if stream.keeps == "tokens" else 1), length)
        for number, length in zip(count(), lengths, strict=False)
    )
    traffic = Traffic(n=stream.n, skew=stream.skew, phases=stream.phases, seed=seed)
    popular = draw(list(islice(made, stream.keys)), traffic)
    parts = (popular[begin : begin + stream.every] for begin in range(0, len(popular), stream.every))
    return [[one] for part in parts for one in (*part, *islice(made, stream.scan))]
