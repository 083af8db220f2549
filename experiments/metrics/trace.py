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
    """What one method did.

    Attributes:
        ms: Wall time of each request, milliseconds, (R, N).
        served: What served each request, (R, N): a rung or kind of match, `computed` or `bypassed`.
        evicting: Whether an entry had to leave for it, (R, N).
        answers: Those of the first round, N.
        notes: What happened to each request of the first round, N.
        nbytes: Bytes held after the last round; None where nothing is ever held.
        n_entries: Entries held then; likewise.
    """

    ms: NDArray[np.float64]
    served: NDArray[np.str_]
    evicting: NDArray[np.bool_]
    answers: Sequence[Answer]
    notes: Sequence[Served]
    nbytes: int | None = None
    n_entries: int | None = None

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
