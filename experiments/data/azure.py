"""Azure's trace of a service of language models (Patel et al. 2024): the requests of an hour.

It has arrival times and token counts and tells no two prompts apart: it has lengths to give, but no hit rates.
"""

import csv
import io
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from experiments.data.source import build, find_file, read_text, some
from llmcache import ConfigError

FILE = "azure_llm_trace/AzureLLMInferenceTrace_conv.csv"

_T = TypeVar("_T")


def read_arrivals(folder: Path | None) -> list[float]:
    """Seconds from the first arrival to each, in order; `folder` is the data folder, for the hub has no trace."""
    times = sorted(_read(folder, lambda line: datetime.fromisoformat(line["TIMESTAMP"])))
    return [(time - times[0]).total_seconds() for time in times]


def read_lengths(folder: Path | None) -> list[int]:
    """Tokens of each prompt, over 0, in the order of arrival; `folder` is the data folder, likewise."""
    return some([length for length in _read(folder, lambda line: int(line["ContextTokens"])) if length > 0], FILE)


def _read(folder: Path | None, take: Callable[[Mapping[str, str]], _T]) -> list[_T]:
    if folder is None:
        raise ConfigError(f"data: the trace is not on the hub; give a folder with {FILE}: --data-dir or LLMCACHE_DATA")
    path = find_file(folder, FILE)
    lines = csv.DictReader(io.StringIO(read_text(path)))
    return some([build(f"{path}, line {lines.line_num}", take, line) for line in lines], path)
