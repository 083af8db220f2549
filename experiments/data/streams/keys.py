"""Streams of keys, for questions about eviction alone: which entries are asked, how large they are, what they cost.

zipf      a few keys are asked often; every now and then comes a scan, whose keys are asked once
mooncake  the blocks of each prompt of Mooncake's trace: one is of use only with all before it
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

BYTES = 1024  # of a vector, or of what is kept of one token; hit rates do not depend on it


@dataclass(frozen=True, slots=True)
class Asked:
    """One entry that a request asks for."""

    key: str
    nbytes: int = BYTES
    tokens: int = 1  # what computing it costs


class KeyStream(Section):
    name: Literal["zipf", "mooncake"]
    # Of `zipf`: requests for popular keys, how many these are, and the exponent of the law.
    n: int = Field(default=60_000, ge=1)
    keys: int = Field(default=10_000, ge=1)
    skew: float = Field(default=1.0, ge=0.0)
    # Of `zipf`: how often popularity is dealt out anew; 1: it never changes.
    phases: int = Field(default=1, ge=1)
    # Of `zipf`: keys of a scan, 0 for none, and requests for popular keys before each.
    scan: int = Field(default=0, ge=0)
    every: int = Field(default=4_000, ge=1)
    # Of `zipf`: tokens of a key are one, or those of a prompt of Azure's trace, dealt out in its order; an entry keeps
    # a vector, or one a token.
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
    """What each request asks for: one entry, or a chain of blocks."""
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
