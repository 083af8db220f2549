"""Azure's trace of a service of language models (Patel et al. 2024): how long the prompt of each request is.

It has arrival times and token counts and tells no two prompts apart: it has lengths to give, but no hit rates.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from experiments.data.source import build, find_file, some
from llmcache.errors import ConfigError

FILE = "azure_llm_trace/AzureLLMInferenceTrace_conv.csv"


def read_lengths(folder: Path | None) -> list[int]:
    """Tokens of each prompt, over 0, in the order of arrival; `folder` is the data folder, for the hub has no trace."""
    if folder is None:
        raise ConfigError(f"data: the trace is not on the hub; give a folder with {FILE}: --data-dir or LLMCACHE_DATA")
    path = find_file(folder, FILE)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        lengths = [build(f"{path}, line {reader.line_num}", _length, row) for row in reader]
    return some([length for length in lengths if length > 0], path)


def _length(row: Mapping[str, str]) -> int:
    return int(row["ContextTokens"])
