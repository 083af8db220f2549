"""What workers and the store hold, and what that serves."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request is made of: values in memory, values in the store, and values that are computed."""

    n_local: int
    n_remote: int
    n_computed: int
    remote: Sequence[Hashable] = ()
    looks: bool = True  # whether the store is asked before: something is not in memory

    @property
    def alone(self) -> "Plan":
        """Without the store, which was late."""
        return Plan(self.n_local, 0, self.n_computed + self.n_remote)


class Knowledge(Protocol):
    """Who can serve whom, for the requests of one stream, and what each worker knows."""

    n: int  # requests
    announces: bool  # whether workers hear of what others computed; else they find it by its name

    def begin(self, n_workers: int, worker_values: int, store_values: int) -> None:
        """Nobody knows anything; memories hold so many values."""

    def route(self, number: int) -> str:
        """What a request is routed by."""

    def plan(self, worker: int, number: int) -> Plan:
        """How a worker would serve a request now."""

    def fetched(self, worker: int, values: Iterable[Hashable]) -> None:
        """A worker holds values from now on that it read."""

    def computed(self, worker: int, number: int, plan: Plan) -> Sequence[Hashable]:
        """Likewise what it computed; returns what is to be written to the store."""

    def is_stored(self, value: Hashable) -> bool:
        """Whether the store has it."""

    def stored(self, value: Hashable) -> None:
        """The store has it from now on."""

    def told(self, values: Iterable[Hashable]) -> None:
        """All workers may hear of them from now on."""

    def hear(self, worker: int) -> int:
        """A worker hears all that was announced since it heard last; returns how much that was."""


class Held:
    """Values of one size; what was used longest ago leaves."""

    def __init__(self, most: int) -> None:
        """Hold so many at most."""
        self._most = most
        self._values: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, value: Hashable) -> bool:
        return value in self._values

    def add(self, value: Hashable) -> Hashable | None:
        """Hold or use a value; returns what left for it."""
        self._values[value] = None
        self._values.move_to_end(value)
        return self._values.popitem(last=False)[0] if len(self._values) > self._most else None
