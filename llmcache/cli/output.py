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
    """Within: Ctrl-C ends the command with one line that says what becomes of its work: `told`.

    Raises:
        typer.Exit: It was pressed.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"llmcache: {told}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def make_results_folder(path: Path) -> None:
    """Make the folder of all results, if it is not there, before a long run that writes into it.

    Raises:
        ConfigError: There can be no such folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--results-dir {path}: cannot be made a folder ({error.strerror}); give one that can be written"
        ) from error


def check_writable(path: Path | None) -> None:
    """Tell before a long run that its result could not be written.

    Raises:
        ConfigError: The folder is not there, or the path is a folder.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path}: cannot be written; give a file in a folder that exists")


def write_json(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures, if a path was given, and say where.

    Raises:
        OSError: They could not be written; names the path.
    """
    from experiments.files import naming

    if path is not None:
        with naming(path):
            path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        typer.echo(f"written to {path}")


def write_results(
    results_dir: Path | None, name: str, config: Mapping[str, Any], env: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Write figures as those of a run, if a folder of results was given, and say where.

    Args:
        results_dir: Root of all results; made before by `make_results_folder`.
        name: Of the folder in it.
        config: Settings of the command.
        env: Surroundings.
        metrics: The figures.

    Raises:
        OSError: They could not be written.
    """
    from experiments.results import write_figures

    if results_dir is not None:
        write_figures(results_dir / name, config, env, metrics)
        typer.echo(f"written to {results_dir / name}")
