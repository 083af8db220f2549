"""Labelled requests from CSV and JSONL files, or from a stream that the project makes itself."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Data
from experiments.streams.support_desk import support_desk
from llmcache.errors import ConfigError

#: Streams by name: `(n, seed) -> records` with the attributes `text` and `label`.
STREAMS: Mapping[str, Callable[[int, int], Iterable[Any]]] = {
    "support_desk": lambda n, seed: support_desk(n, seed),
}
DEFAULT_N = 2000


@dataclass(frozen=True, slots=True)
class Labelled:
    """One labelled request.

    Attributes:
        id: Its number in the data, files joined, from 0.
        text: What was asked.
        label: What it is about.
    """

    id: int
    text: str
    label: str


def read_requests(data: Data, folder: Path | None, seed: int = 0, limit: int | None = None) -> list[Labelled]:
    """Read all labelled requests, in data order.

    Args:
        data: Where they are.
        folder: What relative paths are relative to; None for the working directory.
        seed: Of the sample, or of a made stream.
        limit: Keep that many: a seeded sample in data order; of a made stream, its beginning.

    Raises:
        ConfigError: A column is missing, a record is broken, or there are no records at all.
        FileNotFoundError: A file is missing.
    """
    made = STREAMS.get(data.path[0]) if len(data.path) == 1 else None
    if made is not None:
        n = limit or DEFAULT_N
        return [Labelled(i, record.text, record.label) for i, record in enumerate(made(n, seed))]
    pairs = [pair for name in data.path for pair in _read_file(_locate(name, folder), data)]
    if not pairs:
        raise ConfigError(f"data.path: {', '.join(data.path)}: no records, so there is nothing to stream")
    requests = [Labelled(i, text, label) for i, (text, label) in enumerate(pairs)]
    if limit is None or limit >= len(requests):
        return requests
    return [requests[i] for i in sorted(random.Random(seed).sample(range(len(requests)), limit))]


def _locate(name: str, folder: Path | None) -> Path:
    path = Path(name).expanduser()
    if folder is not None and not path.is_absolute():
        path = folder / path
    if path.suffix not in _READERS:
        known = f"a file ending in {' or '.join(_READERS)}, or a stream ({', '.join(STREAMS)})"
        raise ConfigError(f"data.path: {name!r} is of no known kind; give {known}")
    if not path.is_file():
        raise FileNotFoundError(f"data.path: no file {path}; say where the data is with --data-dir or LLMCACHE_DATA")
    return path


def _read_file(path: Path, data: Data) -> Iterator[tuple[str, str]]:
    try:
        for where, record in _READERS[path.suffix](path):
            yield _field(record, data, "text", where), _field(record, data, "label", where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _field(record: Mapping[str, Any], data: Data, key: str, where: str) -> str:
    name: str = getattr(data, key)
    if name not in record:
        raise ConfigError(f"data.{key}: {where} has no column {name!r}; columns found: {', '.join(map(str, record))}")
    value = record[name]
    if value is None or isinstance(value, dict | list):
        raise ConfigError(f"data.{key}: {where}: column {name!r} holds no single value (got {value!r})")
    return str(value)


def _read_csv(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for record in reader:
            yield f"{path}, line {reader.line_num}", {k: v for k, v in record.items() if k is not None}


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not valid JSON: {error.msg}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{where}: expected one JSON object a line (got {record!r})")
            yield where, record


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
}
