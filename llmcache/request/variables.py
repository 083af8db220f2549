"""Context variables that hold a value for a while. What is set in a thread or async task is not seen by others."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within: the variable has this value; afterwards, the one that it had."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
