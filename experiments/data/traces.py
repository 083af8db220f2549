"""Traces of language model services, and arrival times of requests drawn from them or generated.

azure     (Patel et al. 2024) one hour of requests: times and token counts. Prompts are not identified, so it gives
          lengths, but no hit rates.
mooncake  (Qin et al. 2024) the blocks of each prompt. A block stands for 512 tokens and all before them, so equal
          numbers mean equal prefixes. The tokens are not published.

The hub has neither: they are read from the data folder. Arrival times (N,) run from 0 on with a mean gap of 1.
"""

import csv
import io
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from experiments.data.source import build, find_file, read_jsonl, read_text, some, typed
from llmcache import ConfigError

AZURE = "azure_llm_trace/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl"
BLOCK = 512  # tokens per block in Mooncake's trace
STEP_S = 3.0  # resolution of Mooncake's arrival times

Chain = tuple[int, ...]
_T = TypeVar("_T")


def azure_arrivals(folder: Path | None) -> list[float]:
    """Return the seconds from the first arrival to each, in order."""
    times = sorted(_azure(folder, lambda line: datetime.fromisoformat(line["TIMESTAMP"])))
    return [(time - times[0]).total_seconds() for time in times]


def azure_lengths(folder: Path | None) -> list[int]:
    return some([length for length in _azure(folder, lambda line: int(line["ContextTokens"])) if length > 0], AZURE)


def mooncake_arrivals(folder: Path | None) -> list[float]:
    times = [time for time, _ in _mooncake(folder)]
    return [(time - times[0]) / 1e3 for time in times]


def read_trace(folder: Path | None) -> list[Chain]:
    """Return the blocks of each request of Mooncake's trace, in order of arrival."""
    return [chain for _, chain in _mooncake(folder)]


def _azure(folder: Path | None, take: Callable[[Mapping[str, str]], _T]) -> list[_T]:
    path = _find(folder, AZURE)
    lines = csv.DictReader(io.StringIO(read_text(path)))
    return some([build(f"{path}, line {lines.line_num}", take, line) for line in lines], path)


def _mooncake(folder: Path | None) -> list[tuple[int, Chain]]:
    """Return arrival times in ms and blocks, at least one request, in order."""
    path = _find(folder, MOONCAKE)
    asked = [build(where, _request, record) for where, record in read_jsonl(path)]
    return sorted(some(asked, path), key=lambda request: request[0])


def _request(record: dict[str, object]) -> tuple[int, Chain]:
    chain = tuple(typed(number, int) for number in typed(record["hash_ids"], list))
    if not chain:
        raise ValueError("hash_ids is empty")
    return typed(record["timestamp"], int), chain


def _find(folder: Path | None, file: str) -> Path:
    if folder is None:
        raise ConfigError(f"data: the trace is not on the hub; give a folder with {file}: --data-dir or LLMCACHE_DATA")
    return find_file(folder, file)


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
