"""Sources of records: a file in the data folder if given, else the hub.

Each record comes with a text for its position, so that an error can name it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmcache import ConfigError
from llmcache.lab import asking, cause

_T = TypeVar("_T")


def from_hub(name: str, config: str | None, split: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows of a data set on the hub with their positions; `config` is None for the only configuration."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data: {name} comes from the hub, which needs a package: pip install 'llmcache-torch[exp]'"
        ) from None
    try:
        with asking(name):
            rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data: {name} could not be loaded from the hub ({cause(error)}); "
            "give a folder that holds its files with --data-dir or LLMCACHE_DATA"
        ) from error
    return [(f"{name}, {split}, row {number}", row) for number, row in enumerate(rows)]


def find_file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"data: no file {path}; say where the data is with --data-dir or LLMCACHE_DATA")
    return path


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with `\n` as the end of each line whatever the file has."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from error


def read_jsonl(path: Path) -> list[tuple[str, Any]]:
    """Read a file with one JSON value per line, each with its position; empty lines are skipped."""
    values = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        try:
            if line.strip():
                values.append((f"{path}, line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not valid JSON: {error.msg}") from error
    return values


def build(where: str, make: Callable[[Any], _T], record: Any) -> _T:
    """Return `make(record)`; raise `ConfigError` if the record lacks a field or has one of another type."""
    try:
        return make(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{where}: not a record of this data set ({type(error).__name__}: {error})") from error


def typed(value: Any, kind: type[_T]) -> _T:
    """Return a value if it has this type, else raise `TypeError`: for use inside `build`."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def some(records: list[_T], where: object) -> list[_T]:
    """Return the records; raise if there are none."""
    if not records:
        raise ConfigError(f"{where}: holds no records; is the file complete?")
    return records
