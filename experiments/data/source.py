"""Where records come from: a file of the data folder if one is given, else the hub."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llmcache.errors import ConfigError


def from_hub(name: str, config: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    """Rows of a data set on the hub.

    Args:
        name: Owner and name, `rajpurkar/squad_v2` for instance.
        config: Configuration, or None for the only one.
        split: `train`, `validation` or `test`.

    Raises:
        ConfigError: The package is missing, or the hub could not be reached.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data: {name} comes from the hub, which needs a package: pip install 'llmcache[exp]'"
        ) from None
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data: {name} could not be loaded from the hub ({str(error).splitlines()[0]}); "
            "give a folder that holds its files with --data-dir or LLMCACHE_DATA"
        ) from error
    return rows


def find_file(folder: Path, name: str) -> Path:
    """Path of a file of the data folder.

    Raises:
        FileNotFoundError: It is not there.
    """
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"data: no file {path}; say where the data is with --data-dir or LLMCACHE_DATA")
    return path


def read_text(path: Path) -> str:
    """All of a UTF-8 file.

    Raises:
        ConfigError: It is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: Path) -> Any:
    """A JSON file.

    Raises:
        ConfigError: It is not JSON.
    """
    return _parse(read_text(path), str(path))


def read_jsonl(path: Path) -> list[tuple[str, Any]]:
    """The values of a file with one JSON value a line, each with where it stands; empty lines are left out.

    Raises:
        ConfigError: A line is not JSON.
    """
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [(f"{path}, line {i}", _parse(line, f"{path}, line {i}")) for i, line in lines if line.strip()]


def build(where: str, make: Callable[[], Any]) -> Any:
    """What `make` makes of a record.

    Raises:
        ConfigError: The record lacks something or holds another type; names where it stands.
    """
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{where}: not a record of this data set ({type(error).__name__}: {error})") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error.msg} (line {error.lineno})") from error
