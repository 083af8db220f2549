"""What a task gives to every method alike: a model, requests in their order, and how an answer is read and scored.

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
from experiments.support.progress import tracked
from experiments.support.section import Section

Answer = Any


class TaskSettings(Section):
    """Settings of every task."""

    name: str  # A key of `experiments.tasks.TASKS`
    # `minilm` (all-MiniLM-L6-v2 from its package), a local folder, the name of a prepared model, a name on the Hugging
    # Face hub, or `untrained` (tiny, with random weights).
    model: str = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)  # ask that many requests only, from the beginning of the data

    @property
    def title(self) -> str:
        """What results call the task."""
        return self.name


class OfficialSettings(TaskSettings):
    """Settings of a task on a published data set."""

    # `official`: the set as published, from the data folder or the hub. `made`: small records that the project makes
    # itself (`experiments.data.made`), to try things out.
    data: Literal["official", "made"] = "official"


@dataclass(frozen=True, slots=True)
class Request:
    id: str  # its name in the data
    inputs: Inputs  # as the model takes it: tensors with one request in the first dimension
    text: str  # what a user would have typed: what response caches and document embeddings look at
    reference: Any  # what the task scores an answer against
    # Requests that share it are not independent: questions on one passage, windows made of one window. Nor are those of
    # one id in any case.
    cluster: str | None = None


class Workload:
    """A task with its model, ready to be served. Unless a task says otherwise, an answer is right or wrong.

    Attributes:
        module: `module(**request.inputs)` gives the output that `answer` reads. Not wrapped.
        tokenizer: Of the model.
        requests: In the order in which they are asked.
        payload: What the model's head reads, where that cannot be seen from outside; else None.
        metric: Name of the quality figure that `scores` gives.
        facts: What is worth knowing of data and model, for the results.
    """

    metric = "accuracy"
    payload: str | None = None
    module: nn.Module
    tokenizer: Any
    requests: Sequence[Request]
    facts: dict[str, Any]

    def of(self, requests: Sequence[Request]) -> Self:
        """The same with other requests."""
        other = copy(self)
        other.requests = requests
        return other

    def after(self, n: int) -> Self:
        """The same without the first requests."""
        return self.of(self.requests[n:])

    def answer(self, output: Any, number: int) -> Answer:
        """What request `number` is told, given an output of the model: its own, or one that was made for another."""
        raise NotImplementedError

    def answer_all(self, what: str) -> list[Answer]:
        """What the model tells each request by itself, shown as it goes behind the words `what`."""
        with torch.inference_mode():
            numbered = enumerate(tracked(self.requests, what))
            return [self.answer(self.module(**request.inputs), number) for number, request in numbered]

    def mix(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """An output whose row r is a row of another output: the parts are (output, its row), one a row."""
        return parts[0][0]  # a request is one row

    def borrowed(self, answer: Answer) -> Answer:
        """What a request is told when it gets the answer that was given to another one, word for word."""
        return answer

    def is_changed(self, one: Answer, other: Answer) -> bool:
        """Whether two answers to one request differ, in the sense of `changed_answers`."""
        return bool(one != other)

    def scores(self, answers: Sequence[Answer]) -> NDArray[np.float64]:
        """How good each answer is, 0 to 1, (N,): their mean is the task's metric."""
        pairs = zip(answers, self.requests, strict=True)
        return np.array([float(told == request.reference) for told, request in pairs])

    def extras(self, answers: Sequence[Answer]) -> dict[str, float | None]:
        """Further figures over all answers, which are no mean of `scores`."""
        return {}

    def show(self, answer: Answer) -> str:
        """The answer in one cell of a table."""
        return str(answer)
