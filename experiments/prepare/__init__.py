"""Small real models for the experiments: one file per recipe, trained here or fetched where available.

Order -> squad_v2, openbookqa, intent, wikitext   data and head; training, trainer: seeded, resumable
      -> smollm2                                  fetched, and checked
      -> a folder with the model and its figures, which `models.loading` finds by name
"""

import json
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.models.loading import FIGURES, MINILM, PREPARED, Loaded
from experiments.prepare.training import CHECKPOINTS, Order, as_words, begin
from experiments.support.environment import describe
from experiments.support.files import held, write_whole, written_by_others
from llmcache import ConfigError
from llmcache.lab import quiet


def prepare(
    recipe: str,
    models_dir: Path,
    data_dir: Path | None,
    *,
    base: str = MINILM,
    seed: int = 0,
    limit: int | None = None,
    epochs: float | None = None,
) -> tuple[dict[str, Any], bool]:
    """Train or fetch a model unless it exists; return its figures, and whether it was made now. Training resumes."""
    check(recipe)
    if epochs is not None and epochs <= 0:
        raise ConfigError(f"epochs: must be more than 0 (got {epochs})")
    folder = models_dir / recipe
    options = {"base": base, "seed": seed, "limit": limit, "epochs": epochs}
    if not (folder / FIGURES).is_file():
        with held(models_dir / f".{recipe}.lock"):
            if not (folder / FIGURES).is_file():  # another process may have finished it meanwhile
                return _make(recipe, Order(base, folder, data_dir, seed, limit, epochs), options), True
    return _there(folder, options), False


def _make(recipe: str, order: Order, options: Mapping[str, Any]) -> dict[str, Any]:
    begin(order.folder, options)
    with quiet():
        module, told = PREPARED[recipe]
        # Recipes are imported on use: most callers only need the names.
        made: tuple[Loaded, dict[str, Any]] = import_module(f"{__name__}.{module}").prepare(order, **told)
        loaded, figures = made
        with written_by_others(order.folder):
            loaded.model.save_pretrained(order.folder)  # type: ignore[operator]
            loaded.tokenizer.save_pretrained(order.folder)
    figures = {"recipe": recipe, "options": options, **figures, "environment": describe(order.seed)}
    write_whole(order.folder / FIGURES, json.dumps(figures, indent=2) + "\n")
    shutil.rmtree(order.folder / CHECKPOINTS, ignore_errors=True)
    return figures


def check(recipe: str) -> None:
    if recipe not in PREPARED:
        raise ConfigError(f"recipe: {recipe!r} is not known; known: {', '.join(PREPARED)}")


def _there(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    if (theirs := figures["options"]) != options:
        raise ConfigError(
            f"{folder}: made with {as_words(theirs, options)}, not with {as_words(options, theirs)}; "
            "give what it was made with, or delete the folder"
        )
    return figures
