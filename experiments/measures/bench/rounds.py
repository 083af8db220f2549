"""Rounds in which calls of all kinds take turns: their order, and what times of one kind are to those of another."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.metrics.metrics import percentiles
from experiments.support.clock import HOST, Clock, Spent


def by_host(times: Mapping[str, Sequence[Spent]], clock: Clock) -> dict[str, Any] | None:
    """Percentiles of the same calls by the host's clock, where another one was heeded; else None."""
    if clock.name == HOST:
        return None
    return {f"{kind}_ms": percentiles([one.host_ms for one in values]) for kind, values in times.items()}


def rotated(kinds: Sequence[str], by: int) -> Iterator[str]:
    """The kinds in an order that changes from round to round, so that none always follows the same one."""
    turned = [*kinds[by % len(kinds) :], *kinds[: by % len(kinds)]]
    return iter(turned if by // len(kinds) % 2 == 0 else turned[::-1])


def ratios(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Each kind of call against another one of the same round, by `kind/base`: median, 5th and 95th percentile."""
    found = {}
    for kind in (kind for kind in times if kind != base):
        values = np.array(times[kind]) / np.array(times[base])
        p5, median, p95 = (float(value) for value in np.percentile(values, (5, 50, 95)))
        found[f"{kind}/{base}"] = {"median": median, "p5": p5, "p95": p95}
    return found
