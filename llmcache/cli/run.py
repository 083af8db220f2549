"""`llmcache run`: run experiments from their YAML files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcache.cli.options import RESULTS, DataDir, ModelsDir, ResultsDir

if TYPE_CHECKING:
    from experiments.runner import Finished

_NAME_WIDTH = 17  # of the first column, which is what gives way; the others then fit into 80


def command(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files, one experiment each; a list in one is a grid."),
    ],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    results_dir: ResultsDir = RESULTS,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. rounds=3; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured before.")] = False,
) -> None:
    """Run experiments and keep settings, surroundings, rows and figures of each in a folder of its own."""
    from rich.console import Console

    from experiments.folders import Folders
    from experiments.runner import load_all, run_one

    console = Console()
    for run in load_all(configs, changes or ()):
        done = run_one(run, results_dir, Folders(data_dir, models_dir), force)
        console.print(_table(done))
        typer.echo(f"{'measured' if done.is_new else 'kept from before'}: {done.path}\n")


def _table(done: "Finished") -> Any:
    """The methods of a run, or the rows of `summary` that another measure gives."""
    from rich import box
    from rich.table import Table

    metrics = done.metrics
    rows = metrics["summary"] if "summary" in metrics else _method_rows(metrics)
    about = f": {metrics['n']:,} requests" if "n" in metrics else ""
    title = f"{done.run.group} {done.run.name}{about}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    first, *others = rows[0] if rows else ("nothing",)
    table.add_column(first, overflow="fold", min_width=_NAME_WIDTH)
    for heading in others:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(_show(value) for value in row.values()))
    return table


def _method_rows(metrics: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the measure `serve` says of each method, as cells by column."""
    return [{"method": label, **_cells(figures, metrics["metric"])} for label, figures in metrics["methods"].items()]


def _cells(figures: Mapping[str, Any], metric: str) -> Mapping[str, str]:
    bounds = figures["accuracy_drop_ci"]
    return {
        "hits": f"{figures['hit_rate']:.1%}",
        "speed-\nup": f"{figures['speedup']:.2f}",
        "of all\nrounds": f"{figures['speedup_min']:.2f} … {figures['speedup_max']:.2f}",
        metric: f"{figures['accuracy']:.1%}",
        "drop\npoints": f"{100 * figures['accuracy_drop']:.2f}",
        "95 % of\ndrop": "" if bounds is None else f"{100 * bounds[0]:.2f} … {100 * bounds[1]:.2f}",
        "changed\nanswers": f"{figures['changed_answers']:.2%}",
    }


def _show(value: Any) -> str:
    """A figure as text; missing is empty, never 0."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
