"""Runs `llmcache` commands, and servers, as a user does: one process loads the libraries and forks for each of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Reads lines of JSON, `[file of its output, argument, ...]`, and runs the command in a process of its own.
_RUN = """
import json, os, runpy, signal, sys
import fastapi, sentence_transformers, torch, transformers, uvicorn
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    output, *arguments = json.loads(line)
    if os.fork():
        continue
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, 1), os.dup2(file, 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = ["llmcache", *arguments]
    runpy.run_module("llmcache", run_name="__main__")
"""
_PATIENCE_S = 60


class Answer(NamedTuple):
    """What came of a request."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Command:
    """A command that runs, or has run."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._url: str | None = None

    @property
    def output(self) -> str:
        """All that it has printed and logged."""
        return self._output.read_text() if self._output.exists() else ""

    def wait(self, pattern: str) -> str:
        """The first group of a pattern, once it is printed."""
        until = time.monotonic() + _PATIENCE_S
        while (found := re.search(pattern, self.output)) is None:
            assert time.monotonic() < until, f"no {pattern!r} in: {self.output}"
            time.sleep(0.02)
        return found.group(1)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Ask a server: GET, or POST with a body of JSON."""
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
        """A figure of `/metrics`, summed over its labels."""
        found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", self.ask("/metrics").text, re.MULTILINE)
        assert found, f"no {name}"
        return sum(map(float, found))


class Commands:
    """Runs commands until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._n = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *arguments: str) -> Command:
        """Start `llmcache` with arguments."""
        self._n += 1
        output = self._folder / f"output{self._n}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(output), *arguments]) + "\n")
        self._process.stdin.flush()
        return Command(output)

    def serve(self, model: Path, *options: str) -> Command:
        """Start a server on a free port; `Command.ask` waits until it is ready."""
        return self.run("serve", "--model", str(model), "--port", "0", *_QUICKLY, *options)

    def close(self) -> None:
        """End all that was started."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait()


_QUICKLY: Sequence[str] = ("--no-model-process", "--warmup-tokens", "8", "--threads", "1")
