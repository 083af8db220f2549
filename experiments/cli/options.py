"""Options common to commands (experiments, data and results folders), interruption, and writing of results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from llmcache import ConfigError
from llmcache.cli.output import INTERRUPTED

DATA_VARIABLE = "LLMCACHE_DATA"

DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(envvar=DATA_VARIABLE, help="Folder with the data sets. Default: official ones from the hub."),
]
ResultsDir: TypeAlias = Annotated[Path, typer.Option(help="Folder that results are written under.")]
RESULTS = Path("results")
FiguresDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--results-dir",
        metavar="DIR",
        help="Also write config.yaml, env.json and metrics.json to a folder of this command under DIR.",
    ),
]
Configs: TypeAlias = Annotated[
    list[Path] | None,
    typer.Argument(metavar="CONFIG...", help="YAML files. Default: all in configs/ but smoke.yaml."),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting: --set data.path=a.csv data.text=question rounds=3, for instance.",
    ),
]
CONFIGS = Path("configs")
SMOKE = "smoke.yaml"  # for trial runs; its figures are no results


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Within this context, Ctrl-C prints `message` and exits with status `INTERRUPTED`."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"llmcache: {message}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def told_apart(files: Sequence[Path], changes: Sequence[str] | None) -> tuple[list[Path], list[str]]:
    """Separate files from changes of settings: in `--set a=1 b=2`, the second change is parsed as a file."""
    more = [path for path in files if "=" in str(path) and not path.exists()]
    return [path for path in files if path not in more], [*(changes or ()), *map(str, more)]


def all_configs() -> list[Path]:
    """Return all YAML files in the folder `configs` except the smoke test."""
    found = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name != SMOKE]
    if not found:
        raise ConfigError(f"no YAML file in {CONFIGS.absolute()}; change to the project's folder, or name the files")
    return found


def make_results_folder(path: Path | None) -> None:
    """Create the results folder, if given, before a long run that writes into it."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--results-dir {path}: cannot be made a folder ({error.strerror}); give one that can be written"
        ) from error


def write_results(
    results_dir: Path | None, name: str, config: Mapping[str, Any], env: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Write figures as a run's results, if a results folder is given, and print where."""
    from experiments.runs.runner import write_figures

    if results_dir is not None:
        write_figures(results_dir / name, config, env, metrics)
        typer.echo(f"written to {results_dir / name}")
