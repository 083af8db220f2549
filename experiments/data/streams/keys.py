"""Streams of keys, for measuring eviction alone: keys requested, their sizes and costs.

zipf      a few keys are frequent; now and then comes a scan, whose keys are requested once
mooncake  the blocks of each prompt of Mooncake's trace: a block is useful only with all blocks before it
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from experiments.data.streams.traffic import Traffic, draw
from experiments.data.traces import BLOCK, azure_lengths, read_trace
from experiments.support.section import Section

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
    return [[one] for one in _with_scans(popular, made, stream)]


def _with_scans(popular: Sequence[Asked], once: Iterator[Asked], stream: KeyStream) -> Iterator[Asked]:
    for begin in range(0, len(popular), stream.every):
        yield from chain(popular[begin : begin + stream.every], islice(once, stream.scan))
