"""Where commands write their figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from llmcache.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """Tell before a long run that its result could not be written.

    Raises:
        ConfigError: The folder is not there, or the path is a folder.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path}: cannot be written; give a file in a folder that exists")


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures, if a path was given, and say where."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        typer.echo(f"written to {path}")
