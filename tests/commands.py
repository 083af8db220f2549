"""The command line, called as a user does."""

from pathlib import Path

import pytest

from llmcache.cli import main as cli


def run_main(*args: str | Path) -> int:
    """The exit status of `llmcache` with these arguments."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(arg) for arg in args])
    return int(exit_info.value.code or 0)
