"""Options that commands share."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

MODELS_VARIABLE = "LLMCACHE_MODELS"

ModelsDir: TypeAlias = Annotated[
    Path | None, typer.Option(envvar=MODELS_VARIABLE, help="Folder in which models are looked up by name.")
]
