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
    from rich.table import Table

    table = Table()
    table.add_column("run")
    for heading in ("requests", "hit rate", "speed-up", "accuracy", "drop, points", "changed", "ms, no cache > cache"):
        table.add_column(heading, justify="right")
    for done in finished:
        table.add_row(f"{done.run.group} {done.run.name}", *_cells(done.metrics))
    return table


def _cells(metrics: Mapping[str, Any]) -> list[str]:
    return [
        f"{metrics['n']:,}",
        f"{metrics['hit_rate']:.1%}",
        f"{metrics['speedup']:.2f} ({metrics['speedup_min']:.2f} to {metrics['speedup_max']:.2f})",
        f"{metrics['accuracy']:.1%}",
        f"{100 * metrics['accuracy_drop']:+.2f}",
        f"{metrics['changed_answers']:.2%}",
        f"{metrics['nocache_ms']['median']:.2f} > {metrics['cache_ms']['median']:.2f}",
    ]
