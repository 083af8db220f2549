"""What tests of conversations share."""

import builtins
from collections.abc import Callable

import pytest


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says lines to the conversation; an exception among them is raised instead."""

    def give(*lines: str | BaseException) -> None:
        left = iter(lines)

        def answer(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", answer)

    return give
