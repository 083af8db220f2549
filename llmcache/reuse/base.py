"""What a rung has to do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llmcache.execution.old_call import Call, Reuse
from llmcache.request.rows import Row

#: What a forward is passed: by position, and by name.
Passed = tuple[tuple[Any, ...], dict[str, Any]]


class Rung(ABC):
    """One way to serve rows from what is stored. Two methods are each rung's own.

    Four more, which do nothing here, are for rungs with `serves_calls`: these serve the beginning of a call before
    its layers run, so they see its arguments, its output and its end, not its layers one by one.

    The constructor takes the cache's banks (`llmcache.reuse.CacheBanks`); the class sets `name` and `is_lossless`.

    Attributes:
        name: As outcomes and stats call it.
        is_lossless: What it serves is what the row would have computed. Otherwise hits may be checked and audited.
        serves_calls: It serves whole calls, and is asked at no layer.
    """

    name: str
    is_lossless: bool
    serves_calls = False

    @abstractmethod
    def applies_at(self, layer: int) -> bool:
        """Whether rows are to be decided before this layer runs; of one layer always the same, and it never fails."""

    @abstractmethod
    def decide(self, call: Call, rows: Sequence[Row], layer: int) -> list[Reuse]:
        """Decide for rows that no safer rung served. Rows left out are computed.

        Args:
            call: The forward under way, which was read.
            rows: Rows to decide, each on its own.
            layer: The layer about to run.
        """

    def begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Passed:
        """Before the trunk: what to run it with. If this fails, it is run with what it was passed."""
        return args, kwargs

    def complete(self, call: Call, output: Any) -> Any:
        """After the trunk: its output at all positions. If this fails, so does the call: nothing stands in for it."""
        return output

    def store(self, call: Call, output: Any) -> None:
        """Keep what a call that has succeeded computed."""

    def abandon(self, call: Call) -> None:
        """Undo what was begun of a call that failed."""
