"""What is known of each kind of call: learned from an output of the trunk, or told by a store or a save.

A kind is a tuple of all that decides how a call's output is made up, the weights' digest included.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST = 64


class Kinds(dict[tuple[Any, ...], T | None], Generic[T]):
    """By kind; None where a call of that kind cannot be served."""

    def __init__(self, describe: Callable[[T], Any], read: Callable[[Any], T | None]) -> None:
        """Begin with none; `describe` turns what is known into what JSON can hold, `read` does the reverse."""
        super().__init__()
        self._describe, self._read = describe, read
        self._told: dict[str, Any] = {}  # by digest

    def learn(self, kind: tuple[Any, ...], known: T | None) -> T | None:
        """Know something of a kind."""
        if len(self) >= _MOST:
            self.clear()
        self[kind] = known
        return known

    def tell(self, digest: str, described: Any) -> None:
        """Take in what another process, or an earlier one, knew of a kind."""
        if len(self._told) < _MOST:
            self._told.setdefault(digest, described)

    def are_known(self, kind: tuple[Any, ...]) -> bool:
        """Whether anything is known of a kind."""
        if kind not in self and self._told:
            described = self._told.get(digest_of(kind))
            if described is not None and (known := self._read(described)) is not None:
                self[kind] = known
        return kind in self

    def describe(self, kind: tuple[Any, ...]) -> list[Any]:
        """What `tell` takes, of a kind that can be served."""
        known = self[kind]
        assert known is not None
        return [digest_of(kind), self._describe(known)]

    def state(self) -> list[list[Any]]:
        """What `tell` takes, of all kinds that can be served."""
        own = {digest_of(kind): self._describe(known) for kind, known in list(self.items()) if known is not None}
        return [list(one) for one in (self._told | own).items()]


def digest_of(kind: tuple[Any, ...]) -> str:
    """A short name of a kind, the same in all processes."""
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:16]


def name_of(kind: type) -> str:
    """Under which `type_of` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def type_of(name: str) -> type | None:
    """A class by name, if it is loaded: a name in a store must not have anything imported."""
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None)
    return found if isinstance(found, type) else None
