"""Shared by the tests of experiments."""

import pytest

from tests.experiments.commands import Commands


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands of the program, run in this process."""
    return Commands(capsys)
