"""What every measure is told, and what it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from experiments.section import Section
from experiments.tasks import make_task


class Experiment(Section):
    """Settings of one run.

    Attributes:
        measure: A key of `experiments.measures.MEASURES`.
        seed: Of samples, splits, orders and streams that are made.
    """

    measure: str
    seed: int = Field(default=0, ge=0)

    @property
    def name(self) -> str:
        """What the run's folder is called, before the values of the grid."""
        return self.measure

    def to_dict(self) -> dict[str, Any]:
        """Plain values of every setting, defaults included; they make the same experiment again."""
        return self.model_dump(mode="json")


class TaskExperiment(Experiment):
    """Settings of a run on one task.

    Attributes:
        task: The task's own settings; its `name` is a key of `experiments.tasks.TASKS`.
    """

    task: Any

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings, section by section; see `Section.make`."""
        parts = dict(values)
        if "task" in parts:
            parts["task"] = make_task(parts["task"])
        return super().make(parts, name)

    @property
    def name(self) -> str:
        """Task and model."""
        return f"{self.task.title}-{Path(self.task.model).name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run measured.

    Attributes:
        rows: All with the same keys: one a request and method, or one a point of a curve.
        metrics: Figures by name.
    """

    rows: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]
