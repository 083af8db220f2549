"""Where commands write results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from llmcache import ConfigError


def make_results_folder(path: Path) -> None:
    """Make the folder of all results, if it is not there, before a long run that writes into it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--results-dir {path}: cannot be made a folder ({error.strerror}); give one that can be written"
        ) from error


def write_results(
    results_dir: Path | None, name: str, config: Mapping[str, Any], env: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Write figures as those of a run, if a folder of results was given, and say where."""
    from experiments.runs.folder import write_figures

    if results_dir is not None:
        write_figures(results_dir / name, config, env, metrics)
        typer.echo(f"written to {results_dir / name}")
