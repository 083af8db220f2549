"""Arrival times (N,) of requests, from 0 on with a mean gap of 1, to be scaled to a load."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.data.traces import STEP_S, azure_arrivals, mooncake_arrivals
from llmcache import ConfigError

Times = NDArray[np.float64]


def fixed(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    return np.arange(n, dtype=np.float64)


def poisson(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    """Return a Poisson process."""
    return _scaled(rng.exponential(size=n - 1).cumsum())


def azure(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    """Return `n` consecutive arrivals of Azure's trace, from a random start."""
    return _some_of(np.array(azure_arrivals(data)), "azure", n, rng)


def mooncake(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    """Return arrivals of Mooncake's trace, whose times are in steps of 3 s; within a step they are drawn uniformly."""
    steps = np.array(mooncake_arrivals(data))
    return _some_of(np.sort(steps + rng.uniform(0, STEP_S, len(steps))), "mooncake", n, rng)


def _some_of(trace: Times, name: str, n: int, rng: np.random.Generator) -> Times:
    if len(trace) < n:
        raise ConfigError(f"n={n}: the trace of {name} has {len(trace)} arrivals; ask for fewer")
    first = rng.integers(len(trace) - n + 1)
    return _scaled(trace[first + 1 : first + n] - trace[first])


def _scaled(later: Times) -> Times:
    """Scale arrivals after the first, which is at 0."""
    return np.concatenate([[0.0], later * (len(later) / later[-1])])


ARRIVALS: Mapping[str, Callable[[int, Path | None, np.random.Generator], Times]] = {
    "fixed": fixed,
    "poisson": poisson,
    "azure": azure,
    "mooncake": mooncake,
}
