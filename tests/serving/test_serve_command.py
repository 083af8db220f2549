"""`llmcache serve` as a process: it becomes ready, saves on SIGTERM, and starts from the save."""

import logging
import shutil
import socket
from pathlib import Path

import pytest

from tests.commands import run_main
from tests.contract.servers import Commands

pytestmark = pytest.mark.slow


def test_a_stop_saves_and_the_next_start_serves_what_was_saved(models: Path, tmp_path: Path) -> None:
    """If the save fails, the exit status is 1."""
    save, commands, body = tmp_path / "saved", Commands(tmp_path), {"inputs": "lost my card"}
    try:
        options = ("--save", str(save), "--reveal-hits", "--access-log", "--cors-allow-origin", "https://shop.example")
        options += ("--model-alias", "text-embedding-3-small", "--model-alias", "b")
        server = commands.serve(models / "classifier", *options)
        computed = server.ask("/predict", body)
        assert computed.headers["X-Cache"] == "MISS" and server.ask("/health").status == 200
        assert server.stop() == 0
        server = commands.serve(models / "classifier", *options)
        served = server.ask("/predict", body)
        assert (served.json, served.headers["X-Cache"]) == (computed.json, "HIT")
        asked = server.ask("/predict", body, Origin="https://shop.example")
        assert asked.headers["Access-Control-Allow-Origin"] == "https://shop.example"
        names = [one["id"] for one in server.ask("/v1/models").json["data"]]
        assert names == [str(models / "classifier"), "text-embedding-3-small", "b"]
        server.wait(r"(restored 1 requests from .* in [0-9.]+ s)")
        server.wait(r"(warmed up in [0-9.]+ s)")
        server.wait(r"(POST /predict 200 [0-9.]+ ms, anyone, [0-9a-f]{32})")
        shutil.rmtree(save)
        save.write_text("no folder any more")
        assert server.stop() == 1
    finally:
        commands.close()


def test_an_engine_and_a_draft_are_options_with_a_save_and_without(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMCACHE_HOME", str(tmp_path / "home"))
    settings, commands = tmp_path / "settings.yaml", Commands(tmp_path)
    settings.write_text("{max_entries: 7}")
    saving = ("--save", str(tmp_path / "saved"))
    try:
        server = commands.serve(models / "classifier", *saving, "--config", str(settings))
        answer = server.ask("/predict", {"inputs": "lost my card"}).json
        assert server.ask("/info").json["engine"] == "eager" and server.stop() == 0
        server = commands.serve(models / "classifier", *saving, "--engine", "onnxruntime")
        server.wait(r"(restored 1 requests)")  # with its settings
        computed = server.ask("/predict", {"inputs": "lost my card"}).json
        assert [one["score"] for one in computed] == pytest.approx([one["score"] for one in answer], abs=1e-4)
        assert server.ask("/info").json["engine"].startswith("onnxruntime ") and server.stop() == 0
        server = commands.serve(models / "classifier", "--draft", "int8")
        server.wait(r"(the draft serves nothing without a calibration)")
        assert server.ask("/info").json["draft"] is None and server.stop() == 0
    finally:
        commands.close()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--model", "nothing"), "could not be loaded"),
        (("--model", "nothing", "--save", "file/saved"), "file/saved"),
        (("--model", "nothing", "--cors-allow-origin", "nothing"), "give * or scheme://host[:port]"),
        (("--model", "nothing", "--host=192.0.2.1"), "--host 192.0.2.1 --port 0: no server can listen there"),
        (("--model", "nothing", "--port={taken}"), "if the port is taken, stop what holds it"),
    ],
    ids=["model", "save", "origin", "host", "port"],
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
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = [one.format(taken=other.getsockname()[1]) if one[0] == "-" else str(tmp_path / one) for one in more]
        assert run_main("serve", "--port=0", *given) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error
