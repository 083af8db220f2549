"""`scoped` holds a context variable's value for a block; overlapping blocks are logged once."""

import logging
from contextvars import ContextVar

import pytest

from llmcache.support.context import scoped


def test_it_is_said_once_that_blocks_overlapped(caplog: pytest.LogCaptureFixture) -> None:
    variable: ContextVar[int] = ContextVar("overlapping", default=0)
    with caplog.at_level(logging.WARNING):
        with scoped(variable, 1), scoped(variable, 2):
            assert not caplog.messages
        for _ in range(2):
            first, second = scoped(variable, 1), scoped(variable, 2)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            second.__exit__(None, None, None)
    assert len(caplog.messages) == 1 and "overlapping" in caplog.text
