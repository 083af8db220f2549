"""Runs commands of the program in this process."""

from pathlib import Path

import pytest

from llmcache.cli.main import main


class Commands:
    """Runs commands; keeps the output of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = self.err = ""
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> int:
        """Run a command; return its exit status."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        self.out, self.err = self._capsys.readouterr()
        return int(done.value.code or 0)

    def refused(self, *words: str | Path) -> str:
        """Run a command that must fail; return its one-line error without the program's name."""
        assert (self(*words), self.out) == (2, "")
        lines = self.err.splitlines()  # transformers may print before it
        assert [line.startswith("llmcache: ") for line in lines].count(True) == 1
        return lines[-1].removeprefix("llmcache: ")
