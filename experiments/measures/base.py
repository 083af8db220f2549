"""What every measure is told, and what it gives."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field

from experiments.methods.base import Method, Served
from experiments.methods.cached import Cached
from experiments.models.architectures import Dtype
from experiments.support.section import Section
from experiments.tasks import make_task
from experiments.tasks.workload import Answer, Workload


class Experiment(Section):
    measure: str  # A key of `experiments.measures.MEASURES`
    seed: int = Field(default=0, ge=0)  # of samples, splits, orders and streams that are made

    @property
    def name(self) -> str:
        """What the run's folder is called, before the values of the grid."""
        return self.measure

    def to_dict(self) -> dict[str, Any]:
        """Plain values of every setting, defaults included; they make the same experiment again."""
        return self.model_dump(mode="json")


class TaskExperiment(Experiment):
    task: Any  # the task's own settings; its `name` is a key of `experiments.tasks.TASKS`

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        parts = dict(values)
        if "task" in parts:
            parts["task"] = make_task(parts["task"])
        return super().make(parts, name)

    @property
    def name(self) -> str:
        return f"{self.task.title}-{Path(self.task.model).name}"

    def about(self, workload: Workload) -> dict[str, Any]:
        """What metrics begin with: of which task, model and requests they are."""
        return {
            "task": self.task.title,
            "model": self.task.model,
            "n": len(workload.requests),
            "metric": workload.metric,
            "limit": self.task.limit,
            "facts": workload.facts,
        }


class DeviceExperiment(Experiment):
    """Settings of a run that times single calls of models on a device."""

    models: tuple[str, ...] = Field(min_length=1)  # architectures, with random weights; prepared models; folders
    device: str = "cpu"  # torch device
    # Where banks keep entries: `host`, from where hits are copied up to a GPU, or `device`. On a CPU they are the same.
    banks: tuple[Literal["host", "device"], ...] = Field(default=("host",), min_length=1)
    dtypes: tuple[Dtype, ...] = Field(default=("float32",), min_length=1)  # of weights and states


class CacheExperiment(TaskExperiment):
    """Settings of a run with one llmcache."""

    cache: dict[str, Any] = Field(default_factory=dict)  # settings of llmcache

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        made = super().make(values, name)
        Cached.check(made.cache, "cache")
        return made


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: Sequence[Mapping[str, Any]]  # all with the same keys: one a request and method, or one a point of a curve
    metrics: Mapping[str, Any]


def serve_once(method: Method, numbers: Iterable[int]) -> tuple[list[Answer], list[Served]]:
    """Let a method answer requests from cold, untimed: answers, and what happened to each request."""
    answers, notes = [], []
    with torch.inference_mode():
        method.begin()
        for number in numbers:
            answers.append(method.ask(number))
            notes.append(method.last())
        method.end()
    return answers, notes
