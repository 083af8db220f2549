"""Options that commands share: where data, models and results lie."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

DATA_VARIABLE = "LLMCACHE_DATA"
MODELS_VARIABLE = "LLMCACHE_MODELS"

DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(envvar=DATA_VARIABLE, help="Folder with the data sets. Default: official ones from the hub."),
]
ModelsDir: TypeAlias = Annotated[
    Path | None, typer.Option(envvar=MODELS_VARIABLE, help="Folder with what `llmcache prepare` made.")
]
ResultsDir: TypeAlias = Annotated[Path, typer.Option(help="Folder that results are written under.")]
RESULTS = Path("results")
