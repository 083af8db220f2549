"""The output form of each kind of call (a `Packing`, say): learned from an output, or read from a store or a save.

A kind is a tuple of everything that decides the form, including the digest of the weights.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST = 64


class OutputFormats(dict[tuple[Any, ...], T | None], Generic[T]):
    """Output forms by kind; None if calls of that kind cannot be served."""

    def __init__(self, describe: Callable[[T], Any], read: Callable[[Any], T | None]) -> None:
        """Begin empty; `describe` turns a form into JSON values, `read` does the reverse."""
        super().__init__()
        self._describe, self._read = describe, read
        self._described: dict[str, Any] = {}  # descriptions that are not read yet, by digest of the kind

    def learn(self, kind: tuple[Any, ...], form: T | None) -> T | None:
        """Set and return the form of a kind; None: it cannot be served."""
        if len(self) >= _MOST:
            self.clear()
        self[kind] = form
        return form

    def add_described(self, digest: str, described: Any) -> None:
        """Add a description that another or an earlier process made of a kind with this digest."""
        if len(self._described) < _MOST:
            self._described.setdefault(digest, described)

    def knows(self, kind: tuple[Any, ...]) -> bool:
        """Whether the form of a kind is known, None included."""
        if kind not in self and self._described:
            described = self._described.get(digest_of(kind))
            if described is not None and (form := self._read(described)) is not None:
                self[kind] = form
        return kind in self

    def describe(self, kind: tuple[Any, ...]) -> list[Any]:
        """Return the arguments of `add_described` for a kind that can be served."""
        form = self[kind]
        assert form is not None
        return [digest_of(kind), self._describe(form)]

    def state(self) -> list[list[Any]]:
        """Return the arguments of `add_described` for every kind that can be served."""
        own = {digest_of(kind): self._describe(form) for kind, form in list(self.items()) if form is not None}
        return [list(one) for one in (self._described | own).items()]


def digest_of(kind: tuple[Any, ...]) -> str:
    """Return a digest of a kind (16 hex digits), the same in all processes."""
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:16]


def name_of(kind: type) -> str:
    """Return the name by which `type_of` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def type_of(name: str) -> type | None:
    """Return a class by name if it is loaded, else None: a name in a store must not cause an import."""
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None)
    return found if isinstance(found, type) else None
