"""What commands share: options that say which experiments and where data and results lie, and writing results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from llmcache import ConfigError

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
SMOKE = "smoke.yaml"  # tries out the chain; its figures are no results


def told_apart(files: Sequence[Path], changes: Sequence[str] | None) -> tuple[list[Path], list[str]]:
    """Files, and all changes of settings: of `--set a=1 b=2` the second arrives among the files."""
    more = [path for path in files if "=" in str(path) and not path.exists()]
    return [path for path in files if path not in more], [*(changes or ()), *map(str, more)]


def all_configs() -> list[Path]:
    """All YAML files in the folder `configs` but the smoke test."""
    found = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name != SMOKE]
    if not found:
        raise ConfigError(f"no YAML file in {CONFIGS.absolute()}; change to the project's folder, or name the files")
    return found


def make_results_folder(path: Path | None) -> None:
    """Make the folder of all results, if one was given, before a long run that writes into it."""
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
    """Write figures as those of a run, if a folder of results was given, and say where."""
    from experiments.runs.folder import write_figures

    if results_dir is not None:
        write_figures(results_dir / name, config, env, metrics)
        typer.echo(f"written to {results_dir / name}")
