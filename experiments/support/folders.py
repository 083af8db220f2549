"""Where things lie on this machine; not part of an experiment's settings."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of one machine.

    Attributes:
        data: Data sets; None for the hub.
        models: Prepared models; None where there are none.
    """

    data: Path | None = None
    models: Path | None = None
