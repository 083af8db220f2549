"""The model alone, as one would serve it: scaled dot-product attention, eval mode, inference mode."""

from collections.abc import Mapping
from typing import Any

from experiments.methods.base import Served, twin
from experiments.section import Section
from experiments.workload import Answer, Workload


class NoCache:
    """Computes every request."""

    class Settings(Section):
        """None."""

    nbytes = None
    n_entries = None

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        """Take a copy of the model."""
        self._workload = workload
        self._module = twin(workload.module)

    @classmethod
    def check(cls, options: Mapping[str, Any], name: str) -> None:
        """There are no options."""
        cls.Settings.make(options, name)

    def begin(self) -> None:
        """There is nothing to forget."""

    def ask(self, number: int) -> Answer:
        """Compute the answer."""
        return self._workload.answer(self._module(**self._workload.requests[number].inputs), number)

    def last(self) -> Served:
        """Computed."""
        return Served()

    def end(self) -> None:
        """Nothing was changed."""
