"""Service rounds: whole blocks of requests with the cache, then the same without, in alternating order.

    even rounds  with the cache: a block of exact hits, of hits, of misses; without: the model alone, the floor
    odd rounds   the same from the end

The model alone and the floor are asked the very requests of the misses. How long they take does not depend on which
tokens a request of one length has, so hits are held against the same block.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from experiments.metrics.metrics import percentiles

WITH = ("exact_hit", "hit", "miss")
WITHOUT = ("nocache", "floor")

_Call = TypeVar("_Call")
Advance = Callable[[str, int, int], None]


def order_of_blocks(number: int) -> tuple[str, ...]:
    """Kinds of calls in a round."""
    blocks = (*WITH, *WITHOUT)
    return blocks if number % 2 == 0 else blocks[::-1]


def measure(
    ask: Callable[[str, Sequence[_Call]], list[float]],
    fresh: Callable[[], _Call],
    rounds: int,
    block: int,
    advance: Advance | None = None,
) -> dict[str, list[list[float]]]:
    """Milliseconds of each call of each block, by kind; `ask` answers a block, `fresh` makes a call that will miss."""
    blocks: dict[str, list[list[float]]] = {kind: [] for kind in (*WITH, *WITHOUT)}
    for number in range(rounds):
        calls = [fresh() for _ in range(block)]
        for kind in order_of_blocks(number):
            blocks[kind].append(ask(kind, calls))
            if advance:
                advance("service rounds", sum(map(len, blocks.values())), rounds * len(blocks))
    return blocks


def figures(blocks: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Percentiles over all blocks, medians of the fastest and slowest, and ratios of a round; None without rounds."""
    rounds = len(blocks["nocache"])
    if not rounds:
        return None
    told: dict[str, Any] = {"rounds": rounds, "ratios": {}}
    for kind, times in blocks.items():
        told[f"{kind}_ms"] = percentiles(np.concatenate(times)) | _range([np.median(one) for one in times])
        if kind != "nocache":
            ratios = [np.mean(one) / np.mean(base) for one, base in zip(times, blocks["nocache"], strict=True)]
            told["ratios"][f"{kind}/nocache"] = {"median": float(np.median(ratios)), **_range(ratios)}
    return told


def _range(values: Sequence[Any]) -> dict[str, float]:
    return {"min": float(min(values)), "max": float(max(values))}
