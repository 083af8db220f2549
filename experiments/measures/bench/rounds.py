"""Rounds in which calls of all kinds take turns, and ratios between the times of kinds.

Interleaved: one call of each kind in turn, in rotating order. Service rounds: whole blocks of requests with the
cache, then the same without, in alternating order:

    even rounds  with the cache: a block of exact hits, of hits, of misses; without: the model alone, the floor
    odd rounds   the same in reverse

The model alone and the floor get the same requests as the misses. Their times do not depend on the tokens of a
request of fixed length, so hits are compared with the same block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from experiments.metrics.metrics import percentiles
from experiments.support.clock import HOST, Clock, Spent

WITH = ("exact_hit", "hit", "miss")
WITHOUT = ("nocache", "floor")

_Call = TypeVar("_Call")
Advance = Callable[[str, int, int], None]  # gets phase, done and total


def silent(phase: str, done: int, total: int) -> None:
    """Show no progress."""


def by_host(times: Mapping[str, Sequence[Spent]], clock: Clock) -> dict[str, Any] | None:
    """Return percentiles of the same calls by the host's clock, if another clock was used; else None."""
    if clock.name == HOST:
        return None
    return {f"{kind}_ms": percentiles([one.host_ms for one in values]) for kind, values in times.items()}


def rotated(kinds: Sequence[str], by: int) -> Iterator[str]:
    """Yield the kinds in an order that changes by round, so that no kind always follows the same one."""
    turned = [*kinds[by % len(kinds) :], *kinds[: by % len(kinds)]]
    return iter(turned if by // len(kinds) % 2 == 0 else turned[::-1])


def ratios(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Return the ratios of each kind to `base` in the same round, by `kind/base`: median, 5th and 95th percentile."""
    found = {}
    for kind in (kind for kind in times if kind != base):
        values = np.array(times[kind]) / np.array(times[base])
        p5, median, p95 = (float(value) for value in np.percentile(values, (5, 50, 95)))
        found[f"{kind}/{base}"] = {"median": median, "p5": p5, "p95": p95}
    return found


def service(
    ask: Callable[[str, Sequence[_Call]], list[float]],
    fresh: Callable[[], _Call],
    rounds: int,
    block: int,
    advance: Advance = silent,
) -> dict[str, list[list[float]]]:
    """Return the ms of each call by kind and block; `ask` runs a block, `fresh` makes a call that will miss."""
    kinds = (*WITH, *WITHOUT)
    blocks: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        calls = [fresh() for _ in range(block)]
        for kind in kinds if number % 2 == 0 else kinds[::-1]:
            blocks[kind].append(ask(kind, calls))
            advance("service rounds", sum(map(len, blocks.values())), rounds * len(blocks))
    return blocks


def service_figures(blocks: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Return percentiles over all blocks, the fastest and slowest median, and ratios by round; None without rounds."""
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
