"""What a route calls its inputs: an error names the one that was wrong, and what to set, in the dialect's words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from llmcache.serving.refusals import Refusal
from llmcache.serving.tokenizing import TooLong

_OF_SERVER: Final = ("overloaded", "unhealthy")  # whose reason is no input

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fields:
    """Of one request.

    Attributes:
        name: The field that holds its inputs.
        is_list: They are several, named by their places.
        first: A field that holds the first of them; the list begins after it.
        beside: A field whose text is joined to each of them.
        cut: What has inputs cut that are too long.
    """

    name: str
    is_list: bool
    first: str | None = None
    beside: str | None = None
    cut: str = "set `truncate`"

    def named(self, refusal: Refusal, i: int) -> Refusal:
        """Why a request is refused, by its i-th input."""
        if refusal.kind in _OF_SERVER:
            return refusal
        name = self._name(i)
        text = f"{refusal}: {name}" if refusal.kind == "backend" else f"{name} {refusal}"
        more = f"; shorten it, or {self.cut}" if isinstance(refusal, TooLong) else ""
        return Refusal(refusal.kind, text + more, param=self.name)

    def all(self, found: Sequence[_T | Refusal], kind: type[_T]) -> list[_T]:
        """All of them.

        Raises:
            Refusal: One was refused: the first one's reason.
        """
        for i, one in enumerate(found):
            if isinstance(one, Refusal):
                raise self.named(one, i)
        return [one for one in found if isinstance(one, kind)]

    def each(self, work: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """What is made of each.

        Raises:
            Refusal: One is refused.
        """
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
