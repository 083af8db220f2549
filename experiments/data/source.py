"""Where records come from: a file of the data folder if one is given, else the hub.

A record comes with the words that say where it stands, so that an error can name it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmcache import ConfigError
from llmcache.lab import asking, cause

_T = TypeVar("_T")


def from_hub(name: str, config: str | None, split: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a data set on the hub, each with where it stands; `config` is None for the only one."""
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
    """All of a UTF-8 file, with `\n` as the end of each line whatever the file has."""
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
    """The values of a file with one JSON value a line, each with where it stands; empty lines are left out."""
    values = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        try:
            if line.strip():
                values.append((f"{path}, line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not valid JSON: {error.msg}") from error
    return values


def build(where: str, make: Callable[[Any], _T], record: Any) -> _T:
    """What `make` makes of a record; one that lacks something or holds another type is a `ConfigError`."""
    try:
        return make(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{where}: not a record of this data set ({type(error).__name__}: {error})") from error


def typed(value: Any, kind: type[_T]) -> _T:
    """A value that is of this type, else a `TypeError`: for use inside `build`."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def some(records: list[_T], where: object) -> list[_T]:
    """The records, if there are any."""
    if not records:
        raise ConfigError(f"{where}: holds no records; is the file complete?")
    return records
