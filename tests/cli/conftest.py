"""Typed input for tests of conversations."""

import builtins
from collections.abc import Callable

import pytest


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Types lines into the conversation; raises lines that are exceptions."""

    def give(*lines: str | BaseException) -> None:
        left = iter(lines)

        def answer(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", answer)

    return give
