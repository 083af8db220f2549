"""Context variables that hold a value within a block. Other threads and async tasks do not see it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import cache
from typing import Any, TypeVar

from llmcache.request.rows import DEFAULT_NAMESPACE

T = TypeVar("T")

logger = logging.getLogger("llmcache")
DISABLE = "LLMCACHE_DISABLE"  # environment variable that turns caches off: it is set, and not to 0
#: Blocks of `setting` that are open in this context, oldest first: each with its variable and value.
_OPEN: ContextVar[tuple[tuple[ContextVar[Any], Any], ...]] = ContextVar("llmcache_open", default=())


class Switches:
    """What the blocks of one cache set: `namespace(...)`, `disabled()`, `only_if_cached()`."""

    def __init__(self) -> None:
        """Nothing is set, but what the environment says."""
        is_off = os.environ.get(DISABLE, "0") not in ("", "0")
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=is_off)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within: the variable has this value. Afterwards it has that of the last block that is still open, or its default.

    Generators that take turns end their blocks in any order, so a block does not put back the value that it found.
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
    if any(one is block for one in same):  # else it was opened in another context, in which it stays open
        _OPEN.set(tuple(one for one in blocks if one is not block))
        left = [one for one in same if one is not block]
        variable.set(left[-1][1] if left else Context().run(variable.get))


@cache
def _warn(name: str) -> None:
    """Say once that a block of a variable ended where another one was in force."""
    logger.warning(
        "a block that sets %s ended after one that began later, or in another thread or task: calls within it may have "
        "been made under the other one. Do not yield within such a block: enter it around each call",
        name,
    )
