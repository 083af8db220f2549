"""`llmcache run`: run experiments from their YAML files."""

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import RESULTS, Changes, DataDir, ResultsDir, make_results_folder, told_apart
from llmcache.cli.options import ModelsDir
from llmcache.cli.table import show_table

if TYPE_CHECKING:
    from experiments.runs.runner import Finished


def command(
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
    from experiments.runs.runner import load_all, run_one
    from experiments.support.files import Folders

    configs, changes = told_apart(configs, changes)
    runs = load_all(configs, changes)
    make_results_folder(results_dir)
    finished = []
    for run in runs:
        done = run_one(run, results_dir, Folders(data_dir, models_dir), force)
        finished.append(done.path)
        _show(done)
        typer.echo(f"{'measured' if done.is_new else 'kept from before'}: {done.path}\n")
    for path in _draw(finished, is_whole=not changes):
        typer.echo(f"drawn: {path}")


def _draw(folders: Sequence[Path], is_whole: bool) -> list[Path]:
    """Draw the pictures of finished runs, whatever --set changed; none without matplotlib."""
    from experiments.report.pictures import draw_all

    return [] if find_spec("matplotlib") is None else draw_all(folders, is_whole)


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
