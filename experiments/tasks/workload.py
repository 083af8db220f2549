"""Workload of a task, the same for every method: a model, requests in order, and how answers are read and scored.

Sizes: N requests.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from experiments.models.loading import Inputs
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.section import Section

Answer = Any


class TaskSettings(Section):
    name: str  # a key of `experiments.tasks.TASKS`
    # `minilm` (all-MiniLM-L6-v2 from its package), a local folder, the name of a prepared model, a name on the Hugging
    # Face hub, `bert-base` (random weights), or `untrained` (tiny, with random weights).
    model: str = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)  # number of requests to use, from the beginning of the data

    @property
    def title(self) -> str:
        """Name of the task in results."""
        return self.name

    def build(self, folders: Folders, seed: int) -> "Workload":
        raise NotImplementedError


class OfficialSettings(TaskSettings):
    # `official`: the set as published, from the data folder or the hub. `made`: a few generated records
    # (`experiments.data.made`), for trial runs.
    data: Literal["official", "made"] = "official"


@dataclass(frozen=True, slots=True)
class Request:
    id: str  # its id in the data
    inputs: Inputs  # arguments of the model: tensors with one request in the first dimension
    text: str  # text a user would type: input of response caches and document embeddings
    reference: Any  # reference to score an answer against
    # Requests that share it are dependent: questions on one passage, windows made from one window. Requests with the
    # same id are always dependent.
    cluster: str | None = None


class Workload:
    """A task with its model, ready to serve. By default, an answer is right or wrong.

    Attributes:
        module: `module(**request.inputs)` gives the output that `answer` reads. Not wrapped.
        tokenizer: The model's tokenizer.
        requests: Requests in order of arrival.
        payload: What the model's head reads, if it cannot be detected from outside; else None.
        metric: Name of the quality figure from `scores`.
        facts: Facts on data and model for the results.
    """

    metric = "accuracy"
    payload: str | None = None
    module: nn.Module
    tokenizer: Any
    requests: Sequence[Request]
    facts: dict[str, Any]

    def of(self, requests: Sequence[Request]) -> Self:
        other = copy(self)
        other.requests = requests
        return other

    def after(self, n: int) -> Self:
        return self.of(self.requests[n:])

    def answer(self, output: Any, number: int) -> Answer:
        """Return the answer to request `number` from an output of the model, its own or another request's."""
        raise NotImplementedError

    def answer_all(self, what: str) -> list[Answer]:
        """Return the model's own answer to each request; `what` labels the progress."""
        with torch.inference_mode():
            numbered = enumerate(tracked(self.requests, what))
            return [self.answer(self.module(**request.inputs), number) for number, request in numbered]

    def mix(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """Return an output made of rows of other outputs: each part is (output, its row)."""
        return parts[0][0]  # a request is one row

    def borrowed(self, answer: Answer) -> Answer:
        """Return the answer a request gets if another request's answer is returned unchanged."""
        return answer

    def is_changed(self, one: Answer, other: Answer) -> bool:
        """Whether two answers to one request differ, as `changed_answers` counts."""
        return bool(one != other)

    def scores(self, answers: Sequence[Answer]) -> NDArray[np.float64]:
        """Return a score from 0 to 1 for each answer, (N,); their mean is the task's metric."""
        pairs = zip(answers, self.requests, strict=True)
        return np.array([float(told == request.reference) for told, request in pairs])

    def extras(self, answers: Sequence[Answer]) -> dict[str, float | None]:
        """Return further figures over all answers that are not means of `scores`."""
        return {}

    def show(self, answer: Answer) -> str:
        return str(answer)
