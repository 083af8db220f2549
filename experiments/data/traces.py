"""Traces of language model services: partial information on prompts.

azure     (Patel et al. 2024) one hour of requests, by their token counts. Prompts are not identified, so it
          gives lengths, but no hit rates.
mooncake  (Qin et al. 2024) the blocks of each prompt. A block stands for 512 tokens and all before them, so equal
          numbers mean equal prefixes. The tokens are not published.

The hub has neither: they are read from the data folder.
"""

import csv
import io
from pathlib import Path

from experiments.data.source import build, find_file, read_jsonl, read_text, some, typed
from llmcache import ConfigError

AZURE = "azure_llm_trace/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl"
BLOCK = 512  # tokens per block in Mooncake's trace

Chain = tuple[int, ...]


def azure_lengths(folder: Path | None) -> list[int]:
    """Return the tokens of each prompt of Azure's trace, in its order."""
    path = _find(folder, AZURE)
    lines = csv.DictReader(io.StringIO(read_text(path)))
    tokens = (build(f"{path}, line {lines.line_num}", lambda line: int(line["ContextTokens"]), line) for line in lines)
    return some([n for n in tokens if n > 0], path)


def read_trace(folder: Path | None) -> list[Chain]:
    """Return the blocks of each request of Mooncake's trace, in order of arrival."""
    path = _find(folder, MOONCAKE)
    asked = [build(where, _request, record) for where, record in read_jsonl(path)]
    return [chain for _, chain in sorted(some(asked, path), key=lambda request: request[0])]


def _request(record: dict[str, object]) -> tuple[int, Chain]:
    chain = tuple(typed(number, int) for number in typed(record["hash_ids"], list))
    if not chain:
        raise ValueError("hash_ids is empty")
    return typed(record["timestamp"], int), chain


def _find(folder: Path | None, file: str) -> Path:
    if folder is None:
        raise ConfigError(f"data: the trace is not on the hub; give a folder with {file}: --data-dir or LLMCACHE_DATA")
    return find_file(folder, file)
