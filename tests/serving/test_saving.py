"""A server starts from the save of the last one, and never overwrites a save that does not fit."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmcache import LLMCache
from llmcache.errors import ConfigError, StoreError
from llmcache.serving.loading import Served
from llmcache.serving.running import Uvicorn
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server
from llmcache.support.folder import MANIFEST
from tests.commands import run_main
from tests.contract.servers import Commands
from tests.contract.streams import calibrated, classifier
from tests.fixtures import Log, Patch, Shown
from tests.serving.served import Client, make_server, write

BODY = {"inputs": "my card"}


def cached(folder: Path, cache: dict[str, Any] | None = None, **settings: Any) -> str:
    """Start a server, ask one text, stop the server; return `HIT` or `MISS`."""
    with Client(make_server(folder, cache, reveal_hits=True, **settings)) as client:
        return str(client.post("/predict", json=BODY).raise_for_status().headers["x-cache"])


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.fixture(scope="module")
def known(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save of a server; copy it."""
    folder = tmp_path_factory.mktemp("known") / "save"
    assert cached(models / "classifier", {"max_entries": 7}, save=folder) == "MISS"
    return folder


@pytest.fixture
def save(known: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(known, tmp_path / "save"))


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest"])
def test_a_save_that_cannot_be_read_is_told_and_replaced(damage: str, models: Path, save: Path, caplog: Log) -> None:
    (tensors,) = save.glob("*.safetensors")
    {"cut": cut, "gone": os.unlink, "no manifest": lambda _: (save / MANIFEST).unlink()}[damage](tensors)
    assert cached(models / "classifier", save=save) == "MISS"
    assert ("is not used" in caplog.text) == (damage != "no manifest")
    assert cached(models / "classifier", save=save) == "HIT"


@pytest.mark.parametrize("unfit", ["model", "cut manifest", "foreign manifest"])
def test_a_save_that_does_not_fit_is_not_used_and_stays(
    unfit: str, models: Path, save: Path, tmp_path: Path, caplog: Log
) -> None:
    model = models / "classifier"
    if unfit == "model":
        model = write(tmp_path / "edited", "classifier")
        tensors = load_file(model / "model.safetensors")
        tensors["bert.embeddings.word_embeddings.weight"] += 1
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    elif unfit == "cut manifest":
        cut(save / MANIFEST)
    else:
        (save / MANIFEST).unlink()
        (save / MANIFEST).mkdir()
    before = contents(save)
    server = make_server(model, save=save, save_every_s=0.001)
    with Client(server) as client:
        answer = client.post("/admin/save")
        assert answer.status_code == 422 and "stays" in answer.json()["error"]
        page = client.get("/").text
        assert "Nothing is saved: the content of its folder is not used and is kept." in page and ">Save<" not in page
    assert contents(save) == before and "stays as it is" in caplog.text and not server.saves.has_failed


def test_settings_that_differ_from_those_of_the_save(models: Path, save: Path) -> None:
    folder = models / "classifier"
    with pytest.raises(ConfigError, match="payload"):
        make_server(folder, {"payload": "sequence"}, save=save)
    assert cached(folder, {"max_bytes": 5_000_000, "policy": "lfu"}, save=save) == "HIT"
    assert cached(folder, save=save) == "HIT"  # with the settings of the save


def test_a_calibration_that_does_not_serve_with_the_settings_stays_in_the_save(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    with calibrated() as cache:
        cache.save(tmp_path)
    monkeypatch.setattr(LLMCache, "calibration", property(lambda self: None))  # as under another engine
    saves = Saves(tmp_path)
    saves.attach_cache(Served("classifier", classifier(), None, 32), None, engine="eager").unwrap()
    assert saves.is_kept and "nothing is saved, so it stays" in caplog.text


def test_saves_that_fail(models: Path, tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="nothing can be saved there: Not a directory"):
        make_server(models / "classifier", save=tmp_path / "file" / "save")
    server = make_server(models / "classifier", save=tmp_path / "save", save_every_s=0.001)
    save: Callable[[Path], None] = server.cache.save

    def fails(folder: Path) -> None:
        raise StoreError(f"no space left at {folder}") if n_saves else RuntimeError("of what was asked")

    n_saves = 0
    monkeypatch.setattr(server.cache, "save", fails)
    with Client(server) as client:
        while caplog.text.count("could not be saved: RuntimeError") < 2:
            time.sleep(0.01)
        assert server.saves.has_failed and "The latest save failed" in client.get("/").text
        n_saves = 2
        answer = client.post("/admin/save")
        assert answer.status_code == 424 and "log says why" in answer.json()["error"]
        assert str(server.settings.save) not in answer.text and str(server.settings.save) in caplog.text
        monkeypatch.setattr(server.cache, "save", save)
        assert client.post("/admin/save").json() == {"saved": True}
    assert not server.saves.has_failed and "asked" not in caplog.text and "Traceback" not in caplog.text
    with Client(make_server(models / "classifier")) as client:
        answer = client.post("/admin/save")
    assert answer.status_code == 422 and "--save" in answer.json()["error"]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_is_stopped_saves_and_the_next_one_serves_what_was_saved(models: Path, tmp_path: Path) -> None:
    """If the save fails, the exit status is 1."""
    save, commands = tmp_path / "saved", Commands(tmp_path)
    try:
        options = ("--save", str(save), "--reveal-hits", "--access-log", "--cors-allow-origin", "https://shop.example")
        options += ("--model-alias", "text-embedding-3-small", "--model-alias", "b")
        server = commands.serve(models / "classifier", *options)
        computed = server.ask("/predict", BODY)
        assert computed.headers["X-Cache"] == "MISS" and server.ask("/health").status == 200
        assert server.stop() == 0
        server = commands.serve(models / "classifier", *options)
        served = server.ask("/predict", BODY, Origin="https://shop.example")
        assert (served.json, served.headers["X-Cache"]) == (computed.json, "HIT")
        assert served.headers["Access-Control-Allow-Origin"] == "https://shop.example"
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


@pytest.fixture
def served_by(monkeypatch: Patch, caplog: Log) -> Callable[..., Server]:
    """Returns the server that a command makes, not started."""
    caplog.set_level(logging.INFO, "llmcache")  # the command sets this level; caplog restores it
    made: list[Server] = []
    monkeypatch.setattr(Uvicorn, "run", lambda self: made.append(self._server))

    def run(*options: str | Path) -> Server:
        assert run_main("serve", "--port=0", "--threads=1", *options) == 0
        made[-1].cache.unwrap()
        return made[-1]

    return run


def test_an_engine_and_a_draft_are_options_with_a_save_and_without(
    models: Path, save: Path, served_by: Callable[..., Server], caplog: Any, capsys: Shown
) -> None:
    model, settings = ("--model", models / "classifier"), save.parent / "settings.yaml"
    config = served_by(*model, "--save", save, "--engine", "eager").cache.config
    assert config.max_entries == 7 and "restored 1 requests" in caplog.text  # with the settings of the save
    assert run_main("serve", "--port=0", *model, "--save", save, "--draft", "int8") == 2
    assert "saved with other settings than those given: draft is" in capsys.readouterr().err
    settings.write_text("{max_entries: 9, engine: onnxruntime}")
    config = served_by(*model, "--config", settings, "--engine", "eager", "--draft", "int8").cache.config
    assert (config.engine.name, config.max_entries, config.draft is None) == ("eager", 9, False)
    assert "the draft serves nothing without a calibration" in caplog.text


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
    tmp_path: Path, capsys: Shown, caplog: Log, more: tuple[str, ...], told: str
) -> None:
    caplog.set_level(logging.INFO, "llmcache")  # the command sets this level; caplog restores it
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = [one.format(taken=other.getsockname()[1]) if one[0] == "-" else str(tmp_path / one) for one in more]
        assert run_main("serve", "--port=0", *given) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error
