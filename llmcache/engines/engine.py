"""The interface of an engine, and the trunk as it is."""

from collections.abc import Sequence
from typing import Any, Protocol

from llmcache.models.hooks import Swap
from llmcache.request.rows import Row


class Engine(Protocol):
    """Runs the trunk for rows that nothing serves. Thread-safe."""

    @property
    def name(self) -> str:
        """Part of the scope of what it computes, so that outputs of two engines are never mixed."""
        ...

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> "Engine":
        """Return the engine for a call: itself, or another one for calls that it does not cover.

        Args:
            args: Of the trunk, by position.
            kwargs: Likewise, by name.
            digest: Of the weights as they are.
            keeps_kv: The caller is to hold K/V afterwards.
        """

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output for its arguments, which hold these rows."""


class Eager:
    """The trunk as it is."""

    def __init__(self, swap: Swap, name: str = "") -> None:
        """Run what the swap stands in for."""
        self._swap, self.name = swap, name

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        """Return itself."""
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Run the trunk's own forward."""
        return self._swap.original(*args, **kwargs)
