"""`llmcache prepare`: train the small models that the experiments use."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcache.cli.options import DATA_VARIABLE, MODELS_VARIABLE

INTERRUPTED = 130  # exit status of a shell's command that Ctrl-C ended: 128 + SIGINT


def command(
    recipes: Annotated[list[str], typer.Argument(help="Names of models, or `all`.", show_default=False)],
    models_dir: Annotated[Path, typer.Option(envvar=MODELS_VARIABLE, help="Each model gets a folder in it.")] = Path(
        "models"
    ),
    data_dir: Annotated[
        Path | None, typer.Option(envvar=DATA_VARIABLE, help="Folder with the data sets. Default: the hub.")
    ] = None,
    base: Annotated[str, typer.Option(help="Model to fine-tune: minilm, a folder or a hub name.")] = "minilm",
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    limit: Annotated[int | None, typer.Option(min=8, help="Use that many records only, to try things out.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead of the recipe's own number; more than 0.")] = None,
) -> None:
    """Train models for the experiments, on real data; those that are there already are left as they are.

    A training that was interrupted goes on from its last checkpoint.
    """
    from rich.console import Console

    from experiments.prepare import RECIPES, check, prepare

    chosen = list(RECIPES) if recipes == ["all"] else recipes
    for recipe in chosen:
        check(recipe)
    console = Console()
    for recipe in chosen:
        try:
            figures, is_new = prepare(recipe, models_dir, data_dir, base=base, seed=seed, limit=limit, epochs=epochs)
        except KeyboardInterrupt:
            told = "interrupted; the same command goes on from the last checkpoint, if there is one"
            typer.echo(f"llmcache: {recipe}: {told}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        console.print(_table(recipe, figures))
        typer.echo(f"{'trained' if is_new else 'there already'}: {models_dir / recipe}")


def _table(recipe: str, figures: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column(recipe, overflow="fold")
    table.add_column("", justify="right", overflow="fold")
    shown = {name: value for name, value in figures.items() if name not in ("recipe", "options", "environment")}
    for row in _rows(shown):
        table.add_row(*row)
    return table


def _rows(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of each figure, those of inner mappings with the outer name before theirs."""
    for name, value in figures.items():
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _rows(value, f"{label}: ")
        else:
            yield label, _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {int: "{:,}", float: "{:,.4g}", type(None): ""}.get(type(value), "{}").format(value)
