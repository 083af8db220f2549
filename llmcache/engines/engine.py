"""The interface of an engine, and the engine that runs the trunk's own forward."""

from collections.abc import Sequence
from typing import Any, Protocol

from llmcache.models.hooks import Swap
from llmcache.request.reading import Requests
from llmcache.request.rows import Row


class Engine(Protocol):
    """Runs the trunk for rows without a hit. Thread-safe."""

    @property
    def name(self) -> str:
        """Part of the scope of computed rows, so that outputs of two engines are never mixed."""
        ...

    @property
    def holds_weights(self) -> bool:
        """Whether it has a copy of the weights of the digest given to `choose`, so that later edits change nothing."""
        ...

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> "Engine":
        """Return the engine for a call of the trunk: itself, or another engine for calls that it does not cover.

        `digest` is that of the present weights; with `keeps_kv` the call must fill the caller's K/V cache.
        """

    def covering(self, requests: Requests) -> "Engine":
        """Return the engine for a call with these requests: itself, or another one if it does not cover them."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output for these arguments, whose rows are `rows`."""


class Eager:
    """The engine that runs the trunk's own forward."""

    holds_weights = False

    def __init__(self, swap: Swap, name: str = "") -> None:
        """Remember the swap, whose replaced forward is run."""
        self._swap, self.name = swap, name

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        """Return itself."""
        return self

    def covering(self, requests: Requests) -> Engine:
        """Return itself."""
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Run the trunk's own forward."""
        return self._swap.original(*args, **kwargs)
