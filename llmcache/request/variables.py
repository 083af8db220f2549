"""Context variables that are set within a `with` block. Other threads and async tasks do not see the value."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from llmcache.errors import NotCachedError
from llmcache.request.rows import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from llmcache.request.call import Call

T = TypeVar("T")

logger = logging.getLogger("llmcache")
DISABLE = "LLMCACHE_DISABLE"  # environment variable: any value but "" and "0" turns caches off
#: The open `setting` blocks of this context, oldest first, each as (variable, value).
_OPEN: ContextVar[tuple[tuple[ContextVar[Any], Any], ...]] = ContextVar("llmcache_open", default=())


class Switches:
    """The variables behind `namespace(...)`, `disabled()` and `only_if_cached()` of one cache, and of its swaps."""

    def __init__(self) -> None:
        """Start with defaults; `LLMCACHE_DISABLE` sets the default of `is_disabled`."""
        is_off = os.environ.get(DISABLE, "0") not in ("", "0")
        self.namespace: ContextVar[str] = ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=is_off)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        #: Within the whole model's forward: closed trunk calls, to be observed with its output. Else None.
        self.seen: ContextVar[list[Call] | None] = ContextVar("llmcache_seen", default=None)
        #: That forward's arguments that its trunk does not take by name: labels, say.
        self.beside: ContextVar[Sequence[Any]] = ContextVar("llmcache_beside", default=())

    def check_cached(self, call: "Call") -> None:
        """Within `only_if_cached`, raise `NotCachedError` if a call has a row without a hit, or bypasses the cache."""
        if self.is_only_if_cached.get():
            found = call.hits if call.prefill is None else call.prefill.whole
            missing = tuple(row.number for row in call.rows if row.number not in found)
            if call.reason is not None or missing:
                raise NotCachedError(missing if call.reason is None else None)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
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
