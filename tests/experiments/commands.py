"""Commands of the program, run in this process."""

from pathlib import Path

import pytest

from llmcache.cli.main import main


class Commands:
    """Runs commands, and keeps what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = self.err = ""
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> int:
        """The exit status."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        self.out, self.err = self._capsys.readouterr()
        return int(done.value.code or 0)

    def refused(self, *words: str | Path) -> str:
        """The one line that a command is refused with, which comes last, after the program's name."""
        assert (self(*words), self.out) == (2, "")
        lines = self.err.splitlines()  # transformers may say something before
        assert [line.startswith("llmcache: ") for line in lines].count(True) == 1
        return lines[-1].removeprefix("llmcache: ")
