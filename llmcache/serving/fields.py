"""What a route calls its inputs: an error names the one that was wrong, and what to set, in the dialect's words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from llmcache.serving.refusals import Refusal

_OF_SERVER: Final = ("overloaded", "unhealthy")  # whose reason is no input

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of the inputs of one request."""

    name: str  # of the field that holds them
    is_list: bool  # they are several, named by their places
    first: str | None = None  # a field that holds the first of them; the list begins after it
    beside: str | None = None  # a field whose text is joined to each of them
    cut: str = "set `truncate`"  # what to do to have inputs cut that are too long

    def named(self, refusal: Refusal, i: int) -> Refusal:
        """Return a refusal that names the i-th input, which was refused."""
        if refusal.kind in _OF_SERVER:
            return refusal
        name = self._name(i)
        text = f"{refusal}: {name}" if refusal.kind == "backend" else f"{name} {refusal}"
        more = f"; shorten it, or {self.cut}" if refusal.kind == "too_long" else ""
        return Refusal(refusal.kind, text + more, param=self.name)

    def all(self, found: Sequence[_T | Refusal]) -> list[_T]:
        """Return what was found for the inputs, or raise the refusal of the first that was refused."""
        made: list[_T] = []
        for i, one in enumerate(found):
            if isinstance(one, Refusal):
                raise self.named(one, i)
            made.append(one)
        return made

    def each(self, work: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Return the result of `work` for each input, or raise the refusal of the first that is refused."""
        made = []
        for i, item in enumerate(items):
            try:
                made.append(work(item))
            except Refusal as refusal:
                raise self.named(refusal, i) from None
        return made

    def _name(self, i: int) -> str:
        if self.first is not None and i == 0:
            return f"`{self.first}`"
        name = f"{self.name}[{i - (self.first is not None)}]" if self.is_list else self.name
        return f"`{name}`" if self.beside is None else f"`{name}` with `{self.beside}`"
