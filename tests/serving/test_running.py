"""How a server runs: what it warns of at the start; told to stop, it finishes what it can and refuses the rest."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llmcache.serving.keys import add_key
from llmcache.serving.running import Uvicorn
from llmcache.serving.server import Server
from tests.serving import decoders
from tests.serving.served import make_server, running


class Held:
    """Holds a model that is ready before its next call, or after a number of calls, until it is let go."""

    def __init__(self, server: Server, n_calls: int) -> None:
        self.is_held, self._release = threading.Event(), threading.Event()
        self._server, self._n_calls = server, n_calls
        server.model.register_forward_pre_hook(self._hold)

    def _hold(self, *_: Any) -> None:
        if self._server.phase == "starting" or threading.current_thread().name != "llmcache-model":
            return
        self._n_calls -= 1
        if self._n_calls < 0:
            self.is_held.set()
            assert self._release.wait(20)

    def let_go(self) -> None:
        self._release.set()


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        time.sleep(0.005)
    raise AssertionError("it does not come about")


@contextmanager
def serving(
    folder: Path, n_calls: int = 0, **settings: Any
) -> Iterator[tuple[Server, Held, Any, Callable[..., "Future[Any]"]]]:
    """A server that listens, a hold on its model, what stops it, and a way to ask it at once."""
    server = make_server(folder, **settings)
    held = Held(server, n_calls)
    with (
        ThreadPoolExecutor(8) as pool,
        running(server) as (uvicorn, url),
        httpx2.Client(base_url=url, timeout=20) as client,
    ):

        def ask(path: str, **body: Any) -> "Future[Any]":
            return pool.submit(client.post, path, json=body)

        try:
            yield server, held, lambda: uvicorn.handle_exit(signal.SIGTERM, None), ask
        finally:
            held.let_go()


def refused(answer: httpx2.Response) -> str:
    """Why a request was refused by a server that stops, in the dialect of its route."""
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    told = answer.json()["error"]
    return str(told if isinstance(told, str) else told["message"])


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged of errors, uvicorn's line on what it cancels aside."""
    return lambda: [
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.ERROR and not one.getMessage().startswith("Cancel ")
    ]


def test_what_runs_is_finished_and_what_waits_for_its_turn_is_refused(
    models: Path, errors: Callable[[], list[str]]
) -> None:
    body = {"max_tokens": 3, "ignore_eos": True}
    with serving(models / decoders.NAME, max_streams=1) as (server, held, stop, ask):
        assert server.decoder is not None
        first = ask("/v1/completions", prompt=[5, 6, 7], **body)
        assert held.is_held.wait(20)
        others = [ask("/v1/completions", prompt=[5, 6, 8 + i], **body) for i in range(3)]
        until(lambda: server.n_waiting == 3)
        stop()
        assert {refused(other.result()) for other in others} == {"the server is stopping: try again in a moment"}
        assert not first.done() and server.phase == "stopping"
        held.let_go()
        assert first.result().json()["usage"]["completion_tokens"] == 3
    assert server.phase == "stopped" and errors() == []


def test_a_generation_that_outlasts_the_grace_is_told_so(models: Path, errors: Callable[[], list[str]]) -> None:
    with serving(models / decoders.NAME, 4, max_streams=2, grace_s=0) as (server, held, stop, ask):
        body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        stream = ask("/v1/completions", prompt=[5, 6, 7], stream=True, **body)
        assert held.is_held.wait(20)
        whole = ask("/v1/completions", prompt=[5, 6, 8], **body)
        until(lambda: server.decoder is not None and server.decoder.n_running == 2)
        stop()
        assert "stopping" in refused(whole.result())
        *chunks, last, _ = stream.result().text.split("\n\n")
        assert len(chunks) > 1 and last.startswith("event: error\n") and "the server is stopping" in last
        held.let_go()
    assert errors() == []


@pytest.mark.slow
def test_what_an_encoder_has_not_computed_by_then_is_refused(models: Path, errors: Callable[[], list[str]]) -> None:
    with serving(models / "classifier", grace_s=0) as (server, held, stop, ask):
        asked = [ask("/predict", inputs="lost my card"), ask("/v1/classify", input="lost my cash")]
        assert held.is_held.wait(20)
        until(lambda: server.encoder is not None and len(server.encoder) == 2)
        stop()
        assert len({refused(one.result()) for one in asked}) == 1
        held.let_go()
    assert errors() == []


@pytest.mark.parametrize(
    ("host", "warns"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("a.example", True)],
)
def test_without_keys_an_address_that_others_reach_is_warned_of(
    host: str, warns: bool, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(models / "classifier")
    Uvicorn(server, host, 0)
    assert ("without keys" in caplog.text) == warns
    caplog.clear()
    add_key(tmp_path / "keys.yaml", "boss", "public", ("infer", "admin"))
    Uvicorn(make_server(models / "classifier", keys=tmp_path / "keys.yaml"), host, 0)
    assert caplog.text == ""
