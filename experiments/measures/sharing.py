"""Measure `sharing`: how much of a trace's prompts is known, as they came and as the stream `mooncake` draws them.

Blocks alone are counted: no model is run, and nothing is timed. What earlier prompts of the same selection begin with
is known; blocks that the selection leaves out are not.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from experiments.data.mooncake import BLOCK, Chain, read_trace
from experiments.data.streams.prompts.mooncake import conversations, sample
from experiments.measures.base import Experiment, Outcome
from experiments.support.folders import Folders


class Sharing(Experiment):
    """Settings of the measure."""

    n: int = Field(default=400, ge=2)  # requests of a draw, and of the beginning of the trace that it is held against
    blocks: int = Field(default=60, ge=2)  # blocks that are kept of a prompt
    draws: int = Field(default=5, ge=1)  # seeds of draws, 0 and up

    @property
    def name(self) -> str:
        return "mooncake"


def run(experiment: Sharing, folders: Folders) -> Outcome:
    """Count what is known."""
    trace = read_trace(folders.data)
    figures = [
        {"requests": which, "blocks": kept, **known(trace, chains, kept)}
        for which, chains in _selections(experiment, trace)
        for kept in (None, experiment.blocks)
    ]
    return Outcome(figures, {"task": "mooncake", "n": experiment.n, "summary": figures})


def _selections(experiment: Sharing, trace: Sequence[Chain]) -> Iterator[tuple[str, Sequence[Chain]]]:
    yield "the whole trace", trace
    yield f"the first {experiment.n} as they came", trace[: experiment.n]
    for seed in range(experiment.draws):
        yield f"{experiment.n} of conversations drawn, seed {seed}", sample(trace, experiment.n, seed)


def known(trace: Sequence[Chain], chains: Sequence[Chain], blocks: int | None) -> dict[str, Any]:
    """What is known of the requests that are asked, of whose prompts the first blocks are kept; None: all."""
    seen: set[int] = set()
    n_all = n_known = 0
    for chain in chains:
        kept = chain[:blocks]
        n_all += len(kept)
        n_known += next((place for place, block in enumerate(kept) if block not in seen), len(kept))
        seen.update(kept)
    return {
        "share_known": n_known / n_all,
        "n_cut": sum(blocks is not None and len(chain) > blocks for chain in chains),
        "n_conversations": len(set(conversations(trace, chains))),
        "n": len(chains),
        "n_tokens": n_all * BLOCK,
    }
