"""Tasks: one file each, with a function `run(experiment, data_dir) -> Outcome`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task measured.

    Attributes:
        rows: One a request, all with the same keys.
        metrics: Figures by name.
    """

    rows: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]
