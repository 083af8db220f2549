"""When requests arrive: times (N,) from 0 on whose mean distance is 1, for a load to scale."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.data.azure import read_arrivals
from llmcache.errors import ConfigError

Times = NDArray[np.float64]


def poisson(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    """Each independent of all others."""
    return _scaled(rng.exponential(size=n - 1).cumsum())


def azure(n: int, data: Path | None, rng: np.random.Generator) -> Times:
    """As they came to a service: `n` arrivals of its trace that follow one another, from one that is drawn."""
    trace = np.array(read_arrivals(data))
    if len(trace) < n:
        raise ConfigError(f"n={n}: the trace of azure has {len(trace)} arrivals; ask for fewer")
    first = rng.integers(len(trace) - n + 1)
    return _scaled(trace[first + 1 : first + n] - trace[first])


def _scaled(later: Times) -> Times:
    """Arrivals after the first, which is at 0."""
    return np.concatenate([[0.0], later * (len(later) / later[-1])])


ARRIVALS: Mapping[str, Callable[[int, Path | None, np.random.Generator], Times]] = {"poisson": poisson, "azure": azure}
