"""Context variables that are set within a `with` block. Other threads and async tasks do not see the value."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger("llmcache")
#: The open `scoped` blocks of this context, oldest first, each as (variable, value).
_OPEN: ContextVar[tuple[tuple[ContextVar[Any], Any], ...]] = ContextVar("llmcache_open", default=())


@contextmanager
def scoped(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable within a block. Afterwards it has the value of the newest block still open, or its default.

    A block does not restore the value it found: interleaved generators may end their blocks in any order.
    """
    block = (variable, value)
    _OPEN.set((*_OPEN.get(), block))
    variable.set(value)
    try:
        yield
    finally:
        _close(block)


def _close(block: tuple[ContextVar[Any], Any]) -> None:
    variable, blocks = block[0], _OPEN.get()
    same = [one for one in blocks if one[0] is variable]
    if not same or same[-1] is not block:
        _warn(variable.name)
    if any(one is block for one in same):  # else it was opened in another context and stays open there
        _OPEN.set(tuple(one for one in blocks if one is not block))
        left = [one for one in same if one is not block]
        variable.set(left[-1][1] if left else Context().run(variable.get))


@cache
def _warn(name: str) -> None:
    """Warn, once per variable, that a block ended while it was not the newest."""
    logger.warning(
        "a block that sets %s ended before one that began later, or in another thread or task: calls within it may "
        "have used the other's value. Do not yield within such a block: enter it around each call",
        name,
    )
