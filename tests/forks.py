"""Runs functions in forked processes: libraries load once."""

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def fork() -> int:
    """Fork as `os.fork`, without the warning of Python 3.12 and later about threads."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()


def in_child(act: Callable[..., Any], *args: object, patience_s: float = 60.0) -> Any:
    """Run a function in a forked process and return its result; kill the process if it takes too long.

    Raises:
        AssertionError: The function failed, or took too long.
    """
    listen, say = os.pipe()
    if (child := fork()) == 0:
        try:
            told = pickle.dumps((act(*args), None))
        except BaseException:
            told = pickle.dumps((None, traceback.format_exc()))
        with os.fdopen(say, "wb") as pipe:
            pipe.write(told)
        os._exit(0)
    os.close(say)
    with os.fdopen(listen, "rb") as pipe:
        is_told = bool(select.select([listen], [], [], patience_s)[0])
        if not is_told:
            os.kill(child, signal.SIGKILL)
        told = pipe.read()
    os.waitpid(child, 0)
    assert is_told, f"no answer in {patience_s} s"
    result, error = pickle.loads(told)
    assert error is None, error
    return result
