"""`llmcache serve` as a process: it becomes ready, saves on SIGTERM, and starts from the save."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_main
from tests.serving.served import write

pytestmark = pytest.mark.slow


@contextmanager
def _running(*args: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a server on a free port; yield process and address when it is ready."""
    command = [sys.executable, "-m", "llmcache", "serve", "--port", "0", "--warmup-tokens", "8", *args]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"http://\S+", line):
                yield process, found.group()
                break
        else:
            raise AssertionError("".join(log))
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _predict(url: str, text: str) -> tuple[Any, str]:
    request = urllib.request.Request(
        f"{url}/predict", json.dumps({"inputs": text}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer), answer.headers["X-Cache"]


def test_a_stop_saves_and_the_next_start_serves_what_was_saved(tmp_path: Path) -> None:
    """If the save fails, the exit status is 1."""
    model, save = write(tmp_path, "classifier"), tmp_path / "saved"
    args = ("--model", str(model), "--save", str(save), "--reveal-hits")
    with _running(*args) as (process, url):
        computed, how = _predict(url, "lost my card")
        assert how == "MISS"
        assert urllib.request.urlopen(f"{url}/health").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with _running(*args) as (process, url):
        assert _predict(url, "lost my card") == (computed, "HIT")
        shutil.rmtree(save)
        save.write_text("no folder any more")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [(("--model", "nothing"), "could not be loaded"), (("--model", "nothing", "--save", "file/saved"), "file/saved")],
    ids=["model", "save"],
)
def test_what_cannot_be_used_is_said_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    more: tuple[str, ...],
    told: str,
) -> None:
    caplog.set_level(logging.INFO, "llmcache")  # the command sets this level; caplog restores it
    (tmp_path / "file").touch()
    assert run_main("serve", *(str(tmp_path / one) if one[0] != "-" else one for one in more)) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error
