"""What is compared in each call to see whether weights or settings of a model were edited."""

from operator import is_
from typing import Any


class Mark:
    """What every edit makes another one. Compared by identity where values may be anything."""

    __slots__ = ("contents", "era", "held", "numbers", "settings")

    def __init__(
        self, numbers: tuple[int, ...], held: tuple[Any, ...], settings: tuple[Any, ...], contents: tuple[Any, ...]
    ) -> None:
        """Take addresses, versions and sizes; modules and tensors; settings; what containers of settings hold."""
        self.numbers = numbers
        self.held = held
        self.settings = settings
        self.contents = contents
        self.era = 0  # of the latest digests: it moves on whenever anything may have come between two of them

    def has_structure_of(self, other: "Mark") -> bool:
        """Whether all but settings are alike."""
        return self.numbers == other.numbers and _are_same(self.held, other.held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark):
            return NotImplemented
        return (  # written out: it is asked in each call
            self.numbers == other.numbers
            and len(self.held) == len(other.held)
            and all(map(is_, self.held, other.held))
            and len(self.settings) == len(other.settings)
            and all(map(is_, self.settings, other.settings))
            and self.contents == other.contents
        )

    def __hash__(self) -> int:
        return hash((self.numbers, self.contents, *map(id, self.settings)))


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
