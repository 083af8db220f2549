"""`llmcache sweep`: all runs behind the results, resumable."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from experiments.cli.options import (
    RESULTS,
    Configs,
    DataDir,
    ResultsDir,
    all_configs,
    interruptible,
    make_results_folder,
)
from llmcache import LLMCacheError
from llmcache.cli.options import ModelsDir

if TYPE_CHECKING:
    from experiments.runs.grid import Named
    from experiments.support.files import Folders


def command(
    configs: Configs = None,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Run all experiments that are not there yet; one that fails for its data or model does not stop the others.

    May be interrupted and started again, and started twice: what is finished stays, what another process is measuring
    is left to it. At the end the pictures are drawn.
    """
    from experiments.report.pictures import draw_all, require_matplotlib
    from experiments.runs.read import folders_of
    from experiments.runs.runner import load_all
    from experiments.support.files import Folders

    require_matplotlib()
    files = configs or all_configs()
    runs = load_all(files)
    make_results_folder(results_dir)
    with interruptible("interrupted; what is finished stays, and the same command goes on with the rest"):
        failed = _run_all(runs, results_dir, Folders(data_dir, models_dir))
    typer.echo(f"{len(draw_all(folders_of(files, results_dir)))} pictures; `llmcache report` tells what holds")
    if failed:
        typer.echo("\n".join([f"{len(failed)} of {len(runs)} failed:", *failed]), err=True)
        raise typer.Exit(1)


def _run_all(runs: Sequence["Named"], results_dir: Path, folders: "Folders") -> list[str]:
    """Run missing experiments; return the names of those that failed, with the reasons."""
    from experiments.runs.runner import run_one
    from experiments.support.files import InUseError

    failed = []
    for number, run in enumerate(runs, start=1):
        name = f"{run.group} {run.name}"
        typer.echo(f"[{number}/{len(runs)}] {name}")
        try:
            done = run_one(run, results_dir, folders)
        except InUseError:
            typer.echo("  skipped: another process is measuring it")
        except (LLMCacheError, FileNotFoundError) as error:  # other errors, such as a full disk, would stop all runs
            typer.echo(f"  failed: {error}")
            failed.append(f"{name}: {error}")
        else:
            typer.echo(f"  {'measured' if done.is_new else 'kept'}, {done.metrics['seconds']:.1f} s: {done.path}")
    return failed
