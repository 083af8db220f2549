"""Azure's trace of a service of language models (Patel et al. 2024): when the requests of an hour arrived."""

import csv
import io
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from experiments.data.source import build, find_file, read_text, some
from llmcache.errors import ConfigError

FILE = "azure_llm_trace/AzureLLMInferenceTrace_conv.csv"


def read_arrivals(folder: Path | None) -> list[float]:
    """Seconds from the first arrival to each, in order; `folder` is the data folder, for the hub has no trace."""
    if folder is None:
        raise ConfigError(
            f"arrivals: the trace is not on the hub; give a folder with {FILE}: --data-dir, LLMCACHE_DATA"
        )
    path = find_file(folder, FILE)
    lines = csv.DictReader(io.StringIO(read_text(path)))
    times = sorted(some([build(f"{path}, line {lines.line_num}", _arrival, line) for line in lines], path))
    return [(time - times[0]).total_seconds() for time in times]


def _arrival(line: Mapping[str, str]) -> datetime:
    return datetime.fromisoformat(line["TIMESTAMP"])
