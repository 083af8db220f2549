"""Where commands write, and what they say of work that could not be done or was interrupted."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer

from llmcache.errors import ConfigError

INTERRUPTED: Final = 130  # exit status of a shell's command that Ctrl-C ended: 128 + SIGINT


@contextmanager
def interruptible(told: str) -> Iterator[None]:
    """Within: Ctrl-C ends the command with one line that says what becomes of its work: `told`."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"llmcache: {told}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def check_writable(path: Path | None) -> None:
    """Tell before a long run that its result could not be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path}: cannot be written; give a file in a folder that exists")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within: an error of the system names this file. Of a disk that is full it names none by itself."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures, if a path was given, and say where."""
    if path is None:
        return
    with naming(path):
        path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    typer.echo(f"written to {path}")
