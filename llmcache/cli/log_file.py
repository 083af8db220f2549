"""Reads requests from a log: a text a line, or a column of a table."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from llmcache.errors import ConfigError

COLUMNS = ("text", "prompt", "messages", "inputs", "input", "query", "question")  # used without --column, first match

Log: TypeAlias = Annotated[
    Path,
    typer.Option(exists=True, dir_okay=False, help="Requests in the order of arrival: a .txt, .csv or .jsonl file."),
]
Column: TypeAlias = Annotated[
    str | None, typer.Option(help=f"Column or key of the text; default: the first of {', '.join(COLUMNS)}.")
]


def read_log(path: Path, column: str | None = None) -> list[Any]:
    """Return the requests of a log, in order, without blank ones: texts, or a chat's messages from a .jsonl file.

    Raises:
        ConfigError: It has another format, no requests, or no such column.
    """
    kinds = {".txt": _lines, ".csv": _cells, ".jsonl": _records}
    if (kind := kinds.get(path.suffix.lower())) is None:
        raise ConfigError(f"{path}: give a log in one of these formats: {', '.join(kinds)}")
    try:
        found = [one for one in kind(path, column) if (one.strip() if isinstance(one, str) else one)]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: {error}") from None
    if not found:
        raise ConfigError(f"{path}: it has no requests")
    return found


def _lines(path: Path, column: str | None) -> Iterator[str]:
    if column is not None:
        raise ConfigError(f"--column {column}: a .txt file has none, each line is a request")
    with path.open(encoding="utf-8-sig") as file:
        yield from (line.rstrip("\n") for line in file)


def _cells(path: Path, column: str | None) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        name = _chosen(path, rows.fieldnames or (), column)
        yield from (row[name] or "" for row in rows)


def _records(path: Path, column: str | None) -> Iterator[Any]:
    name = column
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(filter(str.strip, file), start=1):
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigError(f"{path}: record {number} is not valid JSON") from None
            if isinstance(record, Mapping):
                name = name or _chosen(path, [*record], column)
                if name not in record:
                    raise ConfigError(f"{path}: record {number} has no {name!r}, but {', '.join(record) or 'nothing'}")
                record = record[name]
            if not isinstance(record, str | list):
                raise ConfigError(f"{path}: record {number} is a {type(record).__name__}, not a text or messages")
            yield record


def _chosen(path: Path, names: Sequence[str], column: str | None) -> str:
    if column is None and len(names) == 1:
        return names[0]
    found = next((name for name in ((column,) if column else COLUMNS) if name in names), None)
    if found is None:
        raise ConfigError(f"{path}: choose the column of the text with --column: {', '.join(names) or 'it has none'}")
    return found
