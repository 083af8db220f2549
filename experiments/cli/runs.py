"""`llmcache run`, `llmcache sweep` and `llmcache report`: experiments from YAML files, and what was measured."""

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import (
    RESULTS,
    Changes,
    Configs,
    DataDir,
    ResultsDir,
    all_configs,
    interruptible,
    make_results_folder,
    told_apart,
)
from llmcache import ConfigError, LLMCacheError
from llmcache.cli.options import ModelsDir
from llmcache.cli.table import show_table

if TYPE_CHECKING:
    from experiments.runs.runner import Finished


def run(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files, one experiment each; a list in one is a grid."),
    ],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    results_dir: ResultsDir = RESULTS,
    changes: Changes = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured before.")] = False,
) -> None:
    """Run experiments and keep settings, surroundings and figures of each in a folder of its own."""
    from experiments.report.pictures import draw_all
    from experiments.runs.runner import load_all, run_one
    from experiments.support.files import Folders

    configs, changes = told_apart(configs, changes)
    runs = load_all(configs, changes)
    make_results_folder(results_dir)
    finished = []
    for one in runs:
        done = run_one(one, results_dir, Folders(data_dir, models_dir), force)
        finished.append(done.path)
        _show(done)
        typer.echo(f"{'measured' if done.is_new else 'kept from before'}: {done.path}\n")
    for path in draw_all(finished, is_whole=not changes) if find_spec("matplotlib") else ():
        typer.echo(f"drawn: {path}")


def _show(done: "Finished") -> None:
    """Print the methods of a run, or the rows of `summary` for other measures."""
    from experiments.report.columns import SCREEN
    from experiments.report.markdown import named

    metrics, n_names = done.metrics, 1
    if "summary" in metrics:
        rows = metrics["summary"]
        texts = itertools.takewhile(lambda value: isinstance(value, str), rows[0].values() if rows else ())
        n_names = max(1, len(list(texts)))
    elif "methods" in metrics:
        rows = [named(SCREEN, {"label": label, **figures}) for label, figures in metrics["methods"].items()]
    else:
        return  # an earlier run's figures lack what the screen shows
    about = f": {metrics['n']:,} requests" if "n" in metrics else ""
    show_table(f"{done.run.group} {done.run.name}{about}", rows, n_names)


def sweep(
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
    from experiments.runs.runner import load_all, run_one
    from experiments.support.files import Folders, InUseError

    require_matplotlib()
    files, failed = configs or all_configs(), []
    runs = load_all(files)
    make_results_folder(results_dir)
    with interruptible("interrupted; what is finished stays, and the same command goes on with the rest"):
        for number, one in enumerate(runs, start=1):
            name = f"{one.group} {one.name}"
            typer.echo(f"[{number}/{len(runs)}] {name}")
            try:
                done = run_one(one, results_dir, Folders(data_dir, models_dir))
            except InUseError:
                typer.echo("  skipped: another process is measuring it")
            except (LLMCacheError, FileNotFoundError) as error:  # other errors, such as a full disk, would stop all
                typer.echo(f"  failed: {error}")
                failed.append(f"{name}: {error}")
            else:
                told = "measured" if done.is_new else "kept"
                typer.echo(f"  {told}, {done.metrics['seconds']:.1f} s: {done.path}")
    typer.echo(f"{len(draw_all(folders_of(files, results_dir)))} pictures; `llmcache report` tells what holds")
    if failed:
        typer.echo("\n".join([f"{len(failed)} of {len(runs)} failed:", *failed]), err=True)
        raise typer.Exit(1)


def report(configs: Configs = None, results_dir: ResultsDir = RESULTS, changes: Changes = None) -> None:
    """Write REPORT.md and its pictures again from what was measured: each claim of the paper, and its verdict.

    Only runs with the settings of the files count, as changed by --set; claims that other files test are left out.
    """
    from experiments.report.pictures import draw_all
    from experiments.report.write import write_report
    from experiments.runs.read import folders_of, others_beside, read_runs

    files, changes = told_apart(configs or (), changes)
    folders = folders_of(files or all_configs(), results_dir, changes)
    if not read_runs(folders) and (others := others_beside(folders)):
        raise ConfigError(
            f"{results_dir}: no results with the settings of these files, but {len(others)} with others "
            f"(of --set, or of the files before a change), {others[0].name} for instance; give the same --set, or "
            "measure first: llmcache sweep"
        )
    path = write_report(results_dir, folders)
    typer.echo(f"{path} and {len(draw_all(folders))} pictures")
