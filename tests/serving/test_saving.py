"""A server starts from what the last one left on the disk: a save that is whole, or one that was cut short."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from llmcache.errors import ConfigError, StoreError
from llmcache.folder import JOURNAL, MANIFEST
from llmcache.serving.app import create_app
from llmcache.serving.encoder import Output
from llmcache.serving.loading import load_served
from llmcache.serving.server import Server
from tests.saves import OURS, Died, edit_manifest, failing, names, read_manifest
from tests.serving.served import WORDS, make_server, within
from tests.serving.test_page import wait_for


async def _ask(server: Server, texts: tuple[str, ...]) -> list[Output]:
    """Each text by itself: what is computed at once rounds otherwise."""
    assert server.encoder is not None
    found = [(await server.encoder.run([text], "default", True, "right"))[0] for text in texts]
    return [one for one in found if isinstance(one, Output)]


@pytest.mark.slow
def test_a_save_that_dies_at_any_step_leaves_the_last_one_to_the_next_start(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server starts on a copy of what the one before it had on the disk when it died, one step later each time."""
    alone = load_served(str(models / "classifier"))
    saved: tuple[str, ...] = ()
    n_cut_short = 0
    (tmp_path / "0").mkdir()

    async def live_and_die(server: Server, at: int) -> tuple[list[Output], int]:
        left = tmp_path / str(at - 1)
        found = await _ask(server, WORDS[:at])
        with failing(monkeypatch, at, Died(), forever=True) as done, suppress(Died):
            server.saves.try_to_save(server.cache)
        shutil.copytree(left, tmp_path / str(at))
        return found, done[0]

    for at in range(1, 100):
        before = _manifest(tmp_path / str(at - 1))
        server = make_server(models / "classifier", {"auto_bypass": False}, save=tmp_path / str(at - 1))
        found, n_steps = within(server, partial(live_and_die, server, at))
        assert [one.rung for one in found[: len(saved)]] == ["exact"] * len(saved)
        for text, one in zip(WORDS, found, strict=False):
            with torch.inference_mode():
                own = alone.forward(dict(alone.tokenizer(text, return_tensors="pt")))
            assert np.array_equal(one.values, own[0].numpy())
        assert len(names(tmp_path / str(at - 1))) == OURS  # it saved when it was stopped, and tidied up
        if n_steps < at:
            break
        n_cut_short += JOURNAL in names(tmp_path / str(at))
        if _manifest(tmp_path / str(at)) != before:
            saved = WORDS[:at]
    assert at > 15 and n_cut_short > 10 and saved


def _manifest(folder: Path) -> Any:
    return read_manifest(folder) if (folder / MANIFEST).is_file() else None


@pytest.mark.parametrize("damage", ["cut short", "gone", "no manifest"])
def test_a_save_that_cannot_be_read_is_told_and_replaced(
    damage: str, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rungs() -> list[str | None]:
        server = make_server(models / "classifier", save=tmp_path / "save")
        return [one.rung for one in within(server, partial(_ask, server, ("card",)))]

    assert rungs() == [None]
    (path,) = (tmp_path / "save").glob("states-*")
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / "save" / MANIFEST).unlink()
    assert rungs() == [None]
    assert ("is not used" in caplog.text) == (damage != "no manifest")
    assert rungs() == ["exact"]


async def _ask_card(server: Server) -> str | None:
    """What served a text; None: it was computed."""
    return (await _ask(server, ("card",)))[0].rung


def _rung(folder: Path, cache: dict[str, Any] | None = None, **settings: Any) -> str | None:
    """What serves a text of a server that is started and stopped."""
    server = make_server(folder, cache, **settings)
    rung: str | None = within(server, partial(_ask_card, server))
    return rung


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def _altered(model: Path, folder: Path, tensor: str) -> Path:
    """A copy of a model, one tensor of which is another."""
    other = folder / "other"
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {tensor: tensors[tensor] + 1}, other / "model.safetensors", {"format": "pt"})
    return other


@pytest.mark.parametrize("unfit", ["model", "format", "setting", "field", "cut manifest", "foreign manifest"])
def test_a_save_of_another_model_or_version_is_not_used_and_stays(
    unfit: str, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save = tmp_path / "save"
    _rung(models / "classifier", save=save)
    model = models / "classifier"
    if unfit == "model":
        model = _altered(model, tmp_path, "bert.embeddings.word_embeddings.weight")
    elif unfit == "format":
        edit_manifest(save, format=99)
    elif unfit == "setting":
        edit_manifest(save, config={"max_bytes": 10_000_000, "nosuch": 1})
    elif unfit == "field":
        edit_manifest(save, nosuch=1)
    elif unfit == "cut manifest":
        (save / MANIFEST).write_bytes((save / MANIFEST).read_bytes()[:-9])
    elif unfit == "foreign manifest":
        (save / MANIFEST).unlink()
        (save / MANIFEST).mkdir()
    before = _contents(save)
    server = make_server(model, save=save, save_every_s=0.001)
    assert server.saves.is_kept
    with TestClient(create_app(server)) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/admin/save")
        assert answer.status_code == 422 and "stays" in answer.json()["error"]
        page = client.get("/").text
        assert "Nothing is saved: what the folder holds is not used, and stays." in page and ">Save<" not in page
    assert _contents(save) == before
    assert "stays as it is" in caplog.text and "wrap()" not in caplog.text
    assert not server.saves.has_failed


def test_settings_that_differ_from_those_of_the_save_are_refused_by_both_values(models: Path, tmp_path: Path) -> None:
    folder, saves = models / "classifier", {"save": tmp_path}
    assert _rung(folder, {"max_bytes": 10_000_000, "prefix_block": 8}, **saves) is None
    with pytest.raises(ConfigError, match=r"prefix_block is 4, and was 8.* Leave the settings out"):
        make_server(folder, {"max_bytes": 10_000_000, "prefix_block": 4}, **saves)
    server = make_server(folder, **saves)
    assert (server.cache.config.prefix_block, server.cache.config.max_bytes) == (8, 10_000_000)
    server.cache.unwrap()
    wanted = {"max_bytes": 5_000_000, "prefix_block": 8, "policy": "lfu"}
    server = make_server(folder, wanted, **saves)
    assert (server.cache.config.max_bytes, server.cache.config.policy.name) == (5_000_000, "lfu")
    assert within(server, partial(_ask_card, server)) == "exact"


def test_a_save_that_answers_for_another_head_is_not_taken_over(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trunk is the same: repeats would be served rightly, but what else is learned of answers is the head's."""
    other, save = _altered(models / "classifier", tmp_path, "classifier.weight"), tmp_path / "save"
    _rung(models / "classifier", {"learn": 1200, "answer": "class"}, save=save)
    server = make_server(other, save=save)
    assert server.saves.is_kept and server.cache.config.learn is None
    assert "a head with other weights" in caplog.text
    server.cache.unwrap()
    assert _rung(models / "classifier", save=save) == "exact"
    _rung(models / "classifier", save=tmp_path / "exact")
    assert _rung(other, save=tmp_path / "exact") == "exact"


def test_a_folder_that_cannot_be_written_is_told_before_the_model_is_loaded(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="nothing can be saved there: Not a directory"):
        make_server(models / "classifier", save=tmp_path / "file" / "save")


def test_a_failure_of_the_last_save_is_known(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(models / "classifier", save=tmp_path / "save")
    with TestClient(create_app(server)) as client:
        with failing(monkeypatch, 1, OSError("the disk is full"), forever=True):
            assert client.post("/admin/save").status_code == 424
            assert server.saves.has_failed and "The latest save failed" in client.get("/").text
        assert client.post("/admin/save").json() == {"saved": True}
        assert not server.saves.has_failed
        monkeypatch.setattr(server.cache, "save", _fails(StoreError("no space")))
    assert server.saves.has_failed and "could not be saved: no space" in caplog.text


def test_a_save_that_fails_in_another_way_is_told_and_tried_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(models / "classifier", save=tmp_path / "save", save_every_s=0.001)
    save = server.cache.save
    monkeypatch.setattr(server.cache, "save", _fails(RuntimeError("of what was asked")))
    with TestClient(create_app(server)):
        wait_for(lambda: caplog.text.count("could not be saved: RuntimeError") > 1)
        monkeypatch.setattr(server.cache, "save", save)
    assert not server.saves.has_failed and "asked" not in caplog.text


def _fails(error: Exception) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        raise error

    return save
