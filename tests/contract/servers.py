"""Runs `llmcache` commands and servers as a user does, each in a fork, so that libraries load once."""

import json
import logging
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.forks import fork

_PATIENCE_S = 60


class Answer(NamedTuple):
    """A server's response."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Command:
    """A running or finished command."""

    def __init__(self, process: int, output: Path) -> None:
        self._process, self._output = process, output
        self._url: str | None = None
        self.has_ended = False

    @property
    def output(self) -> str:
        """Everything printed and logged so far."""
        return self._output.read_text() if self._output.exists() else ""

    def wait(self, pattern: str) -> str:
        """Wait until the output matches a pattern; return its first group."""
        until = time.monotonic() + _PATIENCE_S
        while (found := re.search(pattern, self.output)) is None:
            assert time.monotonic() < until, f"no {pattern!r} in: {self.output}"
            time.sleep(0.02)
        return found.group(1)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a GET, or a POST if there is a JSON body."""
        self._url = self._url or self.wait(r"served on (http://\S+)")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                return Answer(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read().decode())

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; return the exit status. A command that does not end is killed."""
        os.kill(self._process, by)
        self.has_ended = True
        kill = threading.Timer(_PATIENCE_S, os.kill, (self._process, signal.SIGKILL))
        kill.start()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        finally:
            kill.cancel()

    def figure(self, name: str) -> float:
        """Return a figure of `/metrics`, summed over its labels."""
        found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", self.ask("/metrics").text, re.MULTILINE)
        assert found, f"no {name}"
        return sum(map(float, found))


class Commands:
    """Starts commands; kills them on close."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands: list[Command] = []

    def run(self, *arguments: str) -> Command:
        """Start `llmcache` with arguments."""
        output = self._folder / f"output{len(self._commands)}"
        if (child := fork()) == 0:
            _become(output, arguments)
        self._commands.append(Command(child, output))
        return self._commands[-1]

    def serve(self, model: Path, *options: str) -> Command:
        """Start a server on a free port; `Command.ask` waits until it is ready."""
        return self.run("serve", "--model", str(model), "--port", "0", *_QUICKLY, *options)

    def close(self) -> None:
        """Kill every started command."""
        for command in self._commands:
            if not command.has_ended:
                command.stop(signal.SIGKILL)


def _become(output: Path, arguments: Sequence[str]) -> NoReturn:
    """Run a command in this forked process, without the tests' tracing, logging and warning filters."""
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.settrace(None)
        warnings.resetwarnings()
        logging.getLogger().handlers.clear()
        sys.argv = ["llmcache", *arguments]
        runpy.run_module("llmcache", run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
        threading._shutdown()  # waits for threads, as at an interpreter's end
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


_QUICKLY: Sequence[str] = ("--warmup-tokens", "8", "--threads", "1")
