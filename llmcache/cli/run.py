"""`llmcache run`: run experiments from their YAML files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from experiments.runner import Finished


def command(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG...", help="YAML files, one experiment each; a list in one is a grid."),
    ],
    data_dir: Annotated[
        Path | None, typer.Option(envvar="LLMCACHE_DATA", help="Folder that relative data paths are relative to.")
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Folder that results are written under.")] = Path("results"),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. cache.tau=0.9; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured before.")] = False,
) -> None:
    """Run experiments and keep settings, surroundings, rows and figures of each in a folder of its own."""
    from rich.console import Console

    from experiments.runner import run_all

    finished = list(run_all(configs, results_dir, data_dir, changes or (), force))
    console = Console()
    console.print(_table(finished))
    for done in finished:
        typer.echo(f"{'measured' if done.is_new else 'kept from before'}: {done.path}")


def _table(finished: "list[Finished]") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("run", overflow="fold")
    for heading in ("requests", "hits", "speed-\nup", "of all\nrounds", "accu-\nracy", "drop\npoints"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("changed\nanswers", justify="right", no_wrap=True)
    for done in finished:
        table.add_row(f"{done.run.group} {done.run.name}", *_cells(done.metrics))
    return table


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [
        f"{metrics['n']:,}",
        f"{metrics['hit_rate']:.1%}",
        f"{metrics['speedup']:.2f}",
        f"{metrics['speedup_min']:.2f} to {metrics['speedup_max']:.2f}",
        f"{metrics['accuracy']:.1%}",
        f"{100 * metrics['accuracy_drop']:.2f}",
        f"{metrics['changed_answers']:.2%}",
    ]
