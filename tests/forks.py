"""Runs functions in forked processes: libraries load once."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


class NoAnswerError(AssertionError):
    """A forked process ended without a result."""


def fork() -> int:
    """Fork as `os.fork`, without the warning of Python 3.12 and later about threads."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()


def in_child(act: Callable[..., Any], *args: object, patience_s: int = 60) -> Any:
    """Run a function in a forked process and return its result.

    A process that takes longer writes where its threads are, and ends. So does an `in_child` within it.

    Raises:
        NoAnswerError: The process ended by itself, or took too long.
        AssertionError: The function failed.
    """
    listen, say = os.pipe()
    if (child := fork()) == 0:
        faulthandler.register(signal.SIGALRM, sys.__stderr__, chain=True)
        signal.alarm(patience_s)
        try:
            told = pickle.dumps((act(*args), None))
        except BaseException:
            told = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(say, "wb") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(say)
    with os.fdopen(listen, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not told:
        raise NoAnswerError(f"no answer in {patience_s} s" if status == -signal.SIGALRM else f"it ended with {status}")
    result, error = pickle.loads(told)
    assert error is None, error
    return result
