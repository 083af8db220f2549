"""The interface of an engine, and the engine that runs the trunk's own forward."""

from collections.abc import Sequence
from typing import Any

from llmcache.models.callables import CallableTrunk
from llmcache.models.hooks import Swap
from llmcache.request.reading import Requests
from llmcache.request.rows import Row


class Engine:
    """Runs the trunk for rows without a hit. Thread-safe.

    Attributes:
        name: Part of the scope of computed rows, so that outputs of two engines are never mixed.
        holds_weights: Whether edits after `choose` change nothing: it has a copy of the weights of the digest given
            there, or runs a callable.
    """

    name: str = ""
    holds_weights: bool = False

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> "Engine":
        """Return the engine for a call of the trunk: itself, or another engine for calls that it does not cover.

        `digest` is that of the present weights; with `keeps_kv` the call must fill the caller's K/V cache.
        """
        return self

    def covering(self, requests: Requests) -> "Engine":
        """Return the engine for a call with these requests: itself, or another one if it does not cover them."""
        return self

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Return the trunk's output for these arguments, whose rows are `rows`."""
        raise NotImplementedError


class Eager(Engine):
    """The engine that runs the trunk's own forward."""

    def __init__(self, swap: Swap, name: str = "") -> None:
        """Remember the swap, whose replaced forward is run."""
        self._swap, self.name = swap, name
        self.holds_weights = isinstance(swap.module, CallableTrunk)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        return self._swap.original(*args, **kwargs)
