"""What a task gives to every method alike: a model, requests in their order, and how an answer is read and scored.

Sizes: N requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from experiments.models.loading import Inputs

Answer = Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    id: str  # its name in the data
    inputs: Inputs  # as the model takes it: tensors with one request in the first dimension
    text: str  # what a user would have typed: what response caches and document embeddings look at
    reference: Any  # what the task scores an answer against
    # Requests that share it are not independent: questions on one passage, windows made of one window. Nor are those of
    # one id in any case.
    cluster: str | None = None


class Workload(Protocol):
    """A task with its model, ready to be served.

    Attributes:
        module: `module(**request.inputs)` gives the output that `answer` reads. Not wrapped.
        tokenizer: Of the model.
        requests: In the order in which they are asked.
        payload: What the model's head reads, where that cannot be seen from outside; else None.
        metric: Name of the quality figure that `scores` gives.
        facts: What is worth knowing of data and model, for the results.
    """

    module: nn.Module
    tokenizer: Any
    requests: Sequence[Request]
    payload: str | None
    metric: str
    facts: dict[str, Any]

    def answer(self, output: Any, number: int) -> Answer:
        """What request `number` is told, given an output of the model: its own, or one that was made for another."""

    def mix(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """An output whose row r is a row of another output: the parts are (output, its row), one a row."""

    def borrowed(self, answer: Answer) -> Answer:
        """What a request is told when it gets the answer that was given to another one, word for word."""

    def is_changed(self, one: Answer, other: Answer) -> bool:
        """Whether two answers to one request differ, in the sense of `changed_answers`."""

    def scores(self, answers: Sequence[Answer]) -> NDArray[np.float64]:
        """How good each answer is, 0 to 1, (N,): their mean is the task's metric."""

    def extras(self, answers: Sequence[Answer]) -> dict[str, float | None]:
        """Further figures over all answers, which are no mean of `scores`."""

    def show(self, answer: Answer) -> str:
        """The answer in one cell of a table."""
