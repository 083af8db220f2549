"""Reads settings from YAML. Any invalid content raises one `ConfigError` with a one-line message."""

from pathlib import Path
from typing import Any

import yaml

from llmcache.errors import ConfigError

_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 100_000  # aliases expanded: ten lines can expand to billions


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that contains one mapping; an empty file gives an empty dict.

    Raises `ConfigError` if it is anything else, and `FileNotFoundError`.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: save it in that encoding") from error
    except (OSError, ValueError) as error:  # ValueError: not a valid path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read as a file of settings: {reason}") from error
    loaded = parse_yaml(text, str(path))
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(loaded).__name__}")
    return loaded or {}


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML text of one document; `ConfigError` with its origin `name` if it is not valid, or too large."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{name}: more than {_MOST_CHARACTERS:,} characters: too large for settings")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        is_large = node is not None and not _has_room(node)
        made = None if node is None or is_large else loader.construct_document(node)
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply for settings") from error
    except Exception as error:  # PyYAML raises KeyError, IndexError, AttributeError for values that do not fit a tag
        reason = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError | ValueError) else repr(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {', '.join(filter(None, (error.context, error.problem)))}"
        raise ConfigError(f"{name}: not valid YAML: {reason}") from None  # its text quotes lines, with their passwords
    if is_large:
        raise ConfigError(f"{name}: more than {_MOST_VALUES:,} values, aliases written out: too large for settings")
    return made


def _has_room(node: yaml.Node) -> bool:
    """Whether a document has at most `_MOST_VALUES` values, aliases expanded."""
    waiting, n_values = [node], 0
    while waiting and n_values <= _MOST_VALUES:
        one = waiting.pop()
        n_values += 1
        if isinstance(one, yaml.SequenceNode):
            waiting += one.value
        elif isinstance(one, yaml.MappingNode):
            waiting += [inner for pair in one.value for inner in pair]
    return n_values <= _MOST_VALUES
