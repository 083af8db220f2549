"""`llmcache serve` as a process: it becomes ready, saves when it is told to stop, and starts with what was saved."""

import json
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

import psutil
import pytest

from tests.serving.served import write

pytestmark = pytest.mark.slow


@contextmanager
def _running(*args: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server on a free port, and its address once it is ready; it computes by itself, which is ready sooner."""
    settings = ("--port", "0", "--warmup-tokens", "8", *args)
    if "--model-process" not in args:
        settings = ("--no-model-process", *settings)
    command = [sys.executable, "-m", "llmcache", "serve", *settings]
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
        process.send_signal(signal.SIGKILL)  # what was saved before is whole
        process.wait()
    with _running(*args) as (_, url):
        assert _predict(url, "lost my card") == (computed, "HIT")


def test_a_process_of_its_own_computes_and_ends_with_the_server(tmp_path: Path) -> None:
    args = ("--model", str(write(tmp_path, "classifier")), "--model-process")
    with _running(*args[:2]) as (_, url):
        alone, _ = _predict(url, "lost my card")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with _running(*args, "--reveal-hits") as (process, url):
            (computing,) = (
                one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline())
            )
            computed = _predict(url, "lost my card")
            assert [one["label"] for one in computed[0]] == [one["label"] for one in alone]
            assert [one["score"] for one in computed[0]] == pytest.approx([one["score"] for one in alone], abs=1e-6)
            assert [computed[1], _predict(url, "lost my card")] == ["MISS", (computed[0], "HIT")]
            before = sum(computing.cpu_times()[:2])
            for i in range(60):  # a clock of processes ticks every 10 ms
                _predict(url, f"w{i}")
            assert sum(computing.cpu_times()[:2]) > before
            computing.send_signal(signal.SIGTERM)  # as a service manager sends it to all: what runs is finished first
            assert _predict(url, "card lost")[1] == "MISS"
            process.send_signal(number)
            process.wait(30)
            computing.wait(30)


def test_a_save_that_fails_is_told_by_the_exit_status(tmp_path: Path) -> None:
    model, save = write(tmp_path, "classifier"), tmp_path / "saved"
    with _running("--model", str(model), "--save", str(save)) as (process, _):
        shutil.rmtree(save)
        save.write_text("no folder any more")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [(("--model", "nothing"), "could not be loaded"), (("--model", "nothing", "--save", "file/saved"), "file/saved")],
    ids=["model", "save"],
)
def test_what_cannot_be_used_is_said_in_a_line(tmp_path: Path, more: tuple[str, ...], told: str) -> None:
    (tmp_path / "file").touch()
    command = [
        sys.executable,
        "-m",
        "llmcache",
        "serve",
        *(str(tmp_path / one) if one[0] != "-" else one for one in more),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
