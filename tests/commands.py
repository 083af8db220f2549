"""Runs the command line in the test's process."""

from pathlib import Path

import pytest

from llmcache.cli import main as cli


def run_main(*args: str | Path) -> int:
    """Run `llmcache` with these arguments; return its exit status."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(arg) for arg in args])
    return int(exit_info.value.code or 0)
