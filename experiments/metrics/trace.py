"""What one method did on a stream.

Sizes: R rounds, N requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.methods.base import Served, is_hit
from experiments.tasks.workload import Answer


@dataclass(frozen=True, slots=True)
class Trace:
    """What one method did."""

    ms: NDArray[np.float64]  # wall time of each request, milliseconds, (R, N)
    served: NDArray[np.str_]  # what served each request, (R, N): a rung or kind of match, `computed` or `bypassed`
    evicting: NDArray[np.bool_]  # whether an entry had to leave for it, (R, N)
    answers: Sequence[Answer]  # those of the first round, N
    notes: Sequence[Served]  # what happened to each request of the first round, N
    nbytes: int | None = None  # bytes held after the last round; None where nothing is ever held
    n_entries: int | None = None  # entries held then; likewise

    @property
    def is_hit(self) -> NDArray[np.bool_]:
        """Whether something stored served it, (R, N)."""
        return is_hit(self.served)

    def after(self, n: int) -> "Trace":
        """The same without the first `n` requests."""
        return replace(
            self,
            ms=self.ms[:, n:],
            served=self.served[:, n:],
            evicting=self.evicting[:, n:],
            answers=self.answers[n:],
            notes=self.notes[n:],
        )
