"""(4) Layer Execution Manager: the rungs that decide what is reused, and the runner that carries it out.

One file a rung, one interface, safest first: a row goes to the first rung that serves it.
"""

from collections.abc import Sequence
from typing import Protocol

from llmcache.request.call import Call, Reuse
from llmcache.request.rows import Row


class Rung(Protocol):
    """One way to serve rows from what is stored."""

    name: str
    is_lossless: bool  # whether what it serves is what the row would have computed; otherwise it may be checked

    def applies_at(self, layer: int) -> bool:
        """Whether rows are to be decided before this layer runs."""

    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        """Decide for rows that no safer rung served. Rows left out are computed.

        Args:
            call: The forward under way; its scope and fingerprints are known.
            rows: Rows to decide, each on its own.
            layer: The layer about to run.
        """
