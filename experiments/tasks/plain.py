"""What a task does with outputs and answers unless it says otherwise.

Sizes: N requests.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.tasks.workload import Answer, Request


class Plain:
    """A request is one row, its answer right or wrong, and the reference the right one; see `Workload`."""

    metric = "accuracy"
    payload: str | None = None
    requests: Sequence[Request]

    def mix(self, parts: Sequence[tuple[Any, int]]) -> Any:
        """The one part's output."""
        return parts[0][0]

    def borrowed(self, answer: Answer) -> Answer:
        return answer

    def is_changed(self, one: Answer, other: Answer) -> bool:
        return bool(one != other)

    def scores(self, answers: Sequence[Answer]) -> NDArray[np.float64]:
        """1 for the right answer, else 0, (N,)."""
        pairs = zip(answers, self.requests, strict=True)
        return np.array([float(told == request.reference) for told, request in pairs])

    def extras(self, answers: Sequence[Answer]) -> dict[str, float | None]:
        return {}
