"""Requests of traces as chains of blocks, and when they came.

Mooncake's trace tells its blocks. Azure's tells lengths alone, so its beginnings are a model: those of Mooncake's
requests, in their order.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.data import azure, mooncake
from experiments.data.streams.prompts.mooncake import conversations
from experiments.simulation.banks import Knowledge
from experiments.simulation.chains import Blocks, Chains
from experiments.simulation.kinds import BLOCK
from experiments.simulation.times import Times

Arrivals = NDArray[np.float64]
Trace = tuple[str, Chains, Arrivals, list[int]]  # name, prompts, times of arrival, and blocks of each


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests that are served."""

    name: str
    knowledge: Knowledge
    arrivals: Arrivals  # from 0 on; their mean distance is 1
    sizes: Sequence[int]  # of each request, in entries or blocks
    times: Times

    @property
    def computes_s(self) -> float:
        """Of a request, in the mean, where nothing is known."""
        return float(np.mean([self.times.compute.mean(size) for size in self.sizes]))

    def figures(self) -> dict[str, Any]:
        """For results."""
        size = float(np.mean(self.sizes))
        return {"stream": self.name, "n": self.knowledge.n, "mean_size": size, "computes_ms": 1e3 * self.computes_s}


def of_mooncake(folder: Path | None, n: int, most: int, rng: np.random.Generator) -> Trace:
    """The first `n` requests of Mooncake's trace, and the first `most` blocks of their prompts."""
    trace = mooncake.read_trace(folder)[:n]
    steps = np.array(mooncake.read_arrivals(folder)[:n])
    times = np.sort(steps + rng.uniform(0, mooncake.STEP_S, len(steps)))  # told in steps; drawn evenly within
    chains: list[Blocks] = [chain[:most] for chain in trace]
    return _trace("Mooncake", chains, _routes(trace), times)


def of_azure(folder: Path | None, n: int, most: int, rng: np.random.Generator) -> Trace:
    """Times and lengths of Azure's first requests, and beginnings as Mooncake's requests share them.

    A block is that of the cache. Each of Mooncake's stands for as many as make the prompts of both equally long in the
    mean. Where Azure's prompt is longer than Mooncake's, the rest is its own; where it is shorter, it ends.
    """
    trace, times = mooncake.read_trace(folder)[:n], np.array(azure.read_arrivals(folder))
    lengths = [min(most, -(-tokens // BLOCK)) for tokens in azure.read_lengths(folder)]
    n = min(len(trace), len(lengths), len(times))
    stretch = max(1, round(sum(lengths[:n]) / sum(min(most, len(chain)) for chain in trace[:n])))
    chains: list[Blocks] = []
    for number, (chain, length) in enumerate(zip(trace[:n], lengths[:n], strict=True)):
        shared: list[Hashable] = [(block, i) for block in chain for i in range(stretch)]
        own: list[Hashable] = [("own", number, i) for i in range(length)]
        chains.append(tuple((shared + own)[:length]))
    return _trace("Azure", chains, _routes(trace[:n]), times[:n])


def _trace(name: str, chains: Sequence[Blocks], routes: Sequence[str], times: Arrivals) -> Trace:
    since = times - times[0]
    return name, Chains(chains, routes), since * (len(since) - 1) / since[-1], [len(chain) for chain in chains]


def _routes(trace: Sequence[mooncake.Chain]) -> list[str]:
    """The conversation of each request; one without is routed by itself."""
    known = conversations(trace, trace)
    return [f"request {i}" if one is None else str(one) for i, one in enumerate(known)]
