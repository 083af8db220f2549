"""Inputs and outputs common to every measure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from experiments.methods.base import Method, Served
from experiments.methods.cached import Cached
from experiments.models.architectures import Dtype
from experiments.support.section import Section
from experiments.tasks import make_task
from experiments.tasks.workload import Answer, Workload


class Experiment(Section):
    measure: str  # a key of `experiments.measures.MEASURES`
    seed: int = Field(default=0, ge=0)  # of samples, splits, orders and generated streams

    @property
    def name(self) -> str:
        """Name of the run's folder, before the values of the grid."""
        return self.measure

    def to_dict(self) -> dict[str, Any]:
        """Return plain values of every setting, defaults included; they recreate the experiment."""
        return self.model_dump(mode="json")


class TaskExperiment(Experiment):
    makers: ClassVar[Any] = {"task": make_task}
    task: Any  # settings of the task; its `name` is a key of `experiments.tasks.TASKS`

    @property
    def name(self) -> str:
        return f"{self.task.title}-{Path(self.task.model).name}"

    def about(self, workload: Workload) -> dict[str, Any]:
        return {
            "task": self.task.title,
            "model": self.task.model,
            "n": len(workload.requests),
            "metric": workload.metric,
            "limit": self.task.limit,
            "facts": workload.facts,
        }


class DeviceExperiment(Experiment):
    models: tuple[str, ...] = Field(min_length=1)  # architectures with random weights, prepared models, or folders
    device: str = "cpu"  # torch device
    # Where banks keep entries: `host`, from where hits are copied to a GPU, or `device`. The same on a CPU.
    banks: tuple[Literal["host", "device"], ...] = Field(default=("host",), min_length=1)
    dtypes: tuple[Dtype, ...] = Field(default=("float32",), min_length=1)  # of weights and states


class CacheExperiment(TaskExperiment):
    cache: dict[str, Any] = Field(default_factory=dict)  # settings of llmcache

    def check(self) -> None:
        super().check()
        Cached.check(self.cache, "cache")


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: Sequence[Mapping[str, Any]]  # all with the same keys: one per request and method, or one per point of a curve
    metrics: Mapping[str, Any]


def serve_once(method: Method, numbers: Iterable[int]) -> tuple[list[Answer], list[Served]]:
    """Run a method on requests from cold, untimed; return the answers, and the outcome of each request."""
    answers, notes = [], []
    with torch.inference_mode():
        method.begin()
        for number in numbers:
            answers.append(method.ask(number))
            notes.append(method.last())
        method.end()
    return answers, notes
