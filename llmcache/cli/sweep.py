"""`llmcache sweep`: everything behind the results, resumable."""

from pathlib import Path
from typing import Annotated

import typer

from llmcache.cli.options import RESULTS, DataDir, ModelsDir, ResultsDir
from llmcache.errors import ConfigError, LLMCacheError

CONFIGS = Path("configs")
SMOKE = "smoke.yaml"  # tries out the chain; its figures are no results


def command(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CONFIG...", help="YAML files. Default: all in configs/ but smoke.yaml."),
    ] = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Run all experiments that are not there yet; one that fails for its data or model does not stop the others.

    May be interrupted and started again, and started twice: what is finished stays, what another process is measuring
    is left to it. At the end the pictures are drawn.
    """
    from experiments.folders import Folders
    from experiments.lock import InUseError
    from experiments.plots import draw_all, require_matplotlib
    from experiments.runner import load_all, run_one

    require_matplotlib()
    runs, failed = load_all(configs or _all_configs()), []
    for number, run in enumerate(runs, start=1):
        name = f"{run.group} {run.name}"
        typer.echo(f"[{number}/{len(runs)}] {name}")
        try:
            done = run_one(run, results_dir, Folders(data_dir, models_dir))
        except InUseError:
            typer.echo("  skipped: another process is measuring it")
        except (LLMCacheError, FileNotFoundError) as error:  # anything else, a full disk say, would stop the others too
            typer.echo(f"  failed: {error}")
            failed.append(f"{name}: {error}")
        else:
            typer.echo(f"  {'measured' if done.is_new else 'kept'}, {done.metrics['seconds']:.1f} s: {done.path}")
    typer.echo(f"{len(draw_all(results_dir))} pictures; `llmcache report` tells what holds")
    if failed:
        typer.echo("\n".join([f"{len(failed)} of {len(runs)} failed:", *failed]), err=True)
        raise typer.Exit(1)


def _all_configs() -> list[Path]:
    """All YAML files in the folder `configs` but the smoke test.

    Raises:
        ConfigError: There is none.
    """
    found = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name != SMOKE]
    if not found:
        raise ConfigError(f"no YAML file in {CONFIGS.absolute()}; change to the project's folder, or name the files")
    return found
