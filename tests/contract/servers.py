"""Runs `llmcache` commands and servers as a user does, each in a fork, so that libraries load once."""

import json
import logging
import os
import re
import runpy
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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

    def __init__(self, output: Path) -> None:
        self._output = output
        self._url: str | None = None

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

    def figure(self, name: str) -> float:
        """Return a figure of `/metrics`, summed over its labels."""
        found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", self.ask("/metrics").text, re.MULTILINE)
        assert found, f"no {name}"
        return sum(map(float, found))


class Commands:
    """Starts commands; kills them on close."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[int] = []

    def run(self, *arguments: str) -> Command:
        """Start `llmcache` with arguments."""
        output = self._folder / f"output{len(self._children)}"
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 and later warn of forks beside threads
            child = os.fork()
        if child == 0:
            _become(output, arguments)
        self._children.append(child)
        return Command(output)

    def serve(self, model: Path, *options: str) -> Command:
        """Start a server on a free port; `Command.ask` waits until it is ready."""
        return self.run("serve", "--model", str(model), "--port", "0", *_QUICKLY, *options)

    def close(self) -> None:
        """Kill every started command."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _become(output: Path, arguments: Sequence[str]) -> NoReturn:
    """Run a command in this forked process, without the tests' tracing, logging and warning filters."""
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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


_QUICKLY: Sequence[str] = ("--warmup-tokens", "8", "--threads", "1")
