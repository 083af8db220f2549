"""Mooncake's trace of a service of language models (Qin et al. 2024): of which blocks the prompt of each request is.

A block stands for 512 tokens and all before them, so equal numbers mean equal beginnings. The tokens are not published.
"""

from pathlib import Path

from experiments.data.source import build, find_file, read_jsonl, some, typed
from llmcache import ConfigError

FILE = "mooncake/conversation_trace.jsonl"

BLOCK = 512  # tokens
STEP_S = 3.0  # that times of arrival are told in

Chain = tuple[int, ...]


def read_trace(folder: Path | None) -> list[Chain]:
    """The blocks of each request in the order of arrival; `folder` is the data folder, for the hub has no trace."""
    return [chain for _, chain in _read(folder)]


def read_arrivals(folder: Path | None) -> list[float]:
    """Seconds from the first arrival to each, in order, likewise."""
    times = [time for time, _ in _read(folder)]
    return [(time - times[0]) / 1e3 for time in times]


def _read(folder: Path | None) -> list[tuple[int, Chain]]:
    """Milliseconds of arrival and blocks, in order."""
    if folder is None:
        raise ConfigError(f"data: the trace is not on the hub; give a folder with {FILE}: --data-dir or LLMCACHE_DATA")
    path = find_file(folder, FILE)
    asked = [build(where, _request, record) for where, record in read_jsonl(path)]
    return sorted(some(asked, path), key=lambda request: request[0])


def _request(record: dict[str, object]) -> tuple[int, Chain]:
    """When it arrived, milliseconds, and its blocks, at least one."""
    chain = tuple(typed(number, int) for number in typed(record["hash_ids"], list))
    if not chain:
        raise ValueError("hash_ids is empty")
    return typed(record["timestamp"], int), chain
