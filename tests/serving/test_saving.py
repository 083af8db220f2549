"""A server starts from the save of the last one, and never overwrites a save that does not fit."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llmcache.errors import ConfigError, StoreError
from llmcache.support.folder import MANIFEST
from tests.serving.served import client_of, make_server, write

BODY = {"inputs": "my card"}


def cached(folder: Path, cache: dict[str, Any] | None = None, **settings: Any) -> str:
    """Start a server, ask one text, stop the server; return `HIT` or `MISS`."""
    with client_of(make_server(folder, cache, reveal_hits=True, **settings)) as client:
        return str(client.post("/predict", json=BODY).raise_for_status().headers["x-cache"])


def edited(folder: Path, tensor: str) -> Path:
    """Return a copy of the classifier with one tensor changed."""
    other = write(folder / "other", "classifier")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {tensor: tensors[tensor] + 1}, other / "model.safetensors", {"format": "pt"})
    return other


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest"])
def test_a_save_that_cannot_be_read_is_told_and_replaced(
    damage: str, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = tmp_path / "save"
    assert cached(models / "classifier", save=save) == "MISS"
    assert cached(models / "classifier", save=save) == "HIT"
    (tensors,) = save.glob("*.safetensors")
    {"cut": cut, "gone": os.unlink, "no manifest": lambda _: (save / MANIFEST).unlink()}[damage](tensors)
    assert cached(models / "classifier", save=save) == "MISS"
    assert ("is not used" in caplog.text) == (damage != "no manifest")
    assert cached(models / "classifier", save=save) == "HIT"


@pytest.mark.parametrize("unfit", ["model", "cut manifest", "foreign manifest"])
def test_a_save_that_does_not_fit_is_not_used_and_stays(
    unfit: str, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save, model = tmp_path / "save", models / "classifier"
    cached(model, save=save)
    if unfit == "model":
        model = edited(tmp_path, "bert.embeddings.word_embeddings.weight")
    elif unfit == "cut manifest":
        cut(save / MANIFEST)
    else:
        (save / MANIFEST).unlink()
        (save / MANIFEST).mkdir()
    before = contents(save)
    server = make_server(model, save=save, save_every_s=0.001)
    with client_of(server) as client:
        answer = client.post("/admin/save")
        assert answer.status_code == 422 and "stays" in answer.json()["error"]
        page = client.get("/").text
        assert "Nothing is saved: the content of its folder is not used and is kept." in page and ">Save<" not in page
    assert contents(save) == before and "stays as it is" in caplog.text and not server.saves.has_failed


def test_settings_that_differ_from_those_of_the_save(models: Path, tmp_path: Path) -> None:
    folder, save = models / "classifier", tmp_path / "save"
    assert cached(folder, {"max_bytes": 10_000_000, "payload": "sequence"}, save=save) == "MISS"
    with pytest.raises(ConfigError, match="payload"):
        make_server(folder, {"max_bytes": 10_000_000, "payload": "cls"}, save=save)
    wanted = {"max_bytes": 5_000_000, "payload": "sequence", "policy": "lfu"}
    assert cached(folder, wanted, save=save) == "HIT"
    assert cached(folder, save=save) == "HIT"  # with the settings of the save


def test_saves_that_fail(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="nothing can be saved there: Not a directory"):
        make_server(models / "classifier", save=tmp_path / "file" / "save")
    server = make_server(models / "classifier", save=tmp_path / "save", save_every_s=0.001)
    save: Callable[[Path], None] = server.cache.save

    def fails(folder: Path) -> None:
        raise RuntimeError("of what was asked")

    monkeypatch.setattr(server.cache, "save", fails)
    with client_of(server) as client:
        while caplog.text.count("could not be saved: RuntimeError") < 2:
            time.sleep(0.01)
        assert server.saves.has_failed and "The latest save failed" in client.get("/").text
        monkeypatch.setattr(server.cache, "save", save)
    assert not server.saves.has_failed and "asked" not in caplog.text
