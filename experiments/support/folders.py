"""Where things lie on this machine; not part of an experiment's settings."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of one machine."""

    data: Path | None = None  # data sets; None for the hub
    models: Path | None = None  # prepared models; None where there are none
