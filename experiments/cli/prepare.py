"""`llmcache prepare`: train or fetch the small models that the experiments use."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.options import DATA_VARIABLE, interruptible
from llmcache.cli.options import MODELS_VARIABLE
from llmcache.cli.table import show_table


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
    """Make models for the experiments: train them on real data, or fetch smollm2. Those that are there are left alone.

    A training that was interrupted goes on from its last checkpoint.
    """
    from experiments.models.loading import PREPARED
    from experiments.prepare import check, prepare

    chosen = list(PREPARED) if recipes == ["all"] else recipes
    for recipe in chosen:
        check(recipe)
    for recipe in chosen:
        with interruptible(
            f"{recipe}: interrupted; the same command goes on from the last checkpoint, if there is one"
        ):
            figures, is_new = prepare(recipe, models_dir, data_dir, base=base, seed=seed, limit=limit, epochs=epochs)
        shown = {name: value for name, value in figures.items() if name not in ("recipe", "options", "environment")}
        show_table(recipe, [{"figure": name, "value": value} for name, value in _flatten(shown)], n_names=2)
        folder = models_dir / recipe
        typer.echo(f"{'made' if is_new else 'there already'}: {folder}; in Python: {_loading(folder)}")


def _loading(folder: Path) -> str:
    """Return the expression that loads a prepared model with its head."""
    if (folder / "modules.json").is_file():
        return f"SentenceTransformer({str(folder)!r})"
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return f"transformers.{architecture}.from_pretrained({str(folder)!r})"


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each figure; names of nested figures are prefixed with the outer name."""
    for name, value in figures.items():
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{label}: ")
        else:
            yield label, value
