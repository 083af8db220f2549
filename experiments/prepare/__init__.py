"""Real, small models for the experiments: one file a recipe, trained here or, where one can be had, fetched.

Order -> squad_v2, openbookqa, intent, wikitext   data and head; training, trainer: seeded, resumable
      -> smollm2                                  fetched, and checked
      -> a folder with the model and its figures, which `models.loading` finds by its name
"""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.models.loading import FIGURES, MINILM, SMOLLM2, Loaded
from experiments.prepare.training import Order, as_words, begin, finish
from experiments.support.environment import describe
from experiments.support.files import write_whole, written_by_others
from experiments.support.lock import held
from llmcache import ConfigError
from llmcache.lab import quiet

Recipe = Callable[[Order], tuple[Loaded, dict[str, Any]]]


def _of(module: str, **options: str) -> Recipe:
    """A recipe by the module it is in, which is imported when it is used: most who ask want the names of recipes."""

    def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
        made: tuple[Loaded, dict[str, Any]] = import_module(f"{__name__}.{module}").prepare(order, **options)
        return made

    return prepare


#: By the name of the folder that the model goes to.
RECIPES: Mapping[str, Recipe] = {
    "minilm-squad_v2": _of("squad_v2"),
    "minilm-openbookqa": _of("openbookqa"),
    "minilm-banking77": _of("intent", data="banking77"),
    "minilm-snips": _of("intent", data="snips"),
    "minilm-hwu64": _of("intent", data="hwu64"),
    "gpt2-wikitext": _of("wikitext"),
    "minilm-support-desk": _of("support_desk"),
    SMOLLM2: _of("smollm2"),
}


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
    """Train or fetch a model, unless it is there: its figures, and whether it was made now. A training resumes."""
    check(recipe)
    if epochs is not None and epochs <= 0:
        raise ConfigError(f"epochs: must be more than 0 (got {epochs})")
    folder = models_dir / recipe
    options = {"base": base, "seed": seed, "limit": limit, "epochs": epochs}
    if not (folder / FIGURES).is_file():
        with held(models_dir / f".{recipe}.lock"):
            if not (folder / FIGURES).is_file():  # another process may have finished it just now
                return _make(recipe, Order(base, folder, data_dir, seed, limit, epochs), options), True
    return _there(folder, options), False


def _make(recipe: str, order: Order, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make a model and write it down, its figures last."""
    begin(order.folder, options)
    with quiet():
        loaded, figures = RECIPES[recipe](order)
        with written_by_others(order.folder):
            loaded.model.save_pretrained(order.folder)  # type: ignore[operator]
            loaded.tokenizer.save_pretrained(order.folder)
    figures = {"recipe": recipe, "options": options, **figures, "environment": describe(order.seed)}
    write_whole(order.folder / FIGURES, json.dumps(figures, indent=2) + "\n")
    finish(order.folder)
    return figures


def check(recipe: str) -> None:
    """Refuse a name that is none of `RECIPES`."""
    if recipe not in RECIPES:
        raise ConfigError(f"recipe: {recipe!r} is not known; known: {', '.join(RECIPES)}")


def _there(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a model that was made before."""
    figures: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    if (theirs := figures["options"]) != options:
        raise ConfigError(
            f"{folder}: made with {as_words(theirs, options)}, not with {as_words(options, theirs)}; "
            "give what it was made with, or delete the folder"
        )
    return figures
