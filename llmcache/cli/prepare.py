"""`llmcache prepare`: train the small models that the experiments use."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipes: Annotated[list[str], typer.Argument(help="Names of models, or `all`.", show_default=False)],
    models_dir: Annotated[Path, typer.Option(envvar="LLMCACHE_MODELS", help="Each model gets a folder in it.")] = Path(
        "models"
    ),
    data_dir: Annotated[
        Path | None, typer.Option(envvar="LLMCACHE_DATA", help="Folder with the data sets. Default: the hub.")
    ] = None,
    base: Annotated[str, typer.Option(help="Model to fine-tune: minilm, a folder or a hub name.")] = "minilm",
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    limit: Annotated[int | None, typer.Option(min=8, help="Use that many records only, to try things out.")] = None,
    epochs: Annotated[float | None, typer.Option(min=0.0, help="Instead of the recipe's own number.")] = None,
) -> None:
    """Train models for the experiments, on real data; those that are there already are left as they are.

    A training that was interrupted goes on from its last checkpoint.
    """
    from experiments.prepare import RECIPES, prepare

    for recipe in RECIPES if recipes == ["all"] else recipes:
        figures, is_new = prepare(recipe, models_dir, data_dir, base=base, seed=seed, limit=limit, epochs=epochs)
        typer.echo(f"{recipe}: {'trained' if is_new else 'is there already'}, {models_dir / recipe}")
        hidden = ("recipe", "options", "environment")
        for name, value in figures.items():
            if name not in hidden:
                typer.echo(f"  {name}: {value}")
