"""Returns memory to the system that the C library's allocator holds between stored entries.

Small entries are allocated in gaps that a model's activations leave. The next activations no longer fit there, so the
heap grows, and it cannot shrink, since entries are at its end. An entry of 3 kB took 24 to 72 kB that way. The pages of
the gaps are free: glibc's `malloc_trim` returns them to the system. Other allocators are not touched.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import cast

_TRIM_EVERY = 1024  # stored entries, or an eighth of those held if that is more: a trim visits as many gaps as entries


class Trimmer:
    """Trims the heap now and then, as entries are stored."""

    def __init__(self) -> None:
        self._n_untrimmed = 0  # entries stored since the last time

    def stored(self, n_new: int, n_held: int) -> None:
        """Count new entries, and return free pages to the system if it is time. Call it without a lock."""
        self._n_untrimmed += n_new
        if self._n_untrimmed >= max(_TRIM_EVERY, n_held // 8):
            self._n_untrimmed = 0
            if (trim := _malloc_trim()) is not None:
                trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    with suppress(OSError, TypeError, AttributeError):  # no C library to load, or it lacks the function
        return cast(Callable[[int], int], ctypes.CDLL(None).malloc_trim)
    return None
