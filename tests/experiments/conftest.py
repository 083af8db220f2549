"""Shared by the tests of experiments, all of which `make test-fast` leaves out."""

from pathlib import Path

import pytest

from tests.experiments.commands import Commands


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands of the program, run in this process."""
    return Commands(capsys)
