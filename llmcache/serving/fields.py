"""Field names of a route's inputs, so that errors name the wrong input and the option to set in the route's dialect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from llmcache.serving.refusals import Refusal

_SERVER_KINDS: Final = ("overloaded", "unhealthy")  # refusals that no input causes

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fields:
    """Field names of the inputs of one request."""

    name: str  # field that holds the inputs
    is_list: bool  # the field is a list; inputs are named by index
    first: str | None = None  # separate field that holds the first input; the list holds the others
    beside: str | None = None  # field whose text is paired with each input
    cut: str = "set `truncate`"  # advice for inputs that are too long

    def named(self, refusal: Refusal, i: int) -> Refusal:
        """Return the refusal of the i-th input with the input's name in its text."""
        if refusal.kind in _SERVER_KINDS:
            return refusal
        name = self._name(i)
        text = f"{refusal}: {name}" if refusal.kind == "backend" else f"{name} {refusal}"
        more = f"; shorten it, or {self.cut}" if refusal.kind == "too_long" else ""
        return Refusal(refusal.kind, text + more, param=self.name)

    def all(self, found: Sequence[_T | Refusal]) -> list[_T]:
        """Return the results of all inputs, or raise the first refusal among them, with the input's name."""
        for i, one in enumerate(found):
            if isinstance(one, Refusal):
                raise self.named(one, i)
        return cast(list[_T], found)

    def each(self, work: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Return `work(item)` for each input, or raise the first refusal, with the input's name."""
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
