"""Writing of result files, and messages for unwritable files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from llmcache.errors import ConfigError

INTERRUPTED = 130  # exit status after Ctrl-C, as in shells: 128 + SIGINT


def check_writable(path: Path | None) -> None:
    """Raise `ConfigError` if `path` cannot be written, so that a long run fails early."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path}: cannot be written; give a file in a folder that exists")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context, add the file's name to an `OSError`, which lacks it for a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON and print the path; do nothing if `path` is None."""
    if path is None:
        return
    with naming(path):
        path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    typer.echo(f"written to {path}")
