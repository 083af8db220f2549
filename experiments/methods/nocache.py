"""The model alone, as one would serve it: scaled dot-product attention, eval mode, inference mode."""

from experiments.methods.base import Twinned
from experiments.tasks.workload import Answer


class NoCache(Twinned):
    """Computes every request."""

    nbytes = None
    n_entries = None

    def ask(self, number: int) -> Answer:
        return self._workload.answer(self._module(**self._workload.requests[number].inputs), number)
